"""Evaluators of the user: functions of the model, the tokenizer and the held-out rows that return metrics."""

import asyncio
import copy
import hashlib
import importlib
import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from tropism.data.rows import EncodedRow, View
from tropism.errors import UsageError, clause, count_of, first_line
from tropism.observe.metrics import is_known
from tropism.train.engine import Engine
from tropism.train.evaluation.lent_model import fingerprints, lent

Function = Callable[[Any, Any, list[dict[str, Any]]], Mapping[str, float]]
"""`(model, tokenizer, rows) -> {metric: value}`."""

_NAME = re.compile(r"[\w./@+-]{1,100}")
_MOST = 1000  # metrics of one evaluator
_TAKES = "An evaluator takes (model, tokenizer, rows)"


# --- finding them -----------------------------------------------------------------------------------------------------


def evaluator_name(function: Any) -> str:
    """The name of a function that was passed in Python, as `module:function`."""
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}:{kind.__qualname__}".replace(",", "_")


def load_evaluators(names: str | None, given: Sequence[Function]) -> dict[str, Function]:
    """The evaluators of a run by name, checked without a call.

    Args:
        names: as `--evaluator` has them, separated by commas; None or `none` for none.
        given: functions that were passed in Python, in the order of their names.

    Raises:
        UsageError: if one cannot be imported, is no function, or takes other arguments.
    """
    listed = [] if names in (None, "none") else [name for name in str(names).split(",") if name]
    if len(set(listed)) < len(listed):
        raise UsageError(f"--evaluator {names}: the same name is there twice. Remove one.")
    if given and len(given) != len(listed):
        raise UsageError("evaluator has functions and names. Pass only functions, or only names.")
    found = dict(zip(listed, given, strict=True)) if given else {name: _imported(name) for name in listed}
    for name, function in found.items():
        _check_signature(name, function)
    return found


def sources(functions: Mapping[str, Function]) -> dict[str, str]:
    """Hash of the source of each function; empty if it has none, as in an interactive session."""
    return {name: _source_hash(function) for name, function in functions.items()}


def _source_hash(function: Function) -> str:
    try:
        return hashlib.blake2b(inspect.getsource(function).encode(), digest_size=16).hexdigest()
    except (OSError, TypeError):
        return ""


