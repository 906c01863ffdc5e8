"""Runs that are begun, stopped and begun again: what must not go on, what may, and what is said of it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from integration.conftest import records, weights
from processes import run_ranks
from tropism import DPOTrainer
from tropism.cli.app import main
from tropism.config import METHODS
from tropism.errors import CheckpointError, StoppedEarly, TropismError, UsageError
from tropism.observe.console import Voice
from tropism.observe.rundir import RunDirectory
from tropism.train import loop
from tropism.train.frozen import reference
from tropism.train.setup import models

EARLY = {"eval_fraction": 0.2, "eval_every": 2, "stop_metric": "rewards/margins", "stop_delta": 100.0, "save_every": 2}


@pytest.fixture
def trainer(tiny_model_dir: Path, pairs: Path, tmp_path: Path) -> Callable[..., DPOTrainer]:
    def make(output: str, model: Any = None, **changes: Any) -> DPOTrainer:
        settings = {"output": str(tmp_path / output), "store": str(tmp_path / "store"), "samples": 0, "batch_size": 8,
                    "max_steps": 4, "learning_rate": 1e-3, "voice": Voice(loud=False), **changes}
        return DPOTrainer(tiny_model_dir if model is None else model, train_dataset=pairs, **settings)

    return make


def manifest(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "manifest.json").read_text())


def fail_at(patch: pytest.MonkeyPatch, step: int) -> None:
    """Training fails in a step."""
    real = loop.train_step
    patch.setattr(loop, "train_step", lambda engine, work: 1 / 0 if work.step == step else real(engine, work))


# --- the same trainer again ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("as_module", [False, True])
def test_a_trainer_that_failed_does_not_train_on_from_wrong_weights(
    as_module: bool, trainer: Callable[..., DPOTrainer], tiny_model_dir: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is refused; a new one begins at step 1 with the weights of the beginning, as a straight run."""
    def model() -> Any:
        return AutoModelForCausalLM.from_pretrained(tiny_model_dir) if as_module else None

    straight = trainer("straight", model()).fit()
    first = trainer("run", model())
    with monkeypatch.context() as patch:
        fail_at(patch, 3)
        with pytest.raises(ZeroDivisionError):
            first.fit()
    with pytest.raises(UsageError, match="has already trained"):
        first.fit(resume="auto")
    again = trainer("run", model()).fit(resume=True)
    ours, theirs = weights(again.model), weights(straight.model)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_trainer_that_was_refused_before_step_1_may_fit(trainer: Callable[..., DPOTrainer], tmp_path: Path) -> None:
    """Nothing was trained."""
    trainer("run").fit()
    one = trainer("run", max_steps=5, save_every=2)
    with pytest.raises(TropismError, match="exists and is not empty"):
        one.fit()
    with pytest.raises(CheckpointError, match="kept no checkpoint"):
        one.fit(resume="auto")


def test_fit_takes_what_the_constructor_takes(trainer: Callable[..., DPOTrainer], tmp_path: Path) -> None:
    """True is `auto`, False `never`, a path is a path, and anything else is refused by name."""
    done = trainer("run", save_every=2).fit(resume=True)
    assert trainer("run", save_every=2).fit(resume=True).steps == done.steps
    assert trainer("run", save_every=2).fit(resume=tmp_path / "run").steps == done.steps
    with pytest.raises(TropismError, match="exists and is not empty"):
        trainer("run", save_every=2, resume="auto").fit(resume=False)
    with pytest.raises(UsageError, match="resume"):
        trainer("run").fit(resume=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="--fall-back has no effect without --resume"):
        trainer("run", resume="auto", fall_back=True).fit(resume=False)


def test_a_module_gets_the_result_of_a_run_that_is_done(trainer: Callable[..., DPOTrainer], tiny_model_dir: Path,
                                                        ) -> None:
    """The module is trained in place, whichever sitting trained it; what cannot be evaluated says so."""
    result = trainer("run", AutoModelForCausalLM.from_pretrained(tiny_model_dir)).fit()
    module = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    later = trainer("run", module)
    later.fit(resume="auto")
    wanted = weights(result.model)
    assert all(torch.equal(module.state_dict()[name].double(), tensor) for name, tensor in wanted.items())
    with pytest.raises(UsageError, match="no rows to evaluate"):
        later.evaluate()


