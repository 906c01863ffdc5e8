"""What scripts written for TRL import beside its trainers: arguments, their parser, and helpers."""

import os
import sys
from argparse import SUPPRESS
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from peft import LoraConfig
from transformers import BitsAndBytesConfig, HfArgumentParser

from tropism.errors import UsageError


@dataclass
class ModelConfig:
    """TRL's arguments of the model."""

    model_name_or_path: str | None = None
    model_revision: str = "main"
    dtype: str | None = field(default="float32", metadata={"choices": ["auto", "bfloat16", "float16", "float32"]})
    attn_implementation: str | None = None
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: list[str] | None = None
    lora_target_parameters: list[str] | None = None
    lora_modules_to_save: list[str] | None = None
    lora_task_type: str = "CAUSAL_LM"
    use_rslora: bool = False
    use_dora: bool = False
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = field(default="nf4", metadata={"choices": ["fp4", "nf4"]})
    use_bnb_nested_quant: bool = False
    bnb_4bit_quant_storage: str | None = None

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise UsageError("load_in_8bit and load_in_4bit exclude each other. Remove one of them.")
        targets = self.lora_target_modules
        if targets is not None and len(targets) == 1:  # all-linear, or a pattern
            self.lora_target_modules = targets[0]  # type: ignore[assignment]


@dataclass
class ScriptArguments:
    """TRL's arguments of the data."""

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_streaming: bool = False
    ignore_bias_buffers: bool = False


@dataclass
class DatasetConfig:
    """One dataset of a mixture."""

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: Any = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


@dataclass
class DatasetMixtureConfig:
    """Datasets to join, in a configuration file."""

    datasets: list[DatasetConfig] = field(default_factory=list, metadata={"help": SUPPRESS})
    streaming: bool = False
    test_split_size: float | None = None

    def __post_init__(self) -> None:
        self.datasets = [DatasetConfig(**one) if isinstance(one, dict) else one for one in self.datasets]


class TrlParser(HfArgumentParser):
    """Parses dataclasses from the command line and from `--config FILE`, whose values replace the defaults."""

    def parse_args_and_config(self, args: Sequence[str] | None = None, return_remaining_strings: bool = False,
                              fail_with_unknown_args: bool = True, separate_remaining_strings: bool = False) -> Any:
        """The dataclasses, filled. `env` in the file sets environment variables.

        Raises:
            UsageError: if the file is not a mapping, or has a name that no dataclass has.
        """
        words = list(sys.argv[1:] if args is None else args)
        unknown: list[str] = []
        if "--config" in words:
            place = words.index("--config")
            path = [*words[place : place + 2], ""][1]
            del words[place : place + 2]
            unknown = self._take_defaults(Path(path))
        found = self.parse_args_into_dataclasses(words, return_remaining_strings=return_remaining_strings)
        if return_remaining_strings:
            return (*found[:-1], unknown, found[-1]) if separate_remaining_strings else (
                *found[:-1], unknown + found[-1])
        if unknown and fail_with_unknown_args:
            raise UsageError(f"{path}: unknown names: {', '.join(unknown[::2])}. Remove them.")
        return found

    def _take_defaults(self, path: Path) -> list[str]:
        """Use the values of a file as defaults. Returns those of no dataclass, as they would be typed."""
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise UsageError(f"{path}: the configuration cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise UsageError(f"{path}: a configuration must be a mapping of names to values")
        os.environ.update({str(name): str(value) for name, value in (values.pop("env", None) or {}).items()})
        for action in self._actions:
            if action.dest in values:
                action.default, action.required = values.pop(action.dest), False
        return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def get_peft_config(model_args: Any) -> LoraConfig | None:
    """The adapter of TRL's arguments; None without `use_peft`."""
    if not model_args.use_peft:
        return None
    return LoraConfig(
        task_type=model_args.lora_task_type, r=model_args.lora_r, lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout, target_modules=model_args.lora_target_modules,
        target_parameters=model_args.lora_target_parameters, modules_to_save=model_args.lora_modules_to_save,
        use_rslora=model_args.use_rslora, use_dora=model_args.use_dora, bias="none")


def get_quantization_config(model_args: Any) -> BitsAndBytesConfig | None:
    """The quantization of TRL's arguments; None without `load_in_4bit` and `load_in_8bit`."""
    if model_args.load_in_4bit:
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
                                  bnb_4bit_compute_dtype=model_args.dtype,
                                  bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
                                  bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage)
    return BitsAndBytesConfig(load_in_8bit=True) if model_args.load_in_8bit else None


def get_dataset(mixture_config: Any) -> Any:
    """The datasets of a mixture, joined: a `DatasetDict` with train and, with `test_split_size`, test.

    Raises:
        UsageError: if the mixture is empty, or only some of its datasets have a fraction.
    """
    import datasets

    entries = mixture_config.datasets
    fractions = [one.fraction for one in entries if one.fraction is not None]
    if not entries:
        raise UsageError("datasets: the mixture is empty. Add an entry with a path.")
    if fractions and (len(fractions) < len(entries) or mixture_config.streaming):
        raise UsageError("datasets: set fraction for all datasets of the mixture, without streaming, or for none")
    parts = []
    for one in entries:
        part = datasets.load_dataset(path=one.path, name=one.name, data_dir=one.data_dir, data_files=one.data_files,
                                     split=one.split, streaming=mixture_config.streaming)
        parts.append(part if one.columns is None else part.select_columns(one.columns))
    if fractions:  # shares of the mixture, of which no dataset gives more rows than it has
        shares = [fraction / sum(fractions) for fraction in fractions]
        total = min(len(part) / share for part, share in zip(parts, shares, strict=True) if share > 0)
        parts = [part.select(range(round(share * total))) for part, share in zip(parts, shares, strict=True)]
    joined = datasets.concatenate_datasets(parts)
    if mixture_config.test_split_size is not None:
        return joined.train_test_split(test_size=mixture_config.test_split_size)
    return datasets.DatasetDict({"train": joined})
