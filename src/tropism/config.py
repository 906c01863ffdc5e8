"""The options of each method, composed from their groups; YAML files of them."""

import difflib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from tropism.data.formats import View
from tropism.data.formats.options import FormatOptions
from tropism.data.options import DataOptions
from tropism.data.sources.resolve import absolute
from tropism.data.tokenization.chat_template import TemplateOptions
from tropism.data.tokenization.truncate import LengthOptions
from tropism.errors import UsageError
from tropism.model.options import RATE_OF_ADAPTERS, LoraOptions, is_adapter
from tropism.options import Options
from tropism.train.options import ParallelOptions, ReferenceOptions, RunOptions, StoreOptions, TeacherOptions

Weight = Annotated[float, Field(gt=0.0)] | Literal["auto"]
_PATHS = ("output", "store", "model", "reference", "teacher", "log_dir", "chat_template")
_MADE_BY_US = ("output", "store", "log_dir")


class MethodOptions(DataOptions, RunOptions, StoreOptions):
    """What all methods share."""

    method: ClassVar[str]
    view: ClassVar[View]

    @field_validator("loss", "loss_weights", "track", mode="before", check_fields=False)
    @classmethod
    def _joined(cls, value: Any) -> Any:
        """A list from Python or YAML is what the command line writes with commas."""
        if isinstance(value, list | tuple):
            return ",".join(str(entry).strip() for entry in value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        return value.replace(" ", "") if isinstance(value, str) else value


    @model_validator(mode="before")
    @classmethod
    def _rate_of_adapters(cls, values: Any) -> Any:
        """Adapters learn at a higher rate, where none was given."""
        if not isinstance(values, Mapping) or "learning_rate" in values:
            return values
        lora = values.get("lora") or {}
        given = lora.model_dump() if isinstance(lora, LoraOptions) else lora if isinstance(lora, Mapping) else {}
        adapts = given.get("rank") is not None or given.get("adapter") is not None or is_adapter(values.get("model"))
        return {**values, "learning_rate": RATE_OF_ADAPTERS} if adapts else values

    @model_validator(mode="after")
    def _effective(self) -> "MethodOptions":
        """Every option that was given has an effect."""
        from tropism.methods.build import check_options  # imports torch: not for --help

        check_options(self.view, self.values)
        if self.lora.quantize is not None and not self.lora.wanted and not is_adapter(self.model):
            raise UsageError("lora.quantize has no effect without lora.rank, lora.adapter, or an adapter as the model")
        if self.log_dir is not None and self.track is None:
            raise UsageError("log_dir has no effect without track")
        if self.fall_back and self.resume == "never":
            raise UsageError("fall_back has no effect without resume")
        if self.eval_limit is not None and not self.eval_data and not self.eval_fraction:
            raise UsageError("eval_limit has no effect without rows to evaluate: --eval-fraction 0.1 holds some out, "
                             "--eval-data names a file of them")
        if not (self.save_every or self.keep_best or self.max_time):
            for name in ("keep", "checkpoint_model"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise UsageError(f"{name} is about checkpoints, and none is planned: --save-every 500 writes one "
                                     "every 500 steps")
        if self.streaming and self.max_steps is None:
            raise UsageError("streaming needs max_steps: a stream may have no end, so say how many steps to train")
        return self

    @property
    def values(self) -> dict[str, Any]:
        """Every option by its name, the method's loss included."""
        return {"loss": "sft", **self.model_dump()}

    @property
    def most_rows(self) -> int | None:
        """How many rows are read at most: of a stream, as many as its steps need beside those that are held out."""
        if not self.streaming or self.max_steps is None:
            return None
        return math.ceil(self.batch_size * self.max_steps / (1 - self.eval_fraction))

    def dump(self) -> dict[str, Any]:
        """Content of `config.yaml`: the method, every option, files by absolute path."""
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

    view: ClassVar[View]
    loss: str
    loss_weights: str | None = None
    """Weights of the losses, in their order, comma-separated; by default 1 each."""
    beta: float | None = Field(None, gt=0.0)

    @field_validator("loss")
    @classmethod
    def _known(cls, value: str) -> str:
        from tropism.methods.build import rows_of_losses  # imports torch: not for --help

        try:
            rows_of_losses(cls.view, value)
        except UsageError as error:
            raise ValueError(str(error).removeprefix("loss: ")) from None
        return value


class KTOOptions(LossOptions, MethodOptions):
    """KTO: single completions, each labeled desirable or undesirable."""

    method: ClassVar[str] = "kto"
    view: ClassVar[View] = "unpaired"

    loss: str = "kto"
    """One or more losses, comma-separated: kto, apo_zero_unpaired, kto_no_reference_point, bco; and sft, the
    likelihood of desirable completions."""
    beta: float | None = Field(None, gt=0.0)
    """How fast the utility saturates as policy and reference part, per nat; by default 0.1."""
    desirable_weight: Weight | None = None
    """Weight of desirable completions, by default 1; `auto` balances the classes."""
    undesirable_weight: Weight | None = None
    """Weight of undesirable completions, by default 1; `auto` balances the classes."""
    learning_rate: float = Field(5e-6, ge=0.0)
    """Peak learning rate."""


class DPOOptions(LossOptions, MethodOptions):
    """DPO and its family: pairs of a chosen and a rejected completion."""

    method: ClassVar[str] = "dpo"
    view: ClassVar[View] = "paired"

    loss: str = "sigmoid"
    """One or more losses, comma-separated: sigmoid (DPO), robust, ipo, ipo_mean, hinge, exo_pair, nca_pair, bco_pair,
    sppo_hard, apo_zero, apo_down, aot, aot_unpaired, discopop, sigmoid_norm; without a reference simpo, cpo, orpo;
    and sft, the likelihood of the chosen side."""
    beta: float | None = Field(None, gt=0.0)
    """Strength of the tie to the reference, per nat, by default 0.1; sigmoid_norm: per nat per token, by default 5;
    simpo: scale of the margin, by default 2; orpo: weight of the odds term, by default 0.1."""
    label_smoothing: float | None = Field(None, ge=0.0, lt=0.5)
    """Assumed share of flipped labels; by default 0, for robust 0.1, for exo_pair 0.001."""
    f_divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] | None = None
    """Divergence that ties the policy to the reference (f-DPO); by default reverse_kl."""
    f_alpha: float | None = None
    """Order of the alpha divergence; by default 0.5."""
    ld_alpha: float | None = Field(None, ge=0.0, le=1.0)
    """Weight of the tokens by which one side is longer than the other (LD-DPO); by default they count in full."""
    wpo: bool = False
    """Weigh each pair by how likely the policy is to write it (WPO)."""
    discopop_tau: float | None = Field(None, gt=0.0)
    """Temperature of discopop's modulation; by default 0.05."""
    simpo_gamma: float | None = Field(None, ge=0.0)
    """Margin that simpo asks for; by default 0.5."""
    cpo_alpha: float | None = Field(None, ge=0.0)
    """Weight of cpo's likelihood term; by default 1."""


class SFTOptions(MethodOptions):
    """SFT: completions to imitate."""

    method: ClassVar[str] = "sft"
    view: ClassVar[View] = "single"

    learning_rate: float = Field(2e-5, ge=0.0)
    """Peak learning rate."""


class KDOptions(TeacherOptions, MethodOptions):
    """KD: completions on which the student shall say what the teacher says."""

    method: ClassVar[str] = "kd"
    view: ClassVar[View] = "single"

    teacher: str
    """Teacher model, with the same tokenizer: a Hugging Face directory, a hub id, or a GGUF file."""
    learning_rate: float = Field(2e-5, ge=0.0)
    """Peak learning rate."""


class ScoringOptions(FormatOptions, TemplateOptions, LengthOptions, StoreOptions):
    """Options of evaluating and scoring a model that is not trained."""

    data: str
    """Rows to score: pairs, labeled completions, or completions, as their fields say."""
    reference: str | None = None
    """Another model, to compare with: a Hugging Face directory, a hub id, a GGUF file, or a run directory."""
    beta: float = Field(0.1, gt=0.0)
    """What a log-ratio is multiplied with to be a reward."""
    precision: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """Dtype of the computation: bf16 on GPUs, fp32 on CPUs."""
    layout: Literal["auto", "tree", "padded"] = "auto"
    """`tree` computes every prompt once; `padded` puts each completion beside its own copy of the prompt."""
    microbatch_tokens: int | None = Field(None, ge=1)
    """Tokens of one forward pass: memory and speed, never the result."""
    strict: bool = False
    """Stop where a row would be left out."""
    workers: int | None = Field(None, ge=0)
    """Processes that render the rows of large data; by default one per CPU, at most 8."""
    trust_remote_code: bool = False
    """Run code that comes with a model."""
    parallel: ParallelOptions = ParallelOptions()
    """More than one process."""


class InspectOptions(FormatOptions, TemplateOptions, LengthOptions, StoreOptions):
    """Options of looking at data as training would see them."""

    model: str
    """Model that the data is meant for: a Hugging Face directory, a hub id, or a GGUF file. Its weights are not
    read."""
    method: Literal["kto", "dpo", "sft", "kd"] | None = None
    """Method that the data is meant for; by default, what the fields of the rows say."""
    eval_data: str | None = None
    """Held-out rows, to see whether training rows are among them."""
    batch_size: int = Field(32, ge=1)
    """Rows of a step, to say what shared prompts save."""
    rows: int = Field(3, ge=0)
    """Rows to show token by token."""
    strict: bool = False
    """Exit with 1 if a finding is a warning."""
    workers: int | None = Field(None, ge=0)
    """Processes that render the rows of large data; by default one per CPU, at most 8."""
    trust_remote_code: bool = False
    """Run code that comes with a model."""


class ConvertOptions(FormatOptions):
    """Options of writing data in another shape."""

    to: Literal["unpaired", "paired", "single", "messages"]
    """Shape of the rows: unpaired (prompt, completion, label), paired (prompt, chosen, rejected), single (prompt,
    completion), or messages (one chat per row)."""
    output: str
    """A file that does not exist yet: .jsonl, .jsonl.gz, .parquet, or .csv for plain text."""
    turns: Literal["last", "all"] = "last"
    """Answers of a conversation that become rows of single or messages: the last, or each with what stands before
    it."""
    keep_columns: bool = False
    """Take the other columns of the records along."""
    strict: bool = False
    """Stop where a row would be left out."""

    @model_validator(mode="after")
    def _effective(self) -> "ConvertOptions":
        if self.turns == "all" and self.to in ("unpaired", "paired"):
            raise UsageError(f"turns has no effect on --to {self.to}: it makes completions to imitate")
        return self


METHODS: dict[str, type[MethodOptions]] = {
    options.method: options for options in (KTOOptions, DPOOptions, SFTOptions, KDOptions)}


def read_yaml(path: str | Path, default: str | None = None) -> tuple[str | None, dict[str, Any]]:
    """The method that a configuration file names, if it does, and its options, checked one by one.

    Args:
        path: the file.
        default: the method of a file that names none.

    Raises:
        UsageError: with file and line, for an unknown key (naming the nearest known one) or an ill-typed value.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text) or {}
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path}: expected `option: value` lines")
    lines = _lines_of(path, node)
    method = values.pop("method", None)
    if method is not None and not (isinstance(method, str) and method in METHODS):
        raise UsageError(f"{path}:{lines['method']}: method: {method!r} is not one of {', '.join(METHODS)}")
    known = METHODS.get(method or default or "")
    values = (known or MethodOptions).flattened(values)
    check_values(values, known, lambda key: f"{path}:{lines.get(str(key), 1)}: ")
    return method, values


def _lines_of(path: Path, node: Any, group: str = "") -> dict[str, int]:
    """The line of each key, those inside a mapping as `group.key`.

    Raises:
        UsageError: for a key that is there twice.
    """
    lines: dict[str, int] = {}
    for key, value in node.value if node is not None else ():
        name = f"{group}{key.value}"
        if name in lines:
            raise UsageError(f"{path}:{key.start_mark.line + 1}: {name}: is on line {lines[name]} already")
        lines[name] = key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode) and not group:
            lines |= _lines_of(path, value, f"{name}.")
    return lines


def check_values(values: dict[str, Any], options: type[MethodOptions] | None, place: Any) -> None:
    """Check keys and types of values, those of groups as `group.key`; `options` None takes the keys of any method.

    Raises:
        UsageError: for the first that is wrong.
    """
    classes = [options] if options else list(METHODS.values())
    known = {name: info for cls in classes for name, info in cls.flat_fields().items()}
    for key, value in values.items():
        if key not in known:
            group = group_of(classes[0], str(key))
            raise UsageError(f"{place(key)}{key}: {group or 'unknown' + nearest(str(key), known)}")
        if isinstance(value, bool) and not takes_bool(known[key].annotation):
            raise UsageError(f"{place(key)}{key}: {value} is not a value for this option")
    for cls in classes:
        try:
            # Without its output a file is never complete, so that options are not judged together: the command line
            # may add to them or change them.
            fields = cls.flat_fields()
            cls.model_validate(cls.nested({key: value for key, value in values.items()
                                           if key in fields and key != "output"}))
        except ValidationError as error:
            for problem in error.errors():
                if problem["type"] != "missing":
                    name = place_of(problem, fields)
                    raise UsageError(f"{place(name)}{name}: {explain(problem)}") from None


def place_of(problem: Any, fields: Any) -> str:
    """The option that a validation problem is about, by its name on the command line."""
    inside = ".".join(str(part) for part in problem["loc"][:2])
    return inside if inside in fields else str(problem["loc"][0])


def explain(problem: Any) -> str:
    """A validation problem as a sentence with the value."""
    message = str(problem["msg"])
    if message.startswith("Value error, "):  # a check of ours, which names the value itself
        return message.removeprefix("Value error, ")
    return f"{message} (got {problem['input']!r})"


def takes_bool(annotation: Any) -> bool:
    """Whether an option is an on/off option."""
    return annotation is bool or bool in get_args(annotation)


def group_of(options: type[MethodOptions], key: str) -> str | None:
    """What to say of a plain value where a group of options is wanted; None for any other name."""
    info = options.model_fields.get(key)
    if info is None or not (isinstance(info.annotation, type) and issubclass(info.annotation, Options)):
        return None
    first = next(iter(info.annotation.model_fields))
    return f"is a group of options: write {key}: {{{first}: ...}}"


def nearest(key: str, known: Any) -> str:
    """`, did you mean loss?` where some known key is close."""
    close = difflib.get_close_matches(key.replace("-", "_"), list(known), n=1, cutoff=0.6)
    return f", did you mean {close[0]}?" if close else f"; known are {', '.join(sorted(known))}"
