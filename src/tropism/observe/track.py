"""Experiment trackers: send the records of `metrics.jsonl` to the tracker classes of accelerate.

A tracker that fails is disabled with one warning, and training continues. No `Accelerator` is needed, and accelerate
does not see the process group: the caller creates trackers on the main process only.
"""

import importlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from typing import Any

from tropism.errors import UsageError, did_you_mean, first_line
from tropism.printable import escaped

TRACKERS: tuple[str, ...] = ("tensorboard", "wandb", "trackio", "mlflow", "comet_ml", "aim", "clearml", "dvclive",
                             "swanlab")
"""Known names. Each is also the name of the required package. Entry points add further ones."""

ENTRY_POINTS = "tropism.trackers"
"""Entry-point group for other trackers: classes with the methods of `accelerate.tracking.GeneralTracker`."""

_EXTRAS = frozenset(("tensorboard", "wandb", "trackio", "mlflow"))  # the names that `pip install tropism[...]` knows
_PROJECT = "tropism"


def check_names(names: Sequence[str]) -> None:
    """Check that trackers are known and installed. Imports nothing.

    Raises:
        UsageError: for an unknown name, or a missing package.
    """
    for name in _clean(names):
        if name not in TRACKERS and name not in (others := _others()):
            raise UsageError(f"unknown tracker '{name}'. {did_you_mean(name.lower(), [*TRACKERS, *others])}")
        if name in TRACKERS:
            missing = [package for package in ("accelerate", name) if not _installed(package)]
            if missing:
                what = f"'tropism[{name}]'" if name in _EXTRAS else " ".join(missing)
                raise UsageError(f"tracker '{name}' requires {' and '.join(missing)}. Run: pip install {what}")


def check(names: Sequence[str]) -> None:
    """Check that trackers can be used. Imports nothing if there are no names.

    Raises:
        UsageError: for an unknown name, or a missing, outdated or broken package.
    """
    check_names(names)
    for name in _clean(names):
        try:
            _class(name)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"tracker '{name}' cannot be loaded: {_reason(error)}. Reinstall its package, or remove "
                             "it from --track.") from error


class Trackers:
    """Trackers of a run.

    Args:
        names: of `TRACKERS` or of installed entry points.
        run_name: name of the run in the tracker.
        directory: for trackers that write files.
        config: options of the run. Nested names are joined by dots, None is omitted, lists become text.
        warn: receives one message per failed tracker.
    """

    def __init__(self, names: Sequence[str], run_name: str, directory: Path, config: dict[str, Any],
                 warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._running: dict[str, Any] = {}
        options, run_name = dict(_flat(config)), escaped(run_name)  # most trackers print it
        for name in _clean(names):
            with self._guarded(name, "could not start"):
                tracker = _make(name, run_name, directory)
                with _without_state():
                    tracker.start()
                    if hasattr(tracker, "store_init_configuration"):
                        tracker.store_init_configuration(dict(options))
                self._running[name] = tracker

    def log(self, record: Mapping[str, Any], step: int, split: str, others: Mapping[str, float] | None = None) -> None:
        """Send the numbers of a record, with keys `split/key`, and others with their own keys."""
        numbers = {key: value if isinstance(value, (int, float)) else float(value)
                   for key, value in record.items() if isinstance(value, Real)}
        for name, tracker in list(self._running.items()):
            border = "_" if name == "clearml" else "/"  # clearml separates titles by train_ and eval_
            with self._guarded(name, f"failed at step {step}"), _without_state():
                tracker.log({**(others or {}), **{f"{split}{border}{key}": value for key, value in numbers.items()}},
                            step=step)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], step: int) -> None:
        """Send a table of texts to the trackers that know tables; tensorboard gets it as Markdown."""
        for name, tracker in list(self._running.items()):
            with self._guarded(name, f"failed at step {step}"), _without_state():
                if hasattr(tracker, "log_table"):
                    tracker.log_table(title, columns=list(columns), data=[list(row) for row in rows], step=step)
                elif name == "trackio":
                    found = importlib.import_module("trackio").Table(columns=list(columns), data=list(map(list, rows)))
                    tracker.log({title: found}, step=step)
                elif name == "tensorboard":
                    tracker.log({title: _markdown(columns, rows)}, step=step)

    def finish(self) -> None:
        """Close all trackers. Safe to call twice."""
        for name, tracker in list(self._running.items()):
            with self._guarded(name, "could not be closed"), _without_state():
                tracker.finish()
        self._running.clear()

    @contextmanager
    def _guarded(self, name: str, what: str) -> Iterator[None]:
        """Disable a tracker that raises."""
        try:
            yield
        except Exception as error:
            self._running.pop(name, None)
            self._warn(f"tracker '{name}' {what}: {_reason(error)}. It is disabled. Training continues, and "
                       "metrics.jsonl is complete.")


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in which no text is markup: each cell is one line of code."""
    cells = [[f"`{' '.join(text.split()).replace('`', chr(39)).replace('|', chr(0xA6))}`" for text in row]
             for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *cells))


def _clean(names: Iterable[str]) -> list[str]:
    """Names of a comma-separated list, stripped and without repetitions."""
    return list(dict.fromkeys(name.strip() for name in names if name.strip()))


def _installed(package: str) -> bool:
    """Whether a package can be imported. A directory of that name, which trackers leave behind, is not one."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def _others() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def _class(name: str) -> Any:
    """The class of a tracker.

    Raises:
        UsageError: if the name is unknown, or unsupported by the installed accelerate.
    """
    if name in TRACKERS:
        accelerate = importlib.import_module("accelerate.tracking")
        if name not in accelerate.LOGGER_TYPE_TO_CLASS:
            raise UsageError(f"tracker '{name}' is not supported by the installed accelerate. Run: "
                             "pip install --upgrade accelerate")
        return accelerate.LOGGER_TYPE_TO_CLASS[name]
    return _others()[name].load()


