"""Trackers: records arrive, a failure is told once and stops nothing, and nobody asks accelerate for the rank."""

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tropism.errors import UsageError
from tropism.observe import track
from tropism.observe.track import TRACKERS, Trackers, check


class Fake:
    """A tracker that remembers; `fails` names the call that raises, and `error` what."""

    name = "fake"
    main_process_only = True
    fails: ClassVar[str] = ""
    error: ClassVar[BaseException] = RuntimeError("no route to host.\nlong trace")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.arguments = (*args, kwargs)
        self.calls: list[tuple[Any, ...]] = []
        type(self).made = self  # type: ignore[attr-defined]
        self._call("make")

    def _call(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] == self.fails:
            raise self.error

    def start(self) -> None:
        self._call("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._call("config", values)

    def log(self, values: dict[str, Any], step: int) -> None:
        self._call("log", values, step)

    def finish(self) -> None:
        self._call("finish")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """Classes of accelerate replaced: each tracker's by a fake of its own."""
    tracking = pytest.importorskip("accelerate.tracking")
    made = {name: type(name, (Fake,), {}) for name in TRACKERS}
    monkeypatch.setattr(tracking, "LOGGER_TYPE_TO_CLASS", made)
    monkeypatch.setattr(track, "_installed", lambda package: True)
    return made


def begin(names: list[str], path: Path, config: dict[str, Any] | None = None) -> tuple[Trackers, list[str]]:
    said: list[str] = []
    return Trackers(names, "kto-1", path / "logs", config or {}, said.append), said


# --- what arrives ---------------------------------------------------------------------------------------------------


def test_records_arrive(fakes: dict[str, Any], tmp_path: Path) -> None:
    trackers, said = begin(["tensorboard", " wandb", "", "wandb"], tmp_path, {"beta": 0.1})
    trackers.log({"loss": 0.5, "rewards/margins": 1, "note": "text", "nothing": None}, 3, "train")
    trackers.log({"loss": 0.25}, 3, "eval")
    trackers.finish()
    trackers.finish()
    assert not said
    for name in ("tensorboard", "wandb"):
        assert fakes[name].made.calls == [
            ("make",), ("start",), ("config", {"beta": 0.1}),
            ("log", {"train/loss": 0.5, "train/rewards/margins": 1}, 3), ("log", {"eval/loss": 0.25}, 3), ("finish",)]
        assert fakes[name].made.main_process_only is False
    assert (tmp_path / "logs").is_dir()


def test_tables_arrive_where_tables_are_known(fakes: dict[str, Any], tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb and clearml have a method for tables, tensorboard gets text, and others get nothing."""
    def log_table(self: Any, name: str, columns: list[str], data: list[list[str]], step: int) -> None:
        self.calls.append(("table", name, columns, data, step))

    monkeypatch.setattr(fakes["wandb"], "log_table", log_table, raising=False)
    trackers, said = begin(["tensorboard", "wandb", "mlflow"], tmp_path)
    trackers.table("samples", ("step", "completion"), [("3", "a\nb")], 3)
    assert not said
    assert fakes["wandb"].made.calls[-1] == ("table", "samples", ["step", "completion"], [["3", "a\nb"]], 3)
    assert fakes["tensorboard"].made.calls[-1] == (
        "log", {"samples": "| step | completion |\n| --- | --- |\n| `3` | `a b` |"}, 3)
    assert fakes["mlflow"].made.calls[-1][0] == "config"


def test_clearml_parts_names_in_its_own_way(fakes: dict[str, Any], tmp_path: Path) -> None:
    trackers, _ = begin(["clearml"], tmp_path)
    trackers.log({"loss": 0.5}, 1, "eval")
    assert fakes["clearml"].made.calls[-1] == ("log", {"eval_loss": 0.5}, 1)


def test_config_becomes_what_every_tracker_takes(fakes: dict[str, Any], tmp_path: Path) -> None:
    """Names of nested options are joined, None is left out, and all else is a number, a truth value or text."""
    begin(["tensorboard"], tmp_path, {
        "beta": 0.1, "seed": 0, "packed": True, "model": "m", "none": None, "path": Path("a") / "b",
        "lora": {"rank": 8, "modules": ["q", "v"], "none": None, "deep": {"x": 1}}, "empty": {}, "pair": (1, None)})
    (config,) = [call[1] for call in fakes["tensorboard"].made.calls if call[0] == "config"]
    assert config == {"beta": 0.1, "seed": 0, "packed": True, "model": "m", "path": str(Path("a") / "b"),
                      "lora.rank": 8, "lora.modules": '["q", "v"]', "lora.deep.x": 1, "pair": "[1, null]"}


@pytest.mark.parametrize("name", TRACKERS)
def test_real_classes_take_the_arguments(name: str, tmp_path: Path) -> None:
    """None of accelerate's classes imports its package before it is started."""
    pytest.importorskip("accelerate.tracking")
    assert track._make(name, "kto-1", tmp_path).main_process_only is False


def test_projects_are_chosen_by_the_services_own_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    assert track._arguments("wandb", "kto-1", tmp_path)["run_name"] == "tropism"
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    assert track._arguments("wandb", "kto-1", tmp_path)["run_name"] == "mine"


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "words"), [
    ("make", "could not start"), ("start", "could not start"), ("config", "could not start"),
    ("log", "failed at step 1"), ("finish", "could not be closed"),
])
def test_a_failure_is_told_once_and_the_others_go_on(
    fakes: dict[str, Any], tmp_path: Path, call: str, words: str,
) -> None:
    """H4: a tracker failure never stops training."""
    fakes["wandb"].fails = call
    trackers, said = begin(["wandb", "tensorboard"], tmp_path)
    for step in (1, 2):
        trackers.log({"loss": 0.5}, step, "train")
    trackers.finish()
    (text,) = said
    assert text.startswith(f"tracker 'wandb' {words}: RuntimeError: no route to host. ")
    assert "long trace" not in text
    assert "metrics.jsonl is complete" in text
    assert [entry[0] for entry in fakes["wandb"].made.calls].count(call) == 1
    assert [entry[0] for entry in fakes["tensorboard"].made.calls] == [
        "make", "start", "config", "log", "log", "finish"]