def _imported(name: str) -> Function:
    module_name, colon, path = name.partition(":")
    if not colon or not path or module_name.endswith(".py") or "/" in module_name:
        meant = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise UsageError(f"--evaluator {name}: not of the form module:function. Write --evaluator "
                         f"{meant or 'module'}:{path or 'function'}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: nothing here hides an installed package
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        hint = f" It is searched among installed packages and in {here}." if (
            isinstance(error, ModuleNotFoundError) and module_name.startswith(str(error.name))) else ""
        raise UsageError(f"--evaluator {name}: {module_name} cannot be imported: {_reason(error)}.{hint}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            where = getattr(sys.modules[module_name], "__file__", None) or module_name
            raise UsageError(f"--evaluator {name}: {where} has no {path}")
        found = getattr(found, part)
    return found


def _check_signature(name: str, function: Any) -> None:
    if not callable(function):
        raise UsageError(f"--evaluator {name}: a {type(function).__name__} is not a function. {_TAKES}.")
    if inspect.iscoroutinefunction(function):
        raise UsageError(f"--evaluator {name}: is async. Make it a plain function that returns its metrics.")
    try:
        inspect.signature(function).bind(None, None, None)
    except ValueError:  # a builtin does not tell
        return
    except TypeError as error:
        raise UsageError(f"--evaluator {name}: cannot be called with three arguments: {error}. {_TAKES}.") from None


# --- what they see ----------------------------------------------------------------------------------------------------


def plain_rows(rows: Sequence[EncodedRow], view: View, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Rows as an evaluator sees them: `id`, `place`, `prompt` and its `prompt_ids`; a pair has `chosen` and `rejected`,
    another row `completion`, and `label` if it has one.

    Texts are those of the token ids that the run trains and evaluates on, after template and truncation. `prompt` has
    its special tokens, a completion has none.
    """
    for row in rows:
        texts = [tokenizer.decode(one.ids.tolist(), skip_special_tokens=True) for one in row.completions[:2]]
        sides = dict(zip(("chosen", "rejected") if view == "paired" else ("completion",), texts, strict=True))
        yield {"id": row.id, "place": row.place,
               "prompt": tokenizer.decode(row.asked.tolist(), skip_special_tokens=False),
               "prompt_ids": row.asked.tolist(), **sides,
               **({} if row.desirable is None else {"label": row.desirable})}


# --- calling them -----------------------------------------------------------------------------------------------------


@dataclass
class _Outcome:
    """Of one process: the figures, why evaluators have none, and which one changed the weights."""

    figures: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    spoiled: str = ""


class UserEvaluators:
    """Calls the evaluators of a run in each of its evaluations.

    Args:
        functions: by name.
        inputs: the `RunInputs` of the run. Evaluators get its held-out rows, and a copy of its tokenizer.

    Attributes:
        begun: an evaluation of the run has succeeded, so that the run continues without the figures of one that fails.
        names: the metrics of earlier evaluations. A later one that lacks a metric has no value for it.
        note: is told why a metric has no value.
    """

    def __init__(self, functions: Mapping[str, Function], inputs: Any, note: Callable[[str], None]) -> None:
        self.functions = functions
        self.inputs = inputs
        self.tokenizer = copy.deepcopy(inputs.tokenizer) if functions else None
        self.note = note
        self.begun = False
        self.names: set[str] = set()

    @property
    def facts(self) -> dict[str, Any]:
        """For the manifest: a hash of the source of each function."""
        return {"evaluators": sources(self.functions)} if self.functions else {}

    def resume(self, evaluation: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
        """Continue after the last evaluation record of the run, and say if a function has changed since it began.

        Args:
            manifest: of the run so far.
        """
        self.begun = True
        if self.functions:
            self.names |= {name for name in evaluation if name != "step" and not is_known(name)}
        before = manifest.get("evaluators")
        for name, found in sources(self.functions).items():
            if isinstance(before, Mapping) and before.get(name, found) != found:
                self.note(f"the source of evaluator {name} has changed since the run started, so its figures before "
                          "and after this point may not compare")

    def __call__(self, engine: Engine) -> dict[str, float]:
        """The figures of all evaluators under the current policy. All processes call this together; the main one calls
        the functions, or all of them if the model is sharded, and the figures are those of the main process.

        Raises:
            UsageError: if one fails in the first evaluation, or changes a weight.
        """
        if not self.functions:
            return {}
        world = engine.world
        calls = world.is_main or world.mesh is not None
        outcomes = world.gather(world.computed(lambda: self._called(engine) if calls else _Outcome()))
        if spoiled := next(filter(None, (one.spoiled for one in outcomes)), ""):
            raise UsageError(spoiled)
        own = outcomes[0]
        if own.problems and not self.begun:
            raise UsageError(own.problems[0])
        for problem in own.problems:
            self.note(f"{clause(problem)}. Training continues, and the evaluation has no value for its metrics.")
        self.begun = True
        self.names |= own.figures.keys()
        return {**own.figures, **dict.fromkeys(sorted(self.names - own.figures.keys()), math.nan)}

    def _called(self, engine: Engine) -> _Outcome:
        """Call each function."""
        outcome, module = _Outcome(), engine.model.module
        before = fingerprints(module)
        inputs, stop_ids = self.inputs, sorted(self.inputs.data.renderer.stop_ids)
        rows = list(plain_rows(inputs.held_out, inputs.method.view, self.tokenizer))
        for name, function in self.functions.items():
            try:
                with lent(engine.model, stop_ids, inputs.options.seed) as model:
                    found = function(model, self.tokenizer, copy.deepcopy(rows))
                figures, missing = figures_of(found, outcome.figures)
                outcome.figures |= figures
                if missing:
                    outcome.problems += [f"evaluator {name}: {', '.join(missing)}: not finite"] if self.begun else []
            except (Exception, SystemExit) as error:
                outcome.problems.append(f"evaluator {name}: {_place(error, function)}{_reason(error)}")
            after = fingerprints(module)
            changed = [one for one in before.keys() | after.keys() if before.get(one) != after.get(one)]
            if changed:
                outcome.spoiled = (f"evaluator {name} changed {count_of(len(changed), 'weight')} of the model, such as "
                                   f"{min(changed)}. The run stops, because it would train other weights than its own. "
                                   "Change a copy of the model in the evaluator, and resume from the last checkpoint.")
                break
        return outcome


def figures_of(found: Any, others: Collection[str] = ()) -> tuple[dict[str, float], list[str]]:
    """The metrics that an evaluator returned, and the names of those that are not finite.

    Args:
        others: metrics of the evaluators before it.

    Raises:
        ValueError: if it returned anything but a mapping of names to numbers, or a name that is taken.
    """
    if inspect.iscoroutine(found) or asyncio.isfuture(found):
        raise ValueError("it returned a coroutine, not its metrics")
    if not isinstance(found, Mapping):
        raise ValueError(f"it returned {_kind(found)}, not a mapping of metrics to numbers")
    if len(found) > _MOST:
        raise ValueError(f"it returned {len(found):,} metrics, and at most {_MOST:,} are kept")
    figures = {}
    for name, value in found.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"{str(name)[:100]!r} is not a valid name of a metric. Use letters, digits and ._-/@+")
        if name in ("step", "split") or is_known(name):
            raise ValueError(f"the name {name} belongs to a metric of the run. Use another one, such as my/{name}")
        if name in others:
            raise ValueError(f"another evaluator returned {name} too. Use another name.")
        figures[name] = _number(name, value)
    return figures, [name for name, value in figures.items() if not math.isfinite(value)]


def _number(name: str, value: Any) -> float:
    plain = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
    if not isinstance(plain, Real):
        raise ValueError(f"the value of {name} is {_kind(value)}, not a number")
    try:
        return float(plain)
    except OverflowError:
        raise ValueError(f"the value of {name} is too large") from None


def _kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _place(error: BaseException, function: Any) -> str:
    """`FILE:LINE: ` of an error in the user's code; empty for what it returned."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    own = getattr(getattr(function, "__code__", None), "co_filename", None)
    frames = [frame for frame in frames if frame.filename == own] or frames
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""


def _reason(error: BaseException) -> str:
    if isinstance(error, ValueError) and error.__traceback__ is not None and not _place(error, None):
        return first_line(error)
    name, text = type(error).__name__, first_line(error).rstrip(".")
    return name if text == name else f"{name}: {text}"
