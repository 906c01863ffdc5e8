"""The options of each method, composed from their groups; YAML files of them."""

import difflib
import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import Field, ValidationError

from tropism.data.options import DataOptions
from tropism.errors import UsageError
from tropism.train.options import RunOptions

Weight = Annotated[float, Field(gt=0.0)] | Literal["auto"]


class MethodOptions(DataOptions, RunOptions):
    """What all methods share."""

    method: ClassVar[str]

    def dump(self) -> dict[str, Any]:
        """Content of `config.yaml`: the method, every option, files by absolute path."""
        values = {"method": self.method, **super().dump()}
        for name in ("data", "eval_data", "output", "store", "model", "reference"):
            value = values.get(name)
            if value and (name, value) != ("reference", "live") and (name in ("output", "store")
                                                                     or Path(value).expanduser().exists()):
                values[name] = os.path.abspath(Path(value).expanduser())
        return values


class KTOOptions(MethodOptions):
    """KTO: single completions, each labelled desirable or undesirable."""

    method: ClassVar[str] = "kto"

    loss: Literal["kto"] = "kto"
    """The loss, by its published name."""
    beta: float = Field(0.1, gt=0.0)
    """How fast the utility saturates as policy and reference part, per nat."""
    desirable_weight: Weight = 1.0
    """Weight of desirable completions; `auto` balances the classes."""
    undesirable_weight: Weight = 1.0
    """Weight of undesirable completions; `auto` balances the classes."""
    learning_rate: float = Field(5e-6, ge=0.0)
    """Peak learning rate."""


class DPOOptions(MethodOptions):
    """DPO: pairs of a chosen and a rejected completion."""

    method: ClassVar[str] = "dpo"

    loss: Literal["sigmoid"] = "sigmoid"
    """The loss, by its published name."""
    beta: float = Field(0.1, gt=0.0)
    """Strength of the tie to the reference, per nat."""
    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5)
    """Assumed share of flipped labels (conservative DPO)."""


METHODS: dict[str, type[MethodOptions]] = {options.method: options for options in (KTOOptions, DPOOptions)}


def read_yaml(path: str | Path) -> tuple[str | None, dict[str, Any]]:
    """The method that a configuration file names, if it does, and its options, checked.

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
    lines: dict[str, int] = {}
    for key, _ in node.value if node is not None else ():
        if key.value in lines:
            raise UsageError(f"{path}:{key.start_mark.line + 1}: {key.value}: is on line {lines[key.value]} already")
        lines[key.value] = key.start_mark.line + 1
    method = values.pop("method", None)
    if method is not None and not (isinstance(method, str) and method in METHODS):
        raise UsageError(f"{path}:{lines['method']}: method: {method!r} is not one of {', '.join(METHODS)}")
    check_values(values, METHODS[method] if method else None, lambda key: f"{path}:{lines.get(str(key), 1)}: ")
    return method, values


def check_values(values: dict[str, Any], options: type[MethodOptions] | None, place: Any) -> None:
    """Check keys and types of values; `options` None accepts the keys of any method.

    Raises:
        UsageError: for the first that is wrong.
    """
    classes = [options] if options else list(METHODS.values())
    known = {name: cls for cls in classes for name in cls.model_fields}
    for key, value in values.items():
        if key not in known:
            raise UsageError(f"{place(key)}{key}: unknown{nearest(str(key), known)}")
        if isinstance(value, bool) and known[key].model_fields[key].annotation is not bool:
            raise UsageError(f"{place(key)}{key}: {value} is not a value for this option")
    for cls in classes:
        try:
            cls.model_validate({key: value for key, value in values.items() if key in cls.model_fields})
        except ValidationError as error:
            for problem in error.errors():
                if problem["type"] != "missing":
                    name = str(problem["loc"][0])
                    raise UsageError(f"{place(name)}{name}: {problem['msg']} (got {problem['input']!r})") from None


def nearest(key: str, known: Any) -> str:
    """`, did you mean loss?` where some known key is close."""
    close = difflib.get_close_matches(key.replace("-", "_"), list(known), n=1, cutoff=0.6)
    return f", did you mean {close[0]}?" if close else f"; known are {', '.join(sorted(known))}"
