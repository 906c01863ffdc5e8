"""A sweep trains what its runs would be alone, to the bit, however often it is stopped."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tropism.cli.app import main
from tropism.commands.sweep import processes
from tropism.observe.console import Voice

ANSWERS = ("--learning-rate", "1e-3,3e-3", "--seed", "0,1")
NAMES = [f"learning-rate={rate}_seed={seed}" for rate in ("1e-3", "3e-3") for seed in "01"]


@pytest.fixture(scope="module")
def base(tiny_model_dir: Path, feedback: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sweep")
    file = place / "base.yaml"
    file.write_text(f"method: kto\nmodel: {tiny_model_dir}\ndata: {feedback}\nstore: {place / 'store'}\nbatch_size: 8\n"
                    "max_steps: 3\neval_fraction: 0.4\nsamples: 0\neval_every: 0\n")
    return file


def in_this_process(monkeypatch: pytest.MonkeyPatch, stop: Callable[[Sequence[str]], bool] = lambda words: False,
                    ) -> None:
    """Runs train without a process of their own, which takes seconds to start.

    Args:
        stop: tells of the words of a command whether its run hears a signal in step 2, as the sweep does.
    """
    import tropism.train.loop as loop

    real = loop.train_step

    def run(relay: Any, command: Sequence[str], voice: Voice) -> tuple[int, str]:
        words = list(command[len(processes._COMMAND):])
        stopped = stop(words)

        def step(engine: Any, work: Any) -> Any:
            if stopped and work.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                relay.heard = "SIGTERM"
            return real(engine, work)

        with monkeypatch.context() as patch:
            patch.setattr(loop, "train_step", step)
            return main(words), ""

    monkeypatch.setattr(processes._Relay, "run", run)


@pytest.fixture(scope="module")
def straight(base: Path) -> Path:
    """A sweep that was never stopped."""
    with pytest.MonkeyPatch.context() as patch:
        in_this_process(patch)
        assert main(["sweep", str(base), *ANSWERS, "--output", str(base.with_name("straight"))]) == 0
    return base.with_name("straight")


def results(run: Path) -> dict[str, Any]:
    """What the options decide: not times, and not the name of the directory."""
    times = ("step_time", "tokens_per_second", "memory/peak_gib", "time", "compile/recompiles")
    records = [{key: value for key, value in json.loads(line).items() if key not in times}
               for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {"records": records, **{name: (run / name).read_bytes() for name in (
        "model/model.safetensors", "scores.parquet", "eval_rows.jsonl", "audit.json")}}


def table(directory: Path) -> list[dict[str, Any]]:
    return [{**json.loads(line), "seconds": 0} for line in (directory / "sweep.jsonl").read_text().splitlines()]


def test_the_table_compares_the_runs(straight: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    in_this_process(monkeypatch)
    capsys.readouterr()
    assert main(["resume", str(straight)]) == 0
    out = capsys.readouterr().out
    lines = table(straight)
    assert [line["run"] for line in lines] == NAMES
    assert [(line["learning_rate"], line["seed"]) for line in lines] == [(1e-3, 0), (1e-3, 1), (3e-3, 0), (3e-3, 1)]
    best = max(lines, key=lambda line: line["value"])
    for line in lines:
        last = [json.loads(one) for one in (straight / line["run"] / "metrics.jsonl").read_text().splitlines()][-1]
        assert (last["split"], line["status"], line["verdict"]) == ("eval", "done", "not shown")
        assert line["value"] == pytest.approx(last["rewards/auc"], abs=1e-9)
        assert (line["low"], line["high"]) == pytest.approx((last["rewards/auc_low"], last["rewards/auc_high"]))
        assert (line["loss"], line["kl"]) == (last["loss"], last["kl"])
        assert ("difference" in line) == (line is not best)
        if line is not best:
            assert line["difference"] == pytest.approx(line["value"] - best["value"])
            assert line["difference_low"] <= line["difference"] <= line["difference_high"]
    assert f"best: {best['run']}\nnote: this is the best of 4 runs on the rows that chose it" in out
    assert f"next:\n  tropism report {straight}\n" in out
    assert len({(straight / name / "eval_rows.jsonl").read_bytes() for name in NAMES}) == 1


def test_a_stopped_sweep_ends_as_a_straight_one(base: Path, straight: Path, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    out = tmp_path / "out"
    command = ["sweep", str(base), *ANSWERS, "--output", str(out)]
    in_this_process(monkeypatch, stop=lambda words: words[0] == "kto" and words[-1].endswith(NAMES[1]))
    assert main(command) == 75
    assert "1 of 4 runs are done. Resume the sweep with: tropism resume" in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == [*NAMES[:2], "sweep.yaml"]
    shutil.copytree(straight / NAMES[2], out / NAMES[2])  # to save time: a run that is done
    in_this_process(monkeypatch)
    assert main(command) == 0
    assert "resuming" in capsys.readouterr().out
    for name in NAMES:
        assert results(out / name) == results(straight / name)
    assert table(out) == table(straight)


def test_a_run_of_a_sweep_is_the_run_alone_and_shares_reference_scores(base: Path, straight: Path, tmp_path: Path,
                                                                       capsys: Any) -> None:
    store = {path: path.stat().st_mtime_ns for path in base.with_name("store").rglob("*.npz")}
    assert main(["train", str(base), "--learning-rate", "3e-3", "--seed", "1", "--output", str(tmp_path / "run")]) == 0
    assert results(tmp_path / "run") == results(straight / NAMES[3])
    assert {path.name for path in base.with_name("store").rglob("*.npz")} == {path.name for path in store}
    configs = [(path / "config.yaml").read_text().replace(str(path), "") for path in (tmp_path / "run",
                                                                                      straight / NAMES[3])]
    assert configs[0] == configs[1]
    assert len({path.parent for path in store}) == 1  # one fingerprint, whatever the learning rate and seed


@pytest.mark.slow
def test_a_sweep_whose_processes_are_killed(base: Path, straight: Path, tmp_path: Path) -> None:
    """With processes of their own: kill -9 of a run, Ctrl-C to the sweep, and kill -9 of the sweep."""
    out = tmp_path / "out"
    saving = tmp_path / "saving.yaml"
    saving.write_text(base.read_text() + "save_every: 1\n")
    command = [sys.executable, "-m", "tropism", "sweep", str(saving), *ANSWERS, "--output", str(out)]

    def go(run: str, act: Callable[[subprocess.Popen[str]], None]) -> int:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while not list((out / run / "checkpoints").glob("step-*/COMPLETE")):
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.01)
        act(process)
        process.communicate()
        return process.returncode

    def child(process: subprocess.Popen[str]) -> int:
        return int(subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout)

    def kill_both(process: subprocess.Popen[str]) -> None:
        os.kill(child(process), signal.SIGKILL)
        process.kill()

    assert go(NAMES[0], lambda process: os.kill(child(process), signal.SIGKILL)) == 1
    assert {json.loads(line)["status"] for line in (out / "sweep.jsonl").read_text().splitlines()} == {"failed", "done"}
    for name in NAMES[2:]:
        subprocess.run(["rm", "-r", str(out / name)], check=True)
    assert go(NAMES[2], lambda process: process.send_signal(signal.SIGINT)) == 75
    assert go(NAMES[3], kill_both) == -signal.SIGKILL
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for name in NAMES:
        assert results(out / name) == results(straight / name)
    assert table(out) == table(straight)
