"""TRL's config classes, without TRL: the arguments of transformers with TRL's further fields and defaults."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from transformers import TrainingArguments

from tropism.compat.trl.fields import fields_of, is_off
from tropism.compat.trl.older import check_names
from tropism.compat.trl.process import Process
from tropism.distributed import connect
from tropism.errors import UsageError
from tropism.observe.rundir import free_name


@dataclass
class _Config(TrainingArguments):
    """Fields that all of TRL's configs share.

    Raises:
        UsageError: for a field that is refused, before transformers reads it.
    """

    method: ClassVar[str]
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs",
                                               "tropism_options"]

    output_dir: str | None = None
    logging_steps: float = 10
    gradient_checkpointing: bool | None = True
    bf16: bool | None = None
    lr_scheduler_kwargs: dict[str, Any] | str | None = None
    model_init_kwargs: dict[str, Any] | str | None = None
    trust_remote_code: bool = False
    router_aux_loss_coef: float | None = None
    dataset_num_proc: int | None = None
    max_length: int | None = 1024
    pad_to_multiple_of: int | str | None = "auto"
    activation_offloading: bool = False
    tropism_options: dict[str, Any] | str | None = field(default=None, metadata={
        "help": "Options of Tropism by name. They win over the other fields. batch_size stays the same on any number "
                "of processes."})

    def __new__(cls, *arguments: Any, **given: Any) -> Self:
        """Refuse fields of other versions of TRL by name."""
        check_names(cls.__name__, given, cls.__dataclass_fields__, "field")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for entry in fields(self):
            if isinstance(value := getattr(self, entry.name), str) and isinstance(entry.default, float):
                try:  # 1e-4 is a text in YAML
                    setattr(self, entry.name, float(value))
                except ValueError:
                    raise UsageError(f"{entry.name}={value!r} is not a number") from None
        if self.bf16 and not torch.cuda.is_available():
            self.use_cpu = True  # transformers wants to hear it
        check_refused(self, self.method)
        if not self.output_dir:
            self.output_dir = str(free_name(Path("trainer_output")))
        if getattr(self, "activation_checkpointing", self.gradient_checkpointing) is None:  # not the deprecated name
            self.activation_checkpointing = self.gradient_checkpointing
        if Process().num_processes > 1:  # first, with our backends: transformers joins the group that exists
            with connect(stay=True):
                pass
        super().__post_init__()


@dataclass
class _PreferenceConfig(_Config):
    """Fields of TRL's configs with a reference."""

    learning_rate: float = 1e-6
    disable_dropout: bool = True
    precompute_ref_log_probs: bool = False
    precompute_ref_batch_size: int | None = None
    beta: float = 0.1
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512


@dataclass
class KTOConfig(_PreferenceConfig):
    """TRL's `KTOConfig`. `docs/coming-from/trl.md` says what each field is here."""

    method: ClassVar[str] = "kto"

    train_sampling_strategy: str = "sequential"
    loss_type: str = "kto"
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


@dataclass
class DPOConfig(_PreferenceConfig):
    """TRL's `DPOConfig`. `docs/coming-from/trl.md` says what each field is here."""

    method: ClassVar[str] = "dpo"

    truncation_mode: str = "keep_start"
    padding_free: bool = False
    loss_type: list[str] = field(default_factory=lambda: ["sigmoid"])
    loss_weights: list[float] | None = None
    ld_alpha: float | None = None
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    label_smoothing: float = 0.0
    use_weighting: bool = False
    discopop_tau: float = 0.05
    pad_token: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.loss_type, str):
            self.loss_type = [self.loss_type]
        super().__post_init__()


@dataclass
class SFTConfig(_Config):
    """TRL's `SFTConfig`. `docs/coming-from/trl.md` says what each field is here."""

    method: ClassVar[str] = "sft"
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*_Config._VALID_DICT_FIELDS, "dataset_kwargs"]

    learning_rate: float = 2e-5
    chat_template_path: str | None = None
    dataset_text_field: str = "text"
    dataset_kwargs: dict[str, Any] | str | None = None
    eos_token: str | None = None
    truncation_mode: str = "keep_start"
    shuffle_dataset: bool = False
    packing: bool = False
    packing_strategy: str = "bfd"
    padding_free: bool = False
    eval_packing: bool | None = None
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    loss_type: str = "nll"
    pad_token: str | None = None


@dataclass
class GKDConfig(SFTConfig):
    """TRL's `GKDConfig`. `docs/coming-from/trl.md` says what each field is here."""

    method: ClassVar[str] = "gkd"
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*SFTConfig._VALID_DICT_FIELDS, "teacher_model_init_kwargs"]

    temperature: float = 0.9
    lmbda: float = 0.5
    beta: float = 0.5
    max_new_tokens: int = 128
    teacher_model_name_or_path: str | None = None
    teacher_model_init_kwargs: dict[str, Any] | str | None = None
    disable_dropout: bool = True
    seq_kd: bool = False


CONFIGS: dict[str, type[_Config]] = {"kto": KTOConfig, "dpo": DPOConfig, "sft": SFTConfig, "gkd": GKDConfig}
"""The config class of each method."""


def config_of(args: Any, method: str) -> Any:
    """The config of a trainer: given, or its default one. `SFTTrainer` takes `TrainingArguments`, too, as in TRL.

    Raises:
        UsageError: for a config of another trainer.
    """
    config = CONFIGS[method]
    if args is None or config.__name__ in {cls.__name__ for cls in type(args).__mro__}:
        return config() if args is None else args
    if method == "sft" and type(args) is TrainingArguments:
        return config(**{entry.name: getattr(args, entry.name) for entry in fields(args) if entry.init})
    raise UsageError(f"args must be a {config.__name__}, not {type(args).__name__}")


def check_refused(args: Any, method: str) -> None:
    """Check that no field that is refused has a value with an effect.

    Args:
        args: a config of ours or of TRL, by its attributes.

    Raises:
        UsageError: naming all of them, with what to do.
    """
    ours = CONFIGS[method].__dataclass_fields__
    found = [f"{name}={getattr(args, name)!r} is not supported: {entry.text}"
             for name, entry in fields_of(method).items()
             if entry.fate == "refused" and name in ours and hasattr(args, name)
             and not is_off(getattr(args, name), ours[name].default)]
    if found:
        raise UsageError(". ".join(found) + ("." if len(found) > 1 or ". " in found[0] else ""))