def test_an_interrupt_passes(fakes: dict[str, Any], tmp_path: Path) -> None:
    fakes["wandb"].fails, fakes["wandb"].error = "log", KeyboardInterrupt()
    trackers, said = begin(["wandb"], tmp_path)
    with pytest.raises(KeyboardInterrupt):
        trackers.log({"loss": 0.5}, 1, "train")
    assert not said


def test_an_error_without_text_has_a_name(fakes: dict[str, Any], tmp_path: Path) -> None:
    fakes["wandb"].fails, fakes["wandb"].error = "start", TimeoutError()
    _, said = begin(["wandb"], tmp_path)
    assert "could not start: TimeoutError. " in said[0]


def test_a_directory_that_cannot_be_made(fakes: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    _, said = begin(["wandb"], tmp_path)
    assert "could not start: FileExistsError" in said[0]


def test_accelerates_logger_is_given_back(fakes: dict[str, Any], tmp_path: Path) -> None:
    from accelerate import tracking

    own = tracking.logger
    fakes["wandb"].fails = "log"
    trackers, _ = begin(["wandb"], tmp_path)
    trackers.log({"loss": 0.5}, 1, "train")
    assert tracking.logger is own


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "near"), [
    ("tensorbord", "Did you mean tensorboard?"), ("WandB", "Did you mean wandb?"), ("comet", "comet_ml?"),
    ("x", "Known: tensorboard, wandb, trackio"),
])
def test_unknown_names_are_refused(name: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"unknown tracker '{name}'") as error:
        check([name])
    assert near in str(error.value)


@pytest.mark.parametrize(("name", "missing", "command"), [
    ("wandb", {"wandb"}, "requires wandb. Run: pip install 'tropism[wandb]'"),
    ("mlflow", {"mlflow", "accelerate"}, "requires accelerate and mlflow. Run: pip install 'tropism[mlflow]'"),
    ("aim", {"aim"}, "requires aim. Run: pip install aim"),
    ("swanlab", {"swanlab", "accelerate"}, "requires accelerate and swanlab. Run: pip install accelerate swanlab"),
])
def test_missing_packages_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, missing: set[str], command: str,
) -> None:
    monkeypatch.setattr(track, "_installed", lambda package: package not in missing)
    with pytest.raises(UsageError) as error:
        check(["", name])
    assert command in str(error.value)


def test_an_accelerate_that_is_too_old_is_refused(fakes: dict[str, Any]) -> None:
    del fakes["swanlab"]
    check(["wandb"])
    with pytest.raises(UsageError, match="pip install --upgrade accelerate"):
        check(["swanlab"])


