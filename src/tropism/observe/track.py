"""Trackers: the records of `metrics.jsonl`, shown elsewhere too, through the tracker classes of accelerate.

A tracker that fails is left out from then on, with one warning; training never stops for it. No `Accelerator` is
needed, and accelerate learns nothing of the process group: only the main rank has trackers, and its caller knows.
"""

import difflib
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

from tropism.errors import UsageError

TRACKERS: tuple[str, ...] = ("tensorboard", "wandb", "trackio", "mlflow", "comet_ml", "aim", "clearml", "dvclive",
                             "swanlab")
"""Known names; each is also the name of the package that it needs. More come from the entry points below."""

ENTRY_POINTS = "tropism.trackers"
"""Entry-point group of other trackers: classes with the methods of `accelerate.tracking.GeneralTracker`."""

_EXTRAS = frozenset(("tensorboard", "wandb", "trackio", "mlflow"))  # the names that `pip install tropism[...]` knows
_PROJECT = "tropism"


def check(names: Sequence[str]) -> None:
    """Stop before anything is spent if a tracker cannot work. Imports nothing if there are no names.

    Raises:
        UsageError: for an unknown name, or a package that is missing, too old or broken.
    """
    for name in _clean(names):
        if name in TRACKERS:
            missing = [package for package in ("accelerate", name) if not _installed(package)]
            if missing:
                what = f"'tropism[{name}]'" if name in _EXTRAS else " ".join(missing)
                raise UsageError(f"tracker '{name}' needs {' and '.join(missing)}: pip install {what}")
        try:
            _class(name)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"tracker '{name}' cannot be loaded: {_first_line(error)}. Install its package again, "
                             "or leave it out") from error


class Trackers:
    """Trackers of a run.

    Args:
        names: of `TRACKERS` or of installed entry points.
        run_name: what the run is called there.
        directory: where trackers that write files put them.
        config: options of the run; nested names are joined by dots, None is left out, lists become text.
        warn: is told, once per tracker, what failed.
    """

    def __init__(self, names: Sequence[str], run_name: str, directory: Path, config: dict[str, Any],
                 warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._running: dict[str, Any] = {}
        options = dict(_flat(config))
        for name in _clean(names):
            with self._guarded(name, "could not start"):
                tracker = _make(name, run_name, directory)
                with _without_state():
                    tracker.start()
                    if hasattr(tracker, "store_init_configuration"):
                        tracker.store_init_configuration(dict(options))
                self._running[name] = tracker

    def log(self, record: Mapping[str, Any], step: int, split: str) -> None:
        """One record; what is no number stays out. Keys are shown as `split/key`."""
        numbers = {key: value if isinstance(value, (int, float)) else float(value)
                   for key, value in record.items() if isinstance(value, Real)}
        for name, tracker in list(self._running.items()):
            border = "_" if name == "clearml" else "/"  # clearml parts titles by train_ and eval_
            with self._guarded(name, f"failed at step {step}"), _without_state():
                tracker.log({f"{split}{border}{key}": value for key, value in numbers.items()}, step=step)

    def finish(self) -> None:
        """Close all trackers. Safe to call twice."""
        for name, tracker in list(self._running.items()):
            with self._guarded(name, "could not be closed"), _without_state():
                tracker.finish()
        self._running.clear()

    @contextmanager
    def _guarded(self, name: str, what: str) -> Iterator[None]:
        """An error of a tracker ends that tracker, not the run."""
        try:
            yield
        except Exception as error:
            self._running.pop(name, None)
            self._warn(f"tracker '{name}' {what}: {_first_line(error)}. It gets no more records; training is not "
                       "affected, and metrics.jsonl is complete")


def _clean(names: Iterable[str]) -> list[str]:
    """Names as they may come out of a comma-separated list."""
    return list(dict.fromkeys(name.strip() for name in names if name.strip()))


def _installed(package: str) -> bool:
    """Whether a package can be imported; a mere folder of its name, as trackers leave behind, is none."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def _others() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def _class(name: str) -> Any:
    """The class of a tracker.

    Raises:
        UsageError: if the name is unknown, or unknown to the accelerate that is installed.
    """
    if name in TRACKERS:
        accelerate = importlib.import_module("accelerate.tracking")
        if name not in accelerate.LOGGER_TYPE_TO_CLASS:
            raise UsageError(f"tracker '{name}' is unknown to the accelerate that is installed: "
                             "pip install --upgrade accelerate")
        return accelerate.LOGGER_TYPE_TO_CLASS[name]
    others = _others()
    if name not in others:
        known = [*TRACKERS, *others]
        near = difflib.get_close_matches(name.lower(), known, n=1)
        raise UsageError(f"unknown tracker '{name}'{f'; did you mean {near[0]!r}?' if near else ''} "
                         f"Known: {', '.join(known)}")
    return others[name].load()


def _make(name: str, run_name: str, directory: Path) -> Any:
    """A tracker, not yet started."""
    kind = _class(name)
    directory.mkdir(parents=True, exist_ok=True)
    if name in TRACKERS:
        tracker = kind(**_arguments(name, run_name, directory))
    elif getattr(kind, "requires_logging_directory", False):
        tracker = kind(run_name, str(directory))
    else:
        tracker = kind(run_name)
    # Else its methods would ask accelerate which rank this is, and accelerate might start a process group to know.
    tracker.main_process_only = False
    return tracker


def _arguments(name: str, run_name: str, directory: Path) -> dict[str, Any]:
    """What accelerate's class takes. It calls the project `run_name` where a service has projects."""
    def project(variable: str) -> str:
        return os.environ.get(variable) or _PROJECT

    arguments: dict[str, dict[str, Any]] = {
        "tensorboard": {"run_name": run_name, "logging_dir": str(directory)},
        "wandb": {"run_name": project("WANDB_PROJECT"), "name": os.environ.get("WANDB_NAME") or run_name,
                  "dir": os.environ.get("WANDB_DIR") or str(directory)},
        "trackio": {"run_name": project("TRACKIO_PROJECT"), "name": run_name},
        "mlflow": {"experiment_name": _PROJECT, "run_name": run_name},  # the class itself heeds MLFLOW_EXPERIMENT_NAME
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
    """The methods of accelerate's logger, without its question for the rank."""

    def warning_once(self, message: str, *args: Any, **kwargs: Any) -> None:
        self.warning(message, *args, **kwargs)


@contextmanager
def _without_state() -> Iterator[None]:
    """Lend accelerate's tracker module a plain logger: its own refuses to work before the state of ranks is set up,
    and setting that up may start a process group, choose a device or change the number of threads."""
    module = sys.modules.get("accelerate.tracking")
    if module is None:  # a tracker of someone else, which does not use it
        yield
        return
    own = module.__dict__.get("logger")
    module.__dict__["logger"] = _PlainLogger(logging.getLogger("accelerate.tracking"), {})
    try:
        yield
    finally:
        module.__dict__["logger"] = own


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Options as every tracker takes them."""
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


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0].rstrip('.')}" if text else type(error).__name__
