"""Runs in processes of their own that are killed, stopped by signals, or go on with other ranks."""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.conftest import assert_same_metrics, weights
from processes import fork_server, run_ranks
from tropism.train.checkpoints import files as checkpoint


def _quiet() -> None:
    torch.set_num_threads(1)
    out = os.open(os.devnull, os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)


def _child(method: str, settings: dict[str, Any]) -> None:
    """A run as the command line makes it; the exit code is the command line's."""
    _quiet()
    from tropism.cli.app import main

    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    sys.exit(main([method, *options]))


def _ranks(rank: int, size: int, port: int, method: str, settings: dict[str, Any], stop_at: int) -> None:
    """One of several; the last rank gets a signal at a step."""
    _quiet()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import tropism.train.loop as loop

    real = loop.train_step

    def watched(engine: Any, work: Any) -> Any:
        if work.step == stop_at and rank == size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(engine, work)

    loop.train_step = watched
    _child(method, settings)


def start(method: str, settings: dict[str, Any]) -> Any:
    """A process of a fork server: its imports are done already."""
    process = fork_server().Process(target=_child, args=(method, settings))
    process.start()
    return process


def finish(method: str, settings: dict[str, Any]) -> int:
    process = start(method, settings)
    process.join(120)
    return int(process.exitcode)


@pytest.fixture
def settings(tiny_model_dir: Path, feedback: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A run with many small passes, so that a kill at a random moment may meet any of them."""

    def of(output: Path, **changes: Any) -> dict[str, Any]:
        return {"model": str(tiny_model_dir), "data": str(feedback), "output": str(output), "batch_size": 8,
                "store": str(output.with_name(f"{output.name}-store")), "max_steps": 24, "learning_rate": 1e-3,
                "samples": 1, "eval_fraction": 0.2, "eval_every": 3, "log_every": 5, "save_every": 2,
                "microbatch_tokens": 96, **changes}

    return of


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def same(one: Path, other: Path) -> None:
    assert_same_metrics(lines(one), lines(other), 0.0, 0.0)
    ours, theirs = weights(one / "model"), weights(other / "model")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    if (other / "samples.jsonl").exists():
        assert (one / "samples.jsonl").read_text() == (other / "samples.jsonl").read_text()


def place(output: Path) -> str:
    """Where a process was when it was killed."""
    if not (output / "config.yaml").exists():
        return "before it began"
    if not (output / "metrics.jsonl").exists():
        return "reference pass or first evaluation"
    root = output / "checkpoints"
    unfinished = root.is_dir() and any(checkpoint.step_of(path) is not None and not (path / "COMPLETE").exists()
                                       for path in root.iterdir())
    return "within a save" if unfinished else "training"


def kill_until(kills: int, settings: Callable[..., dict[str, Any]], folder: Path, seed: int,
               **changes: Any) -> dict[str, int]:
    """Kill runs at random moments, going on each time, until there were so many kills; each run ends like the straight
    one. Returns where they were."""
    generator = random.Random(seed)
    assert finish("kto", settings(folder / "warm", max_steps=1)) == 0  # the fork server has its imports from here on
    began = time.monotonic()
    assert finish("kto", settings(folder / "straight", **changes)) == 0
    whole = time.monotonic() - began
    places: dict[str, int] = {}
    done = number = 0
    while done < kills:
        number += 1
        output = folder / f"run{number}"
        while True:
            process = start("kto", settings(output, resume="auto", **changes))
            process.join(generator.uniform(0.1, 0.7) * whole if done < kills else 120)
            if process.exitcode is not None:
                assert process.exitcode == 0, output
                break
            process.kill()
            process.join()
            done += 1
            where = place(output)
            places[where] = places.get(where, 0) + 1
            for one in checkpoint.listed(output / "checkpoints"):
                checkpoint.verify(one.path)
        same(output, folder / "straight")
    return places


@pytest.mark.slow
def test_a_hundred_kills(settings: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """C1: in every stage of a run."""
    places = kill_until(120, settings, tmp_path, seed=1)
    print(places)
    assert {"training", "within a save", "reference pass or first evaluation"} <= places.keys()


@pytest.mark.some(3)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals(number: int, settings: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """C1: exit code 75, a whole checkpoint, no lock, and nothing is written afterwards."""
    output = tmp_path / "run"
    process = start("kto", settings(output, max_steps=1000, save_every=500, samples=0, microbatch_tokens=512))
    while process.is_alive() and not (output / "metrics.jsonl").exists():
        time.sleep(0.02)
    time.sleep(0.3)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == 75
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    found = json.loads((output / "manifest.json").read_text())
    assert found["status"] == "stopped"
    assert signal.Signals(number).name in found["reason"]
    kept = checkpoint.listed(output / "checkpoints")
    assert checkpoint.verify(kept[-1].path)["offsets"]["metrics.jsonl"] == (output / "metrics.jsonl").stat().st_size
    assert not (output / "lock").exists()
    time.sleep(0.3)
    assert before == {path: path.stat().st_mtime_ns for path in output.rglob("*")}


def test_the_command_line_stops_in_time_and_goes_on(settings: Callable[..., dict[str, Any]], tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    """C1: --max-time ends with an exit code of 75; `tropism resume` takes over. By a clock that jumps by an hour per
    step."""
    import tropism.train.loop as loop
    from tropism.cli.app import main

    def options(output: Path) -> list[str]:
        given = settings(output, max_steps=6, save_every=6, microbatch_tokens=512)
        return [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]

    straight, output, real, hours, clock = tmp_path / "straight", tmp_path / "run", loop.train_step, 0, time.monotonic
    assert main(["kto", *options(straight)]) == 0

    def slow(engine: Any, work: Any) -> Any:
        nonlocal hours
        hours += 1
        return real(engine, work)

    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: clock() + 3600 * hours)
        patch.setattr(loop, "train_step", slow)
        began = time.monotonic()
        assert main(["kto", *options(output), "--max-time", "4h"]) == 75
        assert time.monotonic() - began < 4 * 3600
    assert f"--max-time is reached. Resume with: tropism resume {output}" in capsys.readouterr().err
    assert [one.step for one in checkpoint.listed(output / "checkpoints")] == [3]  # a fourth hour would be too long
    assert main(["resume", str(output), "--max-time", "1h"]) == 0
    same(output, straight)


def test_ranks_stop_together(settings: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """C1, X1: one rank's signal stops both, and both go on with the straight run, to the bit. (With another number of
    ranks: test_sharding.)"""
    straight, output = tmp_path / "straight", tmp_path / "run"
    settings = partial(settings, max_steps=8, samples=0, microbatch_tokens=256, **{"parallel.shard": "on"})
    assert run_ranks(2, _ranks, "kto", settings(straight), 0) == [0, 0]
    assert run_ranks(2, _ranks, "kto", settings(output), 5) == [75, 75]
    assert [one.step for one in checkpoint.listed(output / "checkpoints")] == [4, 5]
    assert run_ranks(2, _ranks, "kto", settings(output, resume="auto"), 0) == [0, 0]
    same(output, straight)
