"""The run that a model belongs to: which model is meant, and how the run was trained. Its files are data that anybody
may have written; nothing in them lets code run, and the cache that they name is not used."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tropism.commands.run_model import directory_of
from tropism.config import METHODS, MethodOptions, ScoringOptions, explain
from tropism.config_file import CODE, read_yaml
from tropism.data.formats.options import FormatOptions
from tropism.data.reading_limits import ReadingLimits
from tropism.data.sources.resolve import absolute, without_commits
from tropism.data.tokenization.chat_template import TemplateOptions
from tropism.data.tokenization.truncate import LengthOptions
from tropism.errors import ModelError, TropismError, UsageError, first_line
from tropism.methods import Method
from tropism.methods.build import build_method
from tropism.observe.manifest import read_manifest
from tropism.observe.rundir import RunDirectory

_READING = tuple(name for name in FormatOptions.model_fields
                 if name not in ReadingLimits.model_fields and name != "split")
"""Options about the columns of a file: those of the run are for its own data."""
RENDERING = (*TemplateOptions.model_fields, *LengthOptions.model_fields)
_COMPUTING = ("precision", "layout", "microbatch_tokens")
_PLAIN = {"paired": "sigmoid", "unpaired": "kto_no_reference_point", "single": "sft"}
"""Losses whose reward is beta x log-ratio, for models that no run trained on such data."""


@dataclass(frozen=True)
class OwnRun:
    """A run, as its files describe it.

    Args:
        path: its directory.
        options: all of them, with those that were given now in place of the run's.
        manifest: content of manifest.json.
        recorded: the run's options about texts and columns.
    """

    path: Path
    options: MethodOptions
    manifest: Mapping[str, Any]
    recorded: Mapping[str, Any]

    @property
    def adapts(self) -> bool:
        """Whether it trained an adapter."""
        return self.options.lora.wanted or "adapter_config" in self.manifest

    @property
    def reference(self) -> str | None:
        """The model that its policy was held close to, as `--reference` names it; None for a method without one."""
        value = self.options.values.get("reference")
        if value not in (None, "live"):
            return str(value)
        return self.options.model if self.method(None)[0].needs_reference else None

    def named(self, option: str) -> str | None:
        """The model that an option of the run names; None for none, and for a reference that is kept in memory.

        Raises:
            ModelError: if it was passed in Python.
        """
        value = self.options.values.get(option)
        if value in (None, "live"):
            return None
        if is_from_python(str(value)):
            raise ModelError(f"{self.path}: the {option} of this run was passed in Python")
        return str(value)

    def method(self, beta: float | None) -> tuple[Method, str]:
        """The run's method, and the reason why its losses cannot be computed again; empty if they can.

        Args:
            beta: in place of the run's.
        """
        values = dict(self.options.values)
        if beta is not None and "beta" in values:
            values["beta"] = beta
        weights, why = self.manifest.get("class_weights"), ""
        if "auto" in (values.get("desirable_weight"), values.get("undesirable_weight")):
            if not _are_numbers(weights):
                weights, why = [1.0, 1.0], "manifest.json has no class weights"
            values["desirable_weight"], values["undesirable_weight"] = weights  # type: ignore[misc]
        method = build_method(self.options.view, values, [], self.manifest.get("weighted_rows") is True)
        if method.needs("shift") and not _are_numbers(self.manifest.get("reward_sums")):
            why = "manifest.json has no mean of the rewards"
        return method, why


def is_from_python(name: str) -> bool:
    """Whether a recorded name describes a Python object, which no other process has."""
    return "given in Python" in name or name == "batches of a dataloader"


def _are_numbers(values: Any) -> bool:
    return (isinstance(values, list) and len(values) == 2
            and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values))


def read_run(model: str, given: ScoringOptions) -> tuple[OwnRun | None, str]:
    """The run that a model belongs to, or None and the reason if its options are unknown; empty if it has no run.

    Args:
        given: the options that were given now.

    Raises:
        OutputExistsError: if a file of the run is a link, a pipe or a device.
    """
    path = directory_of(model)
    if path is None:
        return None, ""
    place = path / "config.yaml"
    RunDirectory(path).check_kinds()
    try:
        manifest = read_manifest(path / "manifest.json")
    except (OSError, ValueError) as error:
        return None, f"{path / 'manifest.json'}: {first_line(error)}"
    try:
        method, recorded = read_yaml(place, decided=CODE)
        if method is None:
            raise UsageError("`method:` is missing")
        kind = METHODS[method]
        now = {name: getattr(given, name) for name in RENDERING if name in given.model_fields_set}
        options = kind.model_validate(kind.nested(recorded | now | {"output": str(path), "trust_remote_code": False}))
    except (TropismError, ValueError, RecursionError) as error:
        problems: list[Any] = error.errors() if isinstance(error, ValidationError) else []
        why = explain(problems[0]) if problems else first_line(error).removeprefix(str(place)).removeprefix(": ")
        return None, f"{place}{why if why[:1] == ':' else f': {why}'}"
    return OwnRun(path, options, manifest, {name: recorded.get(name, kind.model_fields[name].default)
                                            for name in RENDERING}), ""


def in_use(given: ScoringOptions, run: OwnRun | None) -> ScoringOptions:
    """The options of a measurement: those that were given, then those of the run, then the defaults."""
    if run is None:
        return given
    options, values = run.options, {}
    names = (*RENDERING, *_COMPUTING, *(_READING if is_own_data(given, run) else ()))
    for name in names:
        if name not in given.model_fields_set:
            values[name] = getattr(options, name)
    if "layout" not in given.model_fields_set and run.manifest.get("layout") in ("tree", "padded"):
        values["layout"] = run.manifest["layout"]
    beta = options.values.get("beta")
    if "beta" not in given.model_fields_set and beta is not None:
        values["beta"] = beta
    return given.model_copy(update=values)


def is_own_data(given: ScoringOptions, run: OwnRun) -> bool:
    """Whether the rows are those of the run's files."""
    if given.data is None:
        return True
    known = [source for source in (run.options.data, run.options.eval_data) if source]
    return absolute(given.data) in (*known, *map(without_commits, known))


def plain_method(view: str, beta: float) -> Method:
    """The method that says what a reward is where no run's method does."""
    return build_method(view, {"loss": _PLAIN[view], "beta": beta}, [])  # type: ignore[arg-type]