def test_a_folder_is_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Trackers leave folders of their name behind, which Python would import."""
    (tmp_path / "folder_of_a_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("folder_of_a_tracker") is not None
    assert not track._installed("folder_of_a_tracker")
    assert track._installed("json")


def test_nothing_is_imported_without_names() -> None:
    code = ("import sys; from tropism.observe.track import Trackers, check; check([]); check(['']);"
            "Trackers([], 'r', None, {}, print).log({'loss': 1.0}, 1, 'train'); print('accelerate' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- trackers of others ---------------------------------------------------------------------------------------------


class Bare:
    """The least that an entry point needs."""

    requires_logging_directory = True
    made: ClassVar[list[Any]] = []

    def __init__(self, run_name: str, directory: str) -> None:
        Bare.made.append((run_name, directory))

    def start(self) -> None:
        Bare.made.append("start")

    def log(self, values: dict[str, float], step: int) -> None:
        Bare.made.append((values, step))

    def finish(self) -> None:
        Bare.made.append("finish")


def test_entry_points(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    points = [EntryPoint("bare", f"{__name__}:Bare", track.ENTRY_POINTS),
              EntryPoint("fake", f"{__name__}:Fake", track.ENTRY_POINTS),
              EntryPoint("broken", "no_such_module:Tracker", track.ENTRY_POINTS)]
    monkeypatch.setattr(track, "entry_points", lambda group: points if group == "tropism.trackers" else [])
    check(["bare", "fake"])
    with pytest.raises(UsageError, match="'broken' cannot be loaded: ModuleNotFoundError"):
        check(["broken"])
    with pytest.raises(UsageError, match="Did you mean bare"):
        check(["baare"])
    trackers, said = begin(["bare", "fake", "broken", "none such"], tmp_path)
    trackers.log({"loss": 0.5}, 1, "train")
    trackers.finish()
    assert Bare.made == [("kto-1", str(tmp_path / "logs")), "start", ({"train/loss": 0.5}, 1), "finish"]
    assert Fake.made.arguments == ("kto-1", {})  # type: ignore[attr-defined]
    assert [text.split(":")[0] for text in said] == [
        "tracker 'broken' could not start", "tracker 'none such' could not start"]


# --- the real ones --------------------------------------------------------------------------------------------------


RUN = """
import json, os, sys
from pathlib import Path
import torch
from tropism.observe.track import Trackers, check
names, directory = sys.argv[1].split(","), Path(sys.argv[2])
before = dict(os.environ), torch.get_num_threads()
check(names)
said = []
trackers = Trackers(names, "kto-1", directory, {"beta": 0.1, "lora": {"rank": 8}, "none": None}, said.append)
for step in (1, 2):
    trackers.log({"loss": 1 / step}, step, "train")
trackers.log({"rewards/auc": 0.75}, 2, "eval")
trackers.finish()
from accelerate.state import PartialState
print("RESULT " + json.dumps([said, PartialState._shared_state, torch.distributed.is_initialized(),
                              torch.get_num_threads() == before[1]]))
"""


def run_for_real(name: str, tmp_path: Path) -> Path:
    """A run in a process that looks like a rank of several: accelerate would start a process group if asked."""
    pytest.importorskip("accelerate")
    pytest.importorskip(name)
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": str(tmp_path / "trackio")}
    done = subprocess.run([sys.executable, "-c", RUN, name, str(tmp_path / "logs")], cwd=tmp_path, text=True,
                          env={**os.environ, **ranks, **quiet}, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    assert json.loads(result.removeprefix("RESULT ")) == [[], {}, False, True], done.stderr
    return tmp_path


def test_tensorboard_for_real(tmp_path: Path) -> None:
    path = run_for_real("tensorboard", tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path / "logs" / "kto-1"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 0.5)]
    assert [(event.step, event.value) for event in events.Scalars("eval/rewards/auc")] == [(2, 0.75)]


def test_wandb_for_real(tmp_path: Path) -> None:
    assert list(run_for_real("wandb", tmp_path).glob("logs/wandb/offline-run-*/*.wandb"))


def test_trackio_for_real(tmp_path: Path) -> None:
    assert (run_for_real("trackio", tmp_path) / "trackio" / "tropism.db").is_file()


def test_the_name_of_a_run_is_text(fakes: dict[str, type], tmp_path: Path) -> None:
    """Trackers print it, also that of a directory of somebody else."""
    Trackers(["wandb"], "a\x1b[31m\nb", tmp_path, {}, print)
    assert fakes["wandb"].made.arguments[-1]["name"] == r"a\x1b[31m\nb"  # type: ignore[attr-defined]