def test_evaluate_after_a_run_that_was_done_does_not_judge_the_initial_model(
        trainer: Callable[..., DPOTrainer]) -> None:
    """Neither by name."""
    trainer("run", eval_fraction=0.2).fit()
    later = trainer("run", eval_fraction=0.2)
    later.fit(resume="auto")
    with pytest.raises(UsageError, match="was already done"):
        later.evaluate()


# --- stopping --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("changes", [{"eval_fraction": 0.2}, {}, {"samples": 2, "loss": "simpo"}])
def test_a_signal_while_the_model_is_loaded_stops_the_run_there(
        changes: dict[str, Any], train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pack is scored, nothing is sampled or evaluated, and there is no step 1."""
    real, scored = models.Numerics.module, []

    def module(self: Any, named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(self, named)

    monkeypatch.setattr(models.Numerics, "module", module)
    monkeypatch.setattr(reference, "_score_pack", lambda *args: scored.append(args))
    monkeypatch.setattr("tropism.train.evaluation.samples.answer", lambda *args: scored.append(args))
    monkeypatch.setattr(loop, "train_step", lambda *args: scored.append(args))
    with pytest.raises(StoppedEarly, match="received SIGTERM"):
        train("dpo", microbatch_tokens=64, **changes)
    assert not scored
    assert manifest(tmp_path / "run1")["status"] == "stopped"
    assert not (tmp_path / "run1" / "lock").exists()
    assert not (tmp_path / "run1" / "metrics.jsonl").exists()


def test_a_signal_while_prompts_are_answered_stops_before_step_1(train: Callable[..., Any],
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing is evaluated first."""
    steps: list[Any] = []
    monkeypatch.setattr("tropism.train.evaluation.samples.answer",
                        lambda *args: os.kill(os.getpid(), signal.SIGTERM) or [])
    monkeypatch.setattr(loop, "train_step", lambda *args: steps.append(args))
    with pytest.raises(StoppedEarly, match="received SIGTERM"):
        train("dpo", samples=1)
    assert not steps


def test_max_time_counts_reading(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With data that takes an hour of a limit of half an hour."""
    from tropism.train.setup import inputs as api

    real, clock, hours = api.prepare_data, time.monotonic, 0

    def slow(*args: Any, **kwargs: Any) -> Any:
        nonlocal hours
        hours = 1
        return real(*args, **kwargs)

    monkeypatch.setattr(api, "prepare_data", slow)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600 * hours)
    monkeypatch.setattr(loop, "train_step", lambda *args: 1 / 0)
    with pytest.raises(StoppedEarly, match="--max-time is reached"):
        train("dpo", max_time="30min")


def test_max_time_counts_from_the_command(monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path, pairs: Path,
                                          tmp_path: Path) -> None:
    """Parsing, which imports torch, is part of it."""
    began: list[float] = []
    monkeypatch.setattr("tropism.runner.run", lambda options, **given: began.append(given["began"]))
    before = time.monotonic()
    assert main(["dpo", "--model", str(tiny_model_dir), "--data", str(pairs), "--output", str(tmp_path / "run")]) == 0
    assert before <= began[0] <= time.monotonic()


# --- going on --------------------------------------------------------------------------------------------------------

def test_more_patience_for_a_run_that_stopped_early(train: Callable[..., Any], tmp_path: Path,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    """Without it the run says why it is done and how to go on; with it, it does, and forgets its early end."""
    settings = {**EARLY, "output": str(tmp_path / "run"), "max_steps": 8}
    assert train("dpo", stop_patience=1, **settings).steps == 2
    assert manifest(tmp_path / "run")["stopped_by"] == "stop_metric"
    capsys.readouterr()
    assert train("dpo", stop_patience=1, resume="auto", **settings).steps == 2
    said = capsys.readouterr().out
    assert "It stopped early: no improvement of rewards/margins in 1 evaluation (best: " in said
    assert "--stop-patience" in said
    result = train("dpo", stop_patience=9, resume="auto", **settings)
    assert result.steps == 8
    found = manifest(tmp_path / "run")
    assert "stopped_by" not in found
    assert [line["step"] for line in records(result) if line["split"] == "eval"] == [0, 2, 4, 6, 8]


def test_the_manifest_forgets_an_end_and_how_a_lost_sitting_computed(tmp_path: Path) -> None:
    """What an extension makes untrue goes; from step 1 on, only when it began stays."""
    from tropism.observe.manifest import Manifest

    earlier = {"started": "then", "stopped_by": "stop_metric", "model_files": {}, "libraries": {"torch": "1"},
               "device": "cuda:0", "device_name": "H100", "world_size": 8, "policy": "abc"}
    extended = Manifest(RunDirectory(tmp_path), {"device": "cpu", "world_size": 1}, earlier, step=4).facts
    assert not {"stopped_by", "model_files"} & extended.keys()
    assert (extended["device"], extended["libraries"], extended["policy"]) == ("cuda:0", {"torch": "1"}, "abc")
    anew = Manifest(RunDirectory(tmp_path), {"device": "cpu", "world_size": 1}, earlier, step=0).facts
    assert (anew["started"], anew["device"], anew["world_size"]) == ("then", "cpu", 1)
    assert anew["libraries"]["torch"] != "1"
    assert not {"device_name", "policy"} & anew.keys()
    assert [sitting["step"] for sitting in anew["resumed"]] == [0]


def test_a_damaged_checkpoint_of_a_run_that_is_done_matters_only_to_go_on(train: Callable[..., Any],
                                                                          tmp_path: Path) -> None:
    """There is nothing to resume; with more steps there is."""
    settings = {"output": str(tmp_path / "run"), "save_every": 2, "keep": 1}
    train("dpo", max_steps=4, **settings)
    file = tmp_path / "run" / "checkpoints" / "step-00000004" / "trainer.json"
    file.write_text(file.read_text() + " ")
    assert train("dpo", max_steps=4, resume="auto", **settings).steps == 4
    with pytest.raises(CheckpointError, match=r"trainer\.json"):
        train("dpo", max_steps=6, resume="auto", **settings)


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_lock_alone_is_an_empty_directory(resume: str, train: Callable[..., Any], tmp_path: Path) -> None:
    """C1: what a kill leaves while config.yaml is written; the plain command begins, and so does `auto`."""
    output = tmp_path / "run"
    output.mkdir()
    code = ("import os, sys; from pathlib import Path; from tropism.observe.lock import owned\n"
            "with owned(Path(sys.argv[1])):\n    os._exit(0)")
    subprocess.run([sys.executable, "-c", code, str(output)], check=True)
    code = ("import os, signal, sys; from pathlib import Path; from tropism.files import write_whole\n"
            "Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
            "write_whole(Path(sys.argv[1]), b'method: dpo')")
    killed = subprocess.run([sys.executable, "-c", code, str(output / "config.yaml")], check=False)
    assert killed.returncode == -signal.SIGKILL
    left, = (path for path in output.iterdir() if path.name != "lock")
    assert left.read_text() == "method: dpo"
    with pytest.raises(UsageError, match="no run to resume"):
        train("dpo", output=str(output), max_steps=2, resume=str(output))
    assert train("dpo", output=str(output), max_steps=2, resume=resume).steps == 2
    assert not left.exists()


# --- options that would do nothing -----------------------------------------------------------------------------------

@pytest.mark.parametrize(("changes", "sentence"), [
    ({"eval_limit": 3}, "--eval-limit has no effect without evaluation rows"),
    ({"keep": 5}, "--keep has no effect without checkpoints"),
    ({"checkpoint_model": True}, "--checkpoint-model has no effect without checkpoints")])
def test_options_that_would_do_nothing_are_refused(changes: dict[str, Any], sentence: str) -> None:
    """And the defaults, which `config.yaml` spells out, are not."""
    least = {"model": "m", "data": "d", "output": "o"}
    with pytest.raises(UsageError, match=sentence):
        METHODS["dpo"](**least, **changes)
    written = METHODS["dpo"](**least).dump()
    del written["method"]
    METHODS["dpo"](**written)
    enabled = {"eval_fraction": 0.1} if "eval_limit" in changes else {"save_every": 5}
    METHODS["dpo"](**least, **changes, **enabled)


# --- several processes -----------------------------------------------------------------------------------------------

def _failing(rank: int, size: int, port: int, where: str, settings: dict[str, Any], folder: str) -> None:
    """Two ranks of which one fails at a place; each writes down what it raised."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from tropism.distributed import connect
    from tropism.runner import Run
    from tropism.train.evaluation import evaluator as evaluate
    from tropism.train.frozen import teacher
    from tropism.train.frozen.topk_store import TopKStore

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise TropismError("a rank failed") if where != "main" else OSError(28, "No space left on device")

    owner, name, failing = {"teacher": (teacher, "_top_k_of", 1), "write": (TopKStore, "add", 1),
                            "reference": (reference, "_score_pack", 1), "evaluate": (evaluate, "_values", 1),
                            "main": (RunDirectory, "write_config", 0)}[where]
    if rank == failing:
        setattr(owner, name, fail)
    method = "kd" if where in ("teacher", "write") else "dpo"
    raised = ""
    with connect() as world:
        try:
            Run(METHODS[method](**settings), world, Voice(loud=False)).fit()
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
    (Path(folder) / f"{where}-{rank}").write_text(raised)


@pytest.mark.some(2)
@pytest.mark.parametrize("where", ["teacher", "write", "reference", "evaluate", "main"])
def test_a_rank_that_fails_leaves_no_other_waiting(where: str, tiny_model_dir: Path, pairs: Path, tmp_path: Path,
                                                   ) -> None:
    """In each pass, in a write to the store, and where the main rank alone does something, both end with what
    happened; an error that is none of ours is named by its type on the other."""
    settings: dict[str, Any] = {
        "model": str(tiny_model_dir), "data": str(pairs), "output": str(tmp_path / "run"),
        "store": str(tmp_path / "store"), "samples": 0, "batch_size": 8, "max_steps": 2, "microbatch_tokens": 128}
    if where in ("teacher", "write"):
        settings |= {"teacher": str(tiny_model_dir), "top_k": 5}
        rows = [json.loads(line) for line in pairs.read_text().splitlines()]
        answers = tmp_path / "answers.jsonl"
        answers.write_text("".join(
            json.dumps({"prompt": row["prompt"], "completion": row["chosen"]}) + "\n" for row in rows))
        settings["data"] = str(answers)
    elif where == "evaluate":
        settings["eval_fraction"] = 0.2
    settings["parallel"] = {"shard": 1, "replicate": 2}
    assert run_ranks(2, _failing, where, settings, str(tmp_path)) == [0, 0]
    raised = [(tmp_path / f"{where}-{rank}").read_text() for rank in range(2)]
    if where == "main":
        assert raised[0] == "OSError: [Errno 28] No space left on device"
        assert raised[1] == "TropismError: process 0: OSError: [Errno 28] No space left on device"
    else:
        assert raised == ["TropismError: a rank failed"] * 2
    if where not in ("teacher", "reference", "evaluate"):
        return
    settings |= {"parallel": {"shard": "on"}, "output": str(tmp_path / "sharded"), "store": str(tmp_path / "its store")}
    assert run_ranks(2, _failing, where, settings, str(tmp_path)) == [0, 0]
    raised = [(tmp_path / f"{where}-{rank}").read_text() for rank in range(2)]
    assert raised[0].startswith("TropismError: another process of the run failed")  # it waited inside of a layer
    assert raised[1] == "TropismError: a rank failed"
