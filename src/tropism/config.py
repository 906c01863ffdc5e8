"""The options of each command, composed from their groups, and how a wrong one is reported."""

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from tropism.argument_names import ALIASES, VALUES, instead, value_of
from tropism.data.formats import View
from tropism.data.formats.options import FormatOptions
from tropism.data.options import DataOptions
from tropism.data.sources.resolve import absolute
from tropism.data.tokenization.chat_template import PromptOptions, TemplateOptions
from tropism.data.tokenization.truncate import LengthOptions
from tropism.errors import UsageError
from tropism.methods.options import check_options, rows_of_losses
from tropism.model.options import RATE_OF_ADAPTERS, GenerationOptions, LoraOptions, is_adapter
from tropism.options import Everyday, Options
from tropism.train.options import ParallelOptions, ReferenceOptions, RunOptions, StoreOptions, TeacherOptions

Weight = Annotated[float, Field(gt=0.0)] | Literal["auto"]
_PATHS = ("output", "store", "model", "reference", "teacher", "log_dir", "chat_template")
_SHOWN = 200  # characters of a value in an error
_MADE_BY_US = ("output", "store", "log_dir")


class MethodOptions(DataOptions, RunOptions, StoreOptions):
    """Options of all methods."""

    method: ClassVar[str]
    view: ClassVar[View]

    @field_validator(*VALUES, mode="before", check_fields=False)
    @classmethod
    def _of_other_trainers(cls, value: Any, info: ValidationInfo) -> Any:
        """Values by our names."""
        return value_of(str(info.field_name), value)

    @field_validator("evaluator", "loss", "loss_weights", "track", mode="before", check_fields=False)
    @classmethod
    def _joined(cls, value: Any) -> Any:
        """Join a list from Python or YAML with commas, as the command line writes it."""
        if isinstance(value, list | tuple):
            return ",".join(str(entry).strip() for entry in value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        return value.replace(" ", "") if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _rate_of_adapters(cls, values: Any) -> Any:
        """Set the default learning rate of adapters, which is higher, if none is given."""
        if not isinstance(values, Mapping) or "learning_rate" in values:
            return values
        lora = values.get("lora") or {}
        given = lora.model_dump() if isinstance(lora, LoraOptions) else lora if isinstance(lora, Mapping) else {}
        adapts = given.get("rank") is not None or given.get("adapter") is not None or is_adapter(values.get("model"))
        return {**values, "learning_rate": RATE_OF_ADAPTERS} if adapts else values

    @model_validator(mode="after")
    def _effective(self) -> "MethodOptions":
        """Refuse options that would have no effect."""
        check_options(self.view, self.values)
        if self.lora.quantize is not None and not self.lora.wanted and not is_adapter(self.model):
            raise UsageError("--lora.quantize has no effect without --lora.rank, --lora.adapter, or an adapter as "
                             "--model")
        if self.log_dir is not None and self.track is None:
            raise UsageError("--log-dir has no effect without --track")
        if self.fall_back and self.resume == "never":
            raise UsageError("--fall-back has no effect without --resume")
        if self.eval_limit is not None and not self.eval_data and not self.eval_fraction:
            raise UsageError("--eval-limit has no effect without evaluation rows. Add --eval-fraction 0.1 or "
                             "--eval-data FILE.")
        if self.evaluator not in (None, "none") and not self.eval_data and not self.eval_fraction:
            raise UsageError("--evaluator requires rows to evaluate. Use --eval-fraction 0.1 to hold some out, or "
                             "--eval-data FILE.")
        if self.sample_every and not self.samples:
            raise UsageError("--sample-every has no effect with --samples 0. Remove one of them.")
        if not (self.save_every or self.keep_best or self.max_time):
            for name in ("keep", "checkpoint_model"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise UsageError(f"--{name.replace('_', '-')} has no effect without checkpoints. Add --save-every "
                                     "500 to write one every 500 steps.")
        if self.streaming and self.max_steps is None:
            raise UsageError("--streaming requires --max-steps, because a stream may have no end")
        return self

    @property
    def values(self) -> dict[str, Any]:
        """Every option by its name, including the loss of the method."""
        return {"loss": "sft", **self.model_dump()}

    @property
    def most_rows(self) -> int | None:
        """Maximum number of rows to read: for a stream, those of its steps plus those held out; None for all."""
        if not self.streaming or self.max_steps is None:
            return None
        return math.ceil(self.batch_size * self.max_steps / (1 - self.eval_fraction))

    def dump(self) -> dict[str, Any]:
        """Content of `config.yaml`: the method and every option, with absolute paths."""
        values = {"method": self.method, **super().dump()}
        for name in ("data", "eval_data"):
            if values[name]:
                values[name] = absolute(values[name])
        for name in _PATHS:
            value = values.get(name)
            if value and (name, value) != ("reference", "live") and (name in _MADE_BY_US
                                                                     or Path(value).expanduser().exists()):
                values[name] = os.path.abspath(Path(value).expanduser())
        if values["lora"]["adapter"]:
            values["lora"]["adapter"] = os.path.abspath(Path(values["lora"]["adapter"]).expanduser())
        return values


class LossOptions(ReferenceOptions, TeacherOptions):
    """Options of methods that learn from preferences."""

    heading: ClassVar[str] = "Method"
    view: ClassVar[View]
    loss: Everyday[str]
    loss_weights: str | None = None
    """Weights of the losses, in the order of `--loss`, comma-separated. Each must be above 0. Default: 1 each."""
    beta: Everyday[float | None] = Field(None, gt=0.0)

    @field_validator("loss")
    @classmethod
    def _known(cls, value: str) -> str:
        try:
            rows_of_losses(cls.view, value)
        except UsageError as error:
            raise ValueError(str(error).removeprefix("loss: ")) from None
        return value

    @model_validator(mode="after")
    def _reference_is_checked(self) -> "LossOptions":
        if self.allow_reference_mismatch and self.reference not in (None, "live"):
            raise UsageError("--allow-reference-mismatch has no effect with --reference MODEL, which may differ anyway")
        return self


class KTOOptions(LossOptions, MethodOptions):
    """KTO: single completions, each labeled desirable or undesirable."""

    method: ClassVar[str] = "kto"
    view: ClassVar[View] = "unpaired"

    loss: Everyday[str] = "kto"
    """Loss, or several separated by commas. Known: kto, apo_zero_unpaired, kto_no_reference_point and bco. sft, the
    likelihood of desirable completions, can be added to one of them."""
    beta: Everyday[float | None] = Field(None, gt=0.0)
    """Strength of the constraint to the reference, per nat. With a higher value the loss of a completion
    saturates sooner. Default: 0.1."""
    desirable_weight: Everyday[Weight | None] = None
    """Weight of desirable completions, above 0. `auto` balances the classes. Default: 1."""
    undesirable_weight: Everyday[Weight | None] = None
    """Weight of undesirable completions, above 0. `auto` balances the classes. Default: 1."""
    learning_rate: Everyday[float] = Field(5e-6, ge=0.0)
    """Peak learning rate. If the run trains an adapter, the default is 1e-4."""


class DPOOptions(LossOptions, MethodOptions):
    """DPO and its family: pairs of a chosen and a rejected completion."""

    method: ClassVar[str] = "dpo"
    view: ClassVar[View] = "paired"

    loss: Everyday[str] = "sigmoid"
    """Loss, or several separated by commas. Known: sigmoid (DPO), robust, ipo, ipo_mean, hinge, exo_pair, nca_pair,
    bco_pair, sppo_hard, apo_zero, apo_down, aot, aot_unpaired, discopop and sigmoid_norm; without a reference: simpo,
    cpo and orpo. sft, the likelihood of the chosen completion, can be added to one of them."""
    beta: Everyday[float | None] = Field(None, gt=0.0)
    """Strength of the constraint to the reference, per nat. With `sigmoid_norm` it is per nat per token,
    with `simpo` the scale of the margin, and with `orpo` the weight of the odds term. Default: 0.1 (`sigmoid_norm` 5,
    `simpo` 2)."""
    label_smoothing: Everyday[float | None] = Field(None, ge=0.0, lt=0.5)
    """Assumed share of flipped labels, below 0.5. Default: 0 (`robust` 0.1, `exo_pair` 0.001)."""
    f_divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] | None = None
    """Divergence between policy and reference (f-DPO). Default: reverse_kl."""
    f_alpha: float | None = None
    """Order of the alpha divergence. Requires `--f-divergence alpha`. Default: 0.5."""
    ld_alpha: float | None = Field(None, ge=0.0, le=1.0)
    """Weight, 0 to 1, of the tokens beyond the length of the shorter completion (LD-DPO). Default: 1."""
    wpo: bool = False
    """Weight each pair by its probability under the policy (WPO)."""
    discopop_tau: float | None = Field(None, gt=0.0)
    """Temperature of the modulation in `discopop`, above 0. Default: 0.05."""
    simpo_gamma: float | None = Field(None, ge=0.0)
    """Target margin of `simpo`, 0 or more. Default: 0.5."""
    cpo_alpha: float | None = Field(None, ge=0.0)
    """Weight of the likelihood term of `cpo`, 0 or more. Default: 1."""


class SFTOptions(MethodOptions):
    """SFT: completions to imitate."""

    method: ClassVar[str] = "sft"
    view: ClassVar[View] = "single"

    learning_rate: Everyday[float] = Field(2e-5, ge=0.0)
    """Peak learning rate. If the run trains an adapter, the default is 1e-4."""


class KDOptions(TeacherOptions, MethodOptions):
    """KD: completions on which a student learns the distributions of a teacher."""

    method: ClassVar[str] = "kd"
    view: ClassVar[View] = "single"

    teacher: str
    """Teacher model with the same tokenizer. A directory, Hub id or GGUF file."""
    learning_rate: Everyday[float] = Field(2e-5, ge=0.0)
    """Peak learning rate. If the run trains an adapter, the default is 1e-4."""


class ScoringOptions(FormatOptions, TemplateOptions, LengthOptions, StoreOptions):
    """Options of `tropism evaluate` and `tropism score`."""

    heading: ClassVar[str] = "Scoring"

    data: Everyday[str | None] = None
    """Data to score: pairs, labeled completions or completions. Files, a directory, or a dataset on the Hub; separate
    several with commas. Required unless the model is a run. Default: the rows that the run held out."""
    reference: Everyday[str | None] = None
    """Model to compare with: a directory, Hub id, GGUF file or run directory. Default: that of the run, if there is
    one."""
    beta: Everyday[float] = Field(0.1, gt=0.0)
    """Factor that turns log-ratios into rewards. If the model is a run, its own replaces the default."""
    precision: Everyday[Literal["auto", "fp32", "bf16", "fp64"]] = "auto"
    """Compute dtype; auto is bf16 on GPUs and fp32 on CPUs."""
    layout: Literal["auto", "tree", "padded"] = "auto"
    """Batch layout: `tree` computes each prompt once, `padded` once per completion. `auto` uses the tree if a
    comparison at startup shows that it is exact for the model."""
    microbatch_tokens: Everyday[Annotated[int, Field(ge=1)] | Literal["auto"]] = "auto"
    """Maximum tokens in a forward pass. Lower it if memory runs out. The result does not depend on it. `auto` is 2048
    on a CPU and 16384 on a GPU."""
    strict: bool = False
    """Stop at the first row that would be dropped. Otherwise the row is dropped and reported."""
    workers: int | None = Field(None, ge=0)
    """Number of processes that render the rows of large data. Default: one per CPU, at most 8."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model. Must be passed with each command: a YAML file cannot allow it."""
    parallel: ParallelOptions = ParallelOptions()
    """Several processes."""

    @field_validator("microbatch_tokens", mode="before")
    @classmethod
    def _auto(cls, value: Any) -> Any:
        """Accept null in YAML, as earlier versions wrote it."""
        return "auto" if value is None else value


class InspectOptions(FormatOptions, TemplateOptions, LengthOptions, StoreOptions):
    """Options of `tropism inspect`."""

    heading: ClassVar[str] = "Inspection"

    model: str
    """Model that the data is for: a directory, Hub id or GGUF file. Its weights are not read."""
    method: Everyday[Literal["kto", "dpo", "sft", "kd"] | None] = None
    """Method that the data is for. Default: detected from the fields."""
    eval_data: Everyday[str | None] = None
    """Evaluation data to check for overlap with the training data."""
    eval_split: str | None = None
    """Split to read of `--eval-data`. Default: validation, test or train, the first that is there."""
    batch_size: int = Field(32, ge=1)
    """Rows per optimizer step, used to estimate what shared prompts save."""
    rows: Everyday[int] = Field(3, ge=0)
    """Number of rows to show token by token."""
    strict: Everyday[bool] = False
    """Exit with code 1 if there are warnings."""
    workers: int | None = Field(None, ge=0)
    """Number of processes that render the rows of large data. Default: one per CPU, at most 8."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model. Must be passed with each command: a YAML file cannot allow it."""


class ConvertOptions(FormatOptions):
    """Options of `tropism convert`."""

    heading: ClassVar[str] = "Conversion"

    to: Literal["unpaired", "paired", "single", "messages"]
    """Target shape. unpaired has prompt, completion and label; paired has prompt, chosen and rejected; single has
    prompt and completion; messages has one chat per row."""
    output: str
    """New file to write: .jsonl, .jsonl.gz, .parquet, or .csv for plain text."""
    turns: Everyday[Literal["last", "all"]] = "last"
    """Assistant messages that become rows, for `--to single` and `--to messages`. `all` makes a row of each, with the
    messages before it."""
    keep_columns: Everyday[bool] = False
    """Copy the other columns of the records."""
    strict: Everyday[bool] = False
    """Stop at the first row that would be dropped. Otherwise the row is dropped and reported."""

    @model_validator(mode="after")
    def _effective(self) -> "ConvertOptions":
        if self.turns == "all" and self.to in ("unpaired", "paired"):
            raise UsageError(f"--turns has no effect with --to {self.to}. It requires --to single or --to messages.")
        return self


class ChatOptions(GenerationOptions, PromptOptions):
    """Options of `tropism chat`."""

    heading: ClassVar[str] = "Chat"

    compare: Everyday[str | None] = None
    """Second model that answers every question: a directory, Hub id, GGUF file, adapter or run directory."""
    blind: Everyday[bool] = False
    """Shuffle which of the two answers is A and which is B until you choose. Requires `--compare`."""
    feedback: Everyday[str | None] = None
    """File (.jsonl) to append rows to: labeled answers for `tropism kto`, with `--compare` pairs for `tropism dpo`."""
    plain_text: bool = False
    """Continue each text as it is, without the chat template."""
    precision: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """Compute dtype; auto is bf16 on GPUs and fp32 on CPUs."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model. Must be passed with each command: a YAML file cannot allow it."""

    @model_validator(mode="after")
    def _effective(self) -> "ChatOptions":
        if self.blind and self.compare is None:
            raise UsageError("--blind has no effect without --compare")
        if self.top_p < 1.0 and not self.temperature:
            raise UsageError("--top-p has no effect at temperature 0. Add --temperature 0.8.")
        if self.plain_text and (self.chat_template or self.chat_template_kwargs or self.system_prompt):
            raise UsageError("--plain-text excludes --chat-template, --chat-template-kwargs and --system-prompt, "
                             "which are about messages")
        return self


METHODS: dict[str, type[MethodOptions]] = {
    options.method: options for options in (KTOOptions, DPOOptions, SFTOptions, KDOptions)}


def check_name(options: type[MethodOptions], name: str, known: Iterable[str], place: str = "") -> None:
    """Check that an option exists.

    Args:
        known: names that are accepted.
        place: where the name is written, such as `FILE:LINE: `.

    Raises:
        UsageError: with the closest known name, or for a plain value in place of a group of options.
    """
    names = list(known)
    if name in names:
        return
    info = options.model_fields.get(name)
    if info is not None and isinstance(info.annotation, type) and issubclass(info.annotation, Options):
        first = next(iter(info.annotation.model_fields))
        raise UsageError(f"{place}{name}: is a group of options. Write {name}: {{{first}: ...}}")
    listed = f"Known: {', '.join(sorted({*names} - ALIASES.keys()))}"  # of Python, which has more names than the help
    hint = instead(name, names) or (f"See `tropism {options.method} --help-all`" if place else listed)
    raise UsageError(f"{place}unknown option {name[:100]}. {hint}")


def place_of(problem: Any, fields: Any) -> str:
    """The name of the option that a validation problem is about."""
    inside = ".".join(str(part) for part in problem["loc"][:2])
    return inside if inside in fields else str(problem["loc"][0])


def explain(problem: Any) -> str:
    """A validation problem in words, with the value."""
    message = str(problem["msg"])
    if message.startswith("Value error, "):  # one of our validators, which names the value itself
        return message.removeprefix("Value error, ")
    message = message.partition(", unable to parse")[0].replace("Input should be", "must be")
    value = repr(problem["input"])
    return f"{message} (got {value if len(value) <= _SHOWN else f'{value[:_SHOWN]} ...'})"


def takes_bool(annotation: Any) -> bool:
    """True for the type of an on/off option."""
    return annotation is bool or bool in get_args(annotation)
