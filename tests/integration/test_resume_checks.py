"""Going on, and what is checked before it: damage, differences, a full disk, the best checkpoint."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.resuming import (
    STEPS,
    Start,
    answers,
    assert_same_run,
    during,
    lines,
    manifest,
    settings,
    start,
    stop_after,
    straight,
    teacher_dir,
)
from tropism.cli.app import main
from tropism.errors import CheckpointError, StoppedEarly

__all__ = ["answers", "during", "settings", "start", "stop_after", "straight", "teacher_dir"]


def test_used_outputs(start: Start, settings: Callable[..., dict[str, Any]], tmp_path: Path,
                      capsys: pytest.CaptureFixture[str]) -> None:
    """C2: a resume that was asked for and finds nothing is an error; what is no run is left alone."""
    assert main(["resume", str(tmp_path / "nothing")]) == 2
    assert "nothing: cannot resume" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    assert main(["resume", str(tmp_path / "other")]) == 2
    assert "has no config.yaml" in capsys.readouterr().err
    with pytest.raises(Exception, match="exists and is not empty"):
        start("sft", tmp_path / "other", resume="auto")
    start("sft", tmp_path / "run", max_steps=2)
    with pytest.raises(Exception, match=f"tropism resume {tmp_path / 'run'}"):
        start("sft", tmp_path / "run")
    with pytest.raises(Exception, match="no run to resume"):
        start("sft", tmp_path / "new", resume=str(tmp_path / "new"))
    with pytest.raises(Exception, match=r"is neither .* nor a checkpoint in it"):
        start("sft", tmp_path / "new", resume=str(tmp_path / "run"))
    assert main(["resume", str(tmp_path / "run"), "--output", "x"]) == 2
    assert "Remove --output and --resume" in capsys.readouterr().err
    assert main(["sft", "--model", "m", "--data", "d", "--output", "o", "--fall-back"]) == 2
    assert "--fall-back has no effect without --resume" in capsys.readouterr().err


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
    assert f"{newest}: corrupted file" in err
    assert "To resume from step-00000004, the newest intact checkpoint, pass --fall-back" in err
    assert before == {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    (output / "checkpoints" / "step-00000004" / "trainer.json").unlink()
    assert main(["resume", str(output / "checkpoints" / "step-00000004")]) == 2
    assert "trainer.json: not found. To resume from step-00000002" in capsys.readouterr().err
    assert main(["resume", str(output), "--fall-back", "--keep", "3"]) == 0
    out = capsys.readouterr().out
    assert f"skipped checkpoint: {newest}: corrupted file" in out
    assert "after step 2 of 7" in out
    assert_same_run(output, straight("kto"))


def test_no_checkpoint_is_whole(start: Start, tmp_path: Path) -> None:
    """C2."""
    start("sft", tmp_path / "run", save_every=7)
    (tmp_path / "run" / "checkpoints" / "step-00000007" / "files.json").unlink()
    with pytest.raises(CheckpointError, match=r"files\.json: not found\. The run has no other intact checkpoint"):
        start("sft", tmp_path / "run", max_steps=9, resume="auto")
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
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

    refused(r"--beta \(was 0\.1, now 0\.3\), --learning-rate \(was 0\.001, now 0\.01\)",
            beta=0.3, learning_rate=0.01)
    refused(r"--reference \(was the default, now live\)", reference="live")
    other = tmp_path / "other.jsonl"
    other.write_text("".join(data.read_text().splitlines(keepends=True)[:-1]))
    refused(r"cannot resume: the (training|evaluation) data changed", data=other)
    refused("3 steps|4 steps are done, but only 3 are planned", max_steps=3)
    tokenizer = AutoTokenizer.from_pretrained(model)
    own = tokenizer.chat_template
    tokenizer.chat_template = own + " "
    tokenizer.save_pretrained(model)
    refused("the chat template changed")
    tokenizer.chat_template = own
    tokenizer.save_pretrained(model)
    refused("the initial weights of the model and the reference changed", model=teacher_dir)
    moved = tmp_path / "moved"
    model.rename(moved)
    assert main(["resume", str(output)]) == 2
    assert f"{model}: directory not found" in capsys.readouterr().err
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
    assert "torch 1.2.3 when the run started" in capsys.readouterr().out


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
    with pytest.raises(Exception, match="--keep-best: 'rewards/auc' is not one of loss, rewards/accuracies"):
        start("dpo", tmp_path / "run", keep_best="rewards/auc")
    with pytest.raises(Exception, match="--keep-best loss requires rows to evaluate"):
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
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join()
            assert (disk / "run" / "checkpoints" / "step-00000004" / "COMPLETE").exists()
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
            with pytest.raises(OutputError, match=r"[\d,]+ bytes are needed, [\d,]+ are free"):
                start("dpo", disk / "run", save_every=2)
        (disk / "ballast").unlink()
        assert sorted(path.name for path in (disk / "run" / "checkpoints").iterdir()) == [
            "step-00000002", "step-00000004"]
        assert manifest(disk / "run")["status"] == "failed"
        start("dpo", disk / "run", resume="auto")
        assert_same_run(disk / "run", straight("dpo"))
    finally:
        subprocess.run(["umount", "-l", disk], check=True)  # an exception may hold a file of it open


def test_eval_limit_evaluates_the_same_rows_every_time(start: Start, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    """And of all ranks and sittings; it says so."""
    found = start("dpo", tmp_path / "run", eval_limit=5)
    assert "15 held-out rows (5 evaluated" in capsys.readouterr().out
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
    with pytest.raises(StoppedEarly, match=r"fit\(resume='auto'\)"):
        trainer(tmp_path / "run").fit()
    stop_after(0)
    assert main(["resume", str(tmp_path / "run")]) == 2  # it has objects
    trainer(tmp_path / "run").fit(resume="auto")
    assert_same_run(tmp_path / "run", tmp_path / "straight")

    def with_counter(optimizer: Any) -> Any:  # its milestones are keyed by numbers, which JSON does not have
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])

    with pytest.raises(UsageError, match="save_every: the scheduler holds a Counter"):
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
