"""Stopping and going on: the same run as one that was never stopped, to the bit."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.conftest import NOT_RESULTS, weights
from tropism.api import run
from tropism.cli import main
from tropism.config import METHODS
from tropism.errors import CheckpointError, StoppedEarly

Start = Callable[..., Any]
STEPS = 7
TIMES = NOT_RESULTS - {"tokens/computed"}


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """The tiny model with other weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = tmp_path_factory.mktemp("teacher")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.3)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, pairs: Path) -> Path:
    """Completions to imitate."""
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    path.write_text("".join(json.dumps({"prompt": row["prompt"], "completion": row["chosen"]}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def settings(tiny_model_dir: Path, feedback: Path, pairs: Path, answers: Path, teacher_dir: Path,
             tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Options of a short run that has everything: evaluations, windows of three steps, AdamW."""
    store = tmp_path_factory.mktemp("store")
    cases: dict[str, dict[str, Any]] = {
        "sft": {"data": answers}, "dpo": {"data": pairs}, "kto": {"data": feedback},
        "bco": {"data": feedback, "loss": "bco"}, "kd": {"data": answers, "teacher": teacher_dir},
        "top_k": {"data": answers, "teacher": teacher_dir, "top_k": 8}}

    def of(case: str, output: Path, **changes: Any) -> dict[str, Any]:
        chosen = {"model": tiny_model_dir, "output": output, "batch_size": 8, "max_steps": STEPS, "log_every": 3,
                  "eval_fraction": 0.2, "eval_every": 2, "learning_rate": 1e-3, "samples": 1, **cases[case], **changes}
        if case != "sft":
            chosen.setdefault("store", store)
        return {key: str(value) if isinstance(value, Path) else value for key, value in chosen.items()}

    return of


def method_of(case: str) -> str:
    return {"bco": "kto", "top_k": "kd"}.get(case, case)


@pytest.fixture(scope="module")
def start(settings: Callable[..., dict[str, Any]]) -> Start:
    """Run a case into a directory."""
    return lambda case, output, **changes: run(METHODS[method_of(case)](**settings(case, output, **changes)))


@pytest.fixture(scope="module")
def straight(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The same run, never stopped; made once."""
    made: dict[str, Path] = {}

    def of(case: str, **changes: Any) -> Path:
        key = repr((case, sorted(changes.items())))
        if key not in made:
            made[key] = start(case, tmp_path_factory.mktemp("straight") / case, **changes).directory
        return made[key]

    return of


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Send this process a signal while it does a step."""
    import tropism.train.loop as loop

    real = loop.train_step

    def arm(step: int, number: int = signal.SIGTERM) -> None:
        def watched(engine: Any, work: Any) -> Any:
            if work.step == step:
                os.kill(os.getpid(), number)
            return real(engine, work)

        monkeypatch.setattr(loop, "train_step", watched)

    return arm


def lines(directory: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in found]


def assert_same_run(ours: Path, theirs: Path) -> None:
    """Weights, metrics and samples, to the bit; times and memory left out."""
    assert lines(ours) == lines(theirs)
    one, other = weights(ours / "model"), weights(theirs / "model")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (ours / "samples.jsonl").read_text() == (theirs / "samples.jsonl").read_text()


def manifest(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "manifest.json").read_text())


EVERYWHERE = tuple(range(1, STEPS + 1))
SOMEWHERE = (2, 3, 5)  # in mid-window, at a record, and between an evaluation and a record


@pytest.mark.parametrize(("case", "stops"), [("sft", SOMEWHERE), ("dpo", SOMEWHERE), ("kto", EVERYWHERE),
                                             ("bco", SOMEWHERE), ("kd", SOMEWHERE), ("top_k", SOMEWHERE)])
def test_stopping_anywhere_and_going_on_is_the_straight_run(
    case: str, stops: tuple[int, ...], start: Start, straight: Callable[..., Path], stop_after: Callable[..., None],
    tmp_path: Path,
) -> None:
    """C1, R2: after one step after the other, within one run that is stopped again and again."""
    wanted, output = straight(case), tmp_path / "run"
    for step in stops:
        stop_after(step)
        with pytest.raises(StoppedEarly, match=f"it got SIGTERM. Go on with: tropism resume {output}"):
            start(case, output, resume="auto")
        assert manifest(output)["status"] == "stopped"
    stop_after(0)
    start(case, output, resume="auto")
    assert_same_run(output, wanted)
    found = manifest(output)
    assert [sitting["step"] for sitting in found["resumed"]] == list(stops)
    assert found["status"] == "done"
    assert found["reference" if case in ("dpo", "kto", "bco") else "policy"] == manifest(wanted)[
        "reference" if case in ("dpo", "kto", "bco") else "policy"]


def test_a_signal_leaves_no_time_for_another_evaluation(
    start: Start, straight: Callable[..., Path], stop_after: Callable[..., None], tmp_path: Path,
) -> None:
    """C1: the record of a stop in mid-window, and none twice; a kill may follow, so nothing comes after the save."""
    stop_after(5, signal.SIGUSR1)
    with pytest.raises(StoppedEarly, match="SIGUSR1"):
        start("dpo", tmp_path / "run")
    assert [(line["step"], line["split"]) for line in lines(tmp_path / "run")] == [
        (0, "eval"), (2, "eval"), (3, "train"), (4, "eval")]
    trainer = json.loads((tmp_path / "run" / "checkpoints" / "step-00000005" / "trainer.json").read_text())
    assert len(trainer["window"]["rows"]) == 2
    assert trainer["offsets"]["metrics.jsonl"] == (tmp_path / "run" / "metrics.jsonl").stat().st_size
    stop_after(0)
    start("dpo", tmp_path / "run", resume="auto")
    assert_same_run(tmp_path / "run", straight("dpo"))


@pytest.mark.parametrize("changes", [{"save_every": 2}, {"save_every": 1, "keep": 0, "checkpoint_model": True},
                                     {"save_every": "0.4ep", "workers": 2, "keep_best": "loss"}])
def test_saving_changes_no_result(changes: dict[str, Any], start: Start, straight: Callable[..., Path],
                                  tmp_path: Path) -> None:
    """C1: nor does what is left to read."""
    start("kto", tmp_path / "run", **changes)
    assert_same_run(tmp_path / "run", straight("kto"))
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert kept[-1] == f"step-{STEPS:08d}"
    assert len(kept) == {0: STEPS}.get(changes.get("keep", 2), len(kept)) <= (STEPS if changes.get("keep") == 0 else 3)


def test_going_back_to_an_earlier_checkpoint(start: Start, straight: Callable[..., Path], tmp_path: Path) -> None:
    """C1: also of a run that is done; what came after it no longer counts."""
    output = tmp_path / "run"
    start("dpo", output, save_every=2, keep=0)
    found = start("dpo", output, save_every=2, keep=0, resume=str(output / "checkpoints" / "step-00000004"))
    assert found.steps == STEPS
    assert_same_run(output, straight("dpo"))
    assert manifest(output)["resumed"][0]["step"] == 4


def test_a_finished_run_says_so_and_can_be_extended(start: Start, tmp_path: Path,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    """C1: the schedule of the learning rate is that of the new length from there on."""
    output = tmp_path / "run"
    done = start("sft", output, save_every=3)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    capsys.readouterr()
    again = start("sft", output, save_every=3, resume="auto")
    assert (again.steps, again.before, again.after, again.samples) == (
        done.steps, done.before, done.after, done.samples)
    assert "is done (7 steps)" in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    assert main(["resume", str(output), "--max-steps", "10"]) == 0
    out = capsys.readouterr().out
    assert "max_steps: 7, now 10" in out
    assert "the learning rate follows its schedule over the new number of steps" in out
    assert lines(output)[-1]["step"] == 10
    assert manifest(output)["steps"] == 10


def test_a_run_without_a_checkpoint_begins_again(start: Start, straight: Callable[..., Path], tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    """C1: at step 1, in the same directory, without its old records."""
    import tropism.train.loop as loop

    output = tmp_path / "run"
    with monkeypatch.context() as patch:
        real = loop.train_step
        patch.setattr(loop, "train_step", lambda engine, work: 1 / 0 if work.step == 5 else real(engine, work))
        with pytest.raises(ZeroDivisionError):
            start("dpo", output)
    assert lines(output)
    start("dpo", output, resume="auto")
    assert "stopped before its first checkpoint; it begins at step 1 again" in capsys.readouterr().out
    assert_same_run(output, straight("dpo"))


def test_a_signal_in_a_pass_over_the_data_stops_at_the_next_pack(start: Start, straight: Callable[..., Path],
                                                                 tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """C1: the store keeps what was scored; an evaluation that was cut off is done again, once."""
    from tropism.train import evaluate, reference

    output, small = tmp_path / "run", {"microbatch_tokens": 64, "store": str(tmp_path / "store")}
    wanted = straight("dpo", microbatch_tokens=64)

    def signalling(real: Any, at: int) -> Any:
        calls = 0

        def watched(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(*args)

        return watched

    with monkeypatch.context() as patch:
        patch.setattr(reference, "_score_pack", signalling(reference._score_pack, 3))
        with pytest.raises(StoppedEarly, match="There is no checkpoint yet"):
            start("dpo", output, **small)
    stored = list((tmp_path / "store").rglob("*.npz"))
    assert len(stored) == 1
    packs = 0

    def counted(*args: Any) -> Any:
        nonlocal packs
        packs += 1
        return real(*args)

    real = evaluate._values
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "_values", counted)
        start("dpo", tmp_path / "other", max_steps=1, eval_every=0, **small)
    for at in (2, packs // 2 + 2):  # of the evaluation before step 1, and of that after step 2
        with monkeypatch.context() as patch:
            patch.setattr(evaluate, "_values", signalling(evaluate._values, at))
            with pytest.raises(StoppedEarly):
                start("dpo", output, resume="auto", **small)
        assert manifest(output)["status"] == "stopped"
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step-00000002"]
    start("dpo", output, resume="auto", **small)
    assert_same_run(output, wanted)


def test_a_second_interrupt_does_not_wait(start: Start, straight: Callable[..., Path], tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """C1: the last checkpoint stays."""
    import tropism.train.loop as loop

    real, output = loop.train_step, tmp_path / "run"

    def twice(engine: Any, work: Any) -> Any:
        if work.step == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return real(engine, work)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", twice)
        with pytest.raises(KeyboardInterrupt):
            start("kto", output, save_every=2)
    assert manifest(output)["status"] == "interrupted"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    start("kto", output, resume="auto")
    assert_same_run(output, straight("kto"))


def test_the_limit_on_time_leaves_room_for_the_end(start: Start, straight: Callable[..., Path], tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """C1: with a clock that jumps by an hour per step. What is kept does not know of the last evaluation."""
    import tropism.train.loop as loop

    real, hours, clock = loop.train_step, 0, time.monotonic

    def slow(engine: Any, work: Any) -> Any:
        nonlocal hours
        hours += 1
        return real(engine, work)

    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: clock() + 3600 * hours)
        patch.setattr(loop, "train_step", slow)
        with pytest.raises(StoppedEarly, match="max_time is reached"):
            start("kto", tmp_path / "run", max_time="4h")
    last = lines(tmp_path / "run")[-1]
    assert (last["step"], last["split"]) == (3, "eval")  # a fourth hour would have passed the limit
    trainer = json.loads((tmp_path / "run" / "checkpoints" / "step-00000003" / "trainer.json").read_text())
    assert trainer["offsets"]["metrics.jsonl"] < (tmp_path / "run" / "metrics.jsonl").stat().st_size
    start("kto", tmp_path / "run", resume="auto")
    assert_same_run(tmp_path / "run", straight("kto"))


def test_used_outputs(start: Start, settings: Callable[..., dict[str, Any]], tmp_path: Path,
                      capsys: pytest.CaptureFixture[str]) -> None:
    """C2: a resume that was asked for and finds nothing is an error; what is no run is left alone."""
    assert main(["resume", str(tmp_path / "nothing")]) == 2
    assert "there is no run to go on with" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    assert main(["resume", str(tmp_path / "other")]) == 2
    assert "has no config.yaml" in capsys.readouterr().err
    with pytest.raises(Exception, match="exists and is not empty; nothing was changed"):
        start("sft", tmp_path / "other", resume="auto")
    start("sft", tmp_path / "run", max_steps=2)
    with pytest.raises(Exception, match=f"or go on with the run that is there: tropism resume {tmp_path / 'run'}"):
        start("sft", tmp_path / "run")
    with pytest.raises(Exception, match="there is no run to go on with"):
        start("sft", tmp_path / "new", resume=str(tmp_path / "new"))
    with pytest.raises(Exception, match=r"is neither .* nor a checkpoint in it"):
        start("sft", tmp_path / "new", resume=str(tmp_path / "run"))
    assert main(["resume", str(tmp_path / "run"), "--output", "x"]) == 2
    assert "leave --output and --resume out" in capsys.readouterr().err
    assert main(["sft", "--model", "m", "--data", "d", "--output", "o", "--fall-back"]) == 2
    assert "fall_back has no effect without resume" in capsys.readouterr().err


def test_damaged_checkpoints(start: Start, straight: Callable[..., Path], stop_after: Callable[..., None],
                             tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """C2: refused, naming the file and the checkpoint that is whole; --fall-back takes that one."""
    output = tmp_path / "run"
    stop_after(6)
    with pytest.raises(StoppedEarly):
        start("kto", output, save_every=2, keep=0)
    stop_after(0)
    newest = output / "checkpoints" / "step-00000006" / "state" / "__0_0.distcp"
    content = bytearray(newest.read_bytes())
    content[1000] ^= 1
    newest.write_bytes(content)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    assert main(["resume", str(output)]) == 2
    err = capsys.readouterr().err
    assert f"{newest}: is damaged" in err
    assert "step-00000004 is whole: --fall-back" in err
    assert before == {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    (output / "checkpoints" / "step-00000004" / "trainer.json").unlink()
    assert main(["resume", str(output / "checkpoints" / "step-00000004")]) == 2
    assert "trainer.json: is missing. step-00000002 is whole" in capsys.readouterr().err
    assert main(["resume", str(output), "--fall-back", "--keep", "3"]) == 0
    out = capsys.readouterr().out
    assert f"left out: {newest}: is damaged" in out
    assert "after step 2 of 7" in out
    assert_same_run(output, straight("kto"))


def test_no_checkpoint_is_whole(start: Start, tmp_path: Path) -> None:
    """C2."""
    start("sft", tmp_path / "run", save_every=7)
    (tmp_path / "run" / "checkpoints" / "step-00000007" / "files.json").unlink()
    with pytest.raises(CheckpointError, match=r"files.json: is missing. No other checkpoint of the run is whole"):
        start("sft", tmp_path / "run", max_steps=9, resume="auto")
    with pytest.raises(CheckpointError, match="no checkpoint is whole"):
        start("sft", tmp_path / "run", max_steps=9, resume="auto", fall_back=True)


def test_what_differs_is_named(start: Start, stop_after: Callable[..., None], settings: Callable[..., dict[str, Any]],
                               pairs: Path, tiny_model_dir: Path, teacher_dir: Path, tmp_path: Path,
                               capsys: pytest.CaptureFixture[str]) -> None:
    """C2, R2: other data, options, template, tokenizer or weights; before step 1, and nothing is changed."""
    import shutil

    from transformers import AutoTokenizer

    output, model, data = tmp_path / "run", tmp_path / "model", tmp_path / "pairs.jsonl"
    shutil.copytree(tiny_model_dir, model)
    shutil.copy(pairs, data)
    stop_after(4)
    with pytest.raises(StoppedEarly):
        start("dpo", output, model=model, data=data)
    stop_after(0)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}

    def refused(sentence: str, **changes: Any) -> None:
        with pytest.raises(CheckpointError, match=sentence):
            start("dpo", output, **{"model": model, "data": data, "resume": "auto", **changes})
        assert before == {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}

    refused(r"beta: 0.1 when the run began, 0.3 now; learning_rate: 0.001 when the run began, 0.01 now",
            beta=0.3, learning_rate=0.01)
    refused("reference: the default when the run began, live now", reference="live")
    other = tmp_path / "other.jsonl"
    other.write_text("".join(data.read_text().splitlines(keepends=True)[:-1]))
    refused(r"because the (training|evaluation) data is not what the run began with", data=other)
    refused("3 steps|4 steps are done, more than the 3 that are planned", max_steps=3)
    tokenizer = AutoTokenizer.from_pretrained(model)
    own = tokenizer.chat_template
    tokenizer.chat_template = own + " "
    tokenizer.save_pretrained(model)
    refused("the chat template is not what the run began with")
    tokenizer.chat_template = own
    tokenizer.save_pretrained(model)
    refused("the initial weights of the model and the reference are not what", model=teacher_dir)
    moved = tmp_path / "moved"
    model.rename(moved)
    assert main(["resume", str(output)]) == 2
    assert f"{model}: no such directory" in capsys.readouterr().err
    start("dpo", output, model=moved, data=data, resume="auto", microbatch_tokens=256, log_every=1)
    assert manifest(output)["status"] == "done"


def test_libraries_that_differ_are_a_note(start: Start, stop_after: Callable[..., None], tmp_path: Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    """C2: not a refusal."""
    stop_after(3)
    with pytest.raises(StoppedEarly):
        start("sft", tmp_path / "run")
    stop_after(0)
    found = manifest(tmp_path / "run")
    found["libraries"]["torch"] = "1.2.3"
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(found))
    start("sft", tmp_path / "run", resume="auto")
    assert "torch 1.2.3 when the run began" in capsys.readouterr().out


@pytest.mark.parametrize("metric", ["loss", "rewards/auc"])
def test_the_best_checkpoint_stays(metric: str, start: Start, tmp_path: Path) -> None:
    """The best of the evaluations, by the metric's own direction, whatever came after it."""
    output = tmp_path / "run"
    start("kto", output, save_every=1, eval_every=1, keep=1, keep_best=metric, learning_rate=0.02)
    values = {line["step"]: line[metric] for line in lines(output) if line["split"] == "eval" and line["step"]}
    best = (min if metric == "loss" else max)(values, key=lambda step: values[step])
    named = json.loads((output / "checkpoints" / "best.json").read_text())
    assert named == {"checkpoint": f"step-{best:08d}", "step": best, "metric": metric, "value": values[best]}
    assert {path.name for path in (output / "checkpoints").glob("step-*")} == {
        f"step-{best:08d}", f"step-{STEPS:08d}"}


def test_a_metric_that_there_is_not(start: Start, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="keep_best: 'rewards/auc' is not one of loss, rewards/accuracies"):
        start("dpo", tmp_path / "run", keep_best="rewards/auc")
    with pytest.raises(Exception, match="keep_best loss needs rows to evaluate"):
        start("dpo", tmp_path / "run", keep_best="loss", eval_fraction=0.0)
    assert not (tmp_path / "run").exists()


def test_a_full_disk_stops_the_run_and_leaves_the_last_checkpoint(start: Start, straight: Callable[..., Path],
                                                                  tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """C2: on a disk that really is full."""
    import subprocess

    import tropism.train.loop as loop
    from tropism.errors import OutputError

    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], check=False,
                      capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    real = loop.train_step

    def filling(engine: Any, work: Any) -> Any:
        if work.step == 5:
            while not (disk / "run" / "checkpoints" / "step-00000004" / "COMPLETE").exists():
                time.sleep(0.01)
            with (disk / "ballast").open("wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    pass
            os.truncate(disk / "ballast", (disk / "ballast").stat().st_size - 100_000)
        return real(engine, work)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(loop, "train_step", filling)
            with pytest.raises(OutputError, match=r"bytes for its tensors, and \d+ bytes are free"):
                start("dpo", disk / "run", save_every=2)
        (disk / "ballast").unlink()
        assert sorted(path.name for path in (disk / "run" / "checkpoints").iterdir()) == [
            "step-00000002", "step-00000004"]
        assert manifest(disk / "run")["status"] == "failed"
        start("dpo", disk / "run", resume="auto")
        assert_same_run(disk / "run", straight("dpo"))
    finally:
        subprocess.run(["umount", disk], check=True)


def test_eval_limit_evaluates_the_same_rows_every_time(start: Start, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    """And of all ranks and sittings; it says so."""
    found = start("dpo", tmp_path / "run", eval_limit=5)
    assert "15 rows held out (5 of them evaluated, the same every time)" in capsys.readouterr().out
    assert found.before["rewards/accuracies"] == 0.5
    with pytest.raises(Exception, match="eval_limit"):
        start("dpo", tmp_path / "other", eval_limit=0)
    assert start("dpo", tmp_path / "more", eval_limit=500).before == start("dpo", tmp_path / "all").before


def test_an_optimizer_and_a_scheduler_that_were_given(settings: Callable[..., dict[str, Any]], tiny_model_dir: Path,
                                                      stop_after: Callable[..., None], tmp_path: Path) -> None:
    """C1: kept by their own state; the module comes as it was when the run began."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tropism import DPOTrainer
    from tropism.errors import UsageError

    def trainer(output: Path, schedule: Any = None, **changes: Any) -> DPOTrainer:
        chosen = settings("dpo", output, **changes)
        module = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        scheduler = schedule(optimizer) if schedule else torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=20)
        del chosen["model"], chosen["learning_rate"]
        return DPOTrainer(module, tokenizer=AutoTokenizer.from_pretrained(tiny_model_dir), optimizer=optimizer,
                          scheduler=scheduler, quiet=True, **chosen)

    trainer(tmp_path / "straight").fit()
    stop_after(4)
    with pytest.raises(StoppedEarly, match="resume='auto' in Python"):
        trainer(tmp_path / "run").fit()
    stop_after(0)
    assert main(["resume", str(tmp_path / "run")]) == 2  # it has objects
    trainer(tmp_path / "run").fit(resume="auto")
    assert_same_run(tmp_path / "run", tmp_path / "straight")

    def with_counter(optimizer: Any) -> Any:  # its milestones are keyed by numbers, which JSON does not have
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])

    with pytest.raises(UsageError, match="save_every: the scheduler holds a Counter, which a checkpoint cannot keep"):
        trainer(tmp_path / "refused", with_counter, save_every=2).fit()
    assert trainer(tmp_path / "allowed", with_counter).fit().steps == STEPS


@pytest.mark.parametrize("changes", [{}, {"reference": "live"}, {"precision": "fp64", "optimizer": "sgd"}])
def test_the_reference_is_the_one_of_before_step_1(changes: dict[str, Any], start: Start, straight: Callable[..., Path],
                                                   stop_after: Callable[..., None], tmp_path: Path) -> None:
    """R2: of each row, also where the store is gone: from the initial weights, not from those of the checkpoint."""
    import shutil

    output, store = tmp_path / "run", {"store": str(tmp_path / "store")}
    stop_after(4)
    with pytest.raises(StoppedEarly):
        start("dpo", output, **changes, **store)
    stop_after(0)
    shutil.rmtree(tmp_path / "store", ignore_errors=True)
    start("dpo", output, **changes, **store, resume="auto")
    assert_same_run(output, straight("dpo", **changes))
    assert manifest(output)["reference"] == manifest(straight("dpo", **changes))["reference"]