def _make(name: str, run_name: str, directory: Path) -> Any:
    """Create a tracker without starting it."""
    kind = _class(name)
    directory.mkdir(parents=True, exist_ok=True)
    if name in TRACKERS:
        tracker = kind(**_arguments(name, run_name, directory))
    elif getattr(kind, "requires_logging_directory", False):
        tracker = kind(run_name, str(directory))
    else:
        tracker = kind(run_name)
    # Otherwise its methods ask accelerate for the rank, which may start a process group.
    tracker.main_process_only = False
    return tracker


def _arguments(name: str, run_name: str, directory: Path) -> dict[str, Any]:
    """Arguments of accelerate's class, in which `run_name` is the project for services with projects."""
    def project(variable: str) -> str:
        return os.environ.get(variable) or _PROJECT

    arguments: dict[str, dict[str, Any]] = {
        "tensorboard": {"run_name": run_name, "logging_dir": str(directory)},
        "wandb": {"run_name": project("WANDB_PROJECT"), "name": os.environ.get("WANDB_NAME") or run_name,
                  "dir": os.environ.get("WANDB_DIR") or str(directory)},
        "trackio": {"run_name": project("TRACKIO_PROJECT"), "name": run_name},
        "mlflow": {"experiment_name": _PROJECT, "run_name": run_name},  # the class reads MLFLOW_EXPERIMENT_NAME
        "comet_ml": {"run_name": project("COMET_PROJECT_NAME")},
        "aim": {"run_name": run_name, "logging_dir": str(directory)},
        "clearml": {"project_name": project("CLEARML_PROJECT"),
                    "task_name": os.environ.get("CLEARML_TASK") or run_name},
        "dvclive": {"dir": str(directory / run_name / "dvclive")},
        "swanlab": {"run_name": project("SWANLAB_PROJ_NAME"), "experiment_name": run_name,
                    "logdir": str(directory / "swanlab")},
    }
    return arguments[name]


class _PlainLogger(logging.LoggerAdapter[logging.Logger]):
    """The methods of accelerate's logger, without its lookup of the rank."""

    def warning_once(self, message: str, *args: Any, **kwargs: Any) -> None:
        self.warning(message, *args, **kwargs)


@contextmanager
def _without_state() -> Iterator[None]:
    """Give accelerate's tracker module a plain logger. Its own requires a state whose setup may start a process group,
    select a device or change the number of threads."""
    module = sys.modules.get("accelerate.tracking")
    if module is None:  # a third-party tracker that does not use it
        yield
        return
    own = module.__dict__.get("logger")
    module.__dict__["logger"] = _PlainLogger(logging.getLogger("accelerate.tracking"), {})
    try:
        yield
    finally:
        module.__dict__["logger"] = own


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Options as flat names with plain values."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif type(value) in (bool, int, float, str):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield name, json.dumps(value, default=str, ensure_ascii=False)
        elif value is not None:
            yield name, str(value)


def _reason(error: Exception) -> str:
    name, text = type(error).__name__, first_line(error).rstrip(".")
    return name if text == name else f"{name}: {text}"
