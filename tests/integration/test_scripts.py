"""Every script of bench/, tools/ and examples/ starts, explains itself, and does its work on the tiny model."""

import argparse
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for folder in ("bench", "tools", "examples") for path in (ROOT / folder).glob("*.py"))
SHELL_SCRIPTS = sorted(path for folder in ("bench", "tools", "examples") for path in (ROOT / folder).glob("*.sh"))
NEEDS_TRL = ["bench/against_trl.py --model m --data d --method dpo", "bench/rendering.py --tokenizer t --data d",
             "tools/make_oracle.py folder"]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Run a script in this process as `python SCRIPT ARGUMENTS` does; its global names."""
    def go(script: str | Path, *arguments: object) -> dict[str, Any]:
        path = ROOT / script
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        monkeypatch.syspath_prepend(str(path.parent))
        return runpy.run_path(str(path), run_name="__main__")

    return go


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_help(script: Path, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A description, and a help text for every argument. A module that is no script is imported by one."""
    if "__main__" not in script.read_text(encoding="utf-8"):
        others = [path for path in SCRIPTS if path.parent == script.parent and path != script]
        assert any(f"from {script.stem} import" in path.read_text(encoding="utf-8") for path in others)
        start(script)
        return
    parsers: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(argparse.ArgumentParser, "print_help", lambda self, file=None: parsers.append(self))
    with pytest.raises(SystemExit) as end:
        start(script, "--help")
    assert end.value.code == 0
    assert parsers[0].description
    assert parsers[0].format_help()
    assert not [action.dest for action in parsers[0]._actions if not action.help]


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_shell_syntax(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", NEEDS_TRL)
def test_a_missing_trl_is_one_sentence(command: str, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(SystemExit) as end:
        start(*command.split())
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"TRL .*pip install trl[^\n]*\n", said), said


class Pipe:
    """Stands in for the pipe to a side's process: gives the numbers of steps, keeps what comes back."""

    def __init__(self, *numbers: int | None) -> None:
        self.numbers, self.sent = list(numbers), []

    def recv(self) -> int | None:
        return self.numbers.pop(0)

    def send(self, value: Any) -> None:
        self.sent.append(value)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_our_side_of_the_comparison(method: str, start: Callable[..., Any], tiny_model_dir: Path, feedback: Path,
                                    pairs: Path) -> None:
    """bench/against_trl.py: the job is planned, and our side takes its steps."""
    sides = start("bench/sides.py")
    job = sides["make_job"](argparse.Namespace(
        model=str(tiny_model_dir), data=str(pairs if method == "dpo" else feedback), method=method, batch_size=4,
        steps=2, max_length=64, group_prompts=False, microbatch_tokens=None, precision="fp32", micro_batch=None,
        threads=1))
    pipe = Pipe(1, 2, None)
    sides["ours"](pipe, job)
    (note, logps), first, second, (_, changed) = pipe.sent
    assert "tree layout, packs of 2048 tokens" in note
    assert len(logps) == 4 * (2 if method == "dpo" else 1)
    assert first.loss == pytest.approx(job.known_loss, abs=1e-4)
    assert second.loss != first.loss
    assert changed > 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("way", ["chunked live", "chunked top-k", "plain"])
def test_kd_memory(way: str, start: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        start("bench/kd_memory.py", "--only", json.dumps({"way": way, "tokens": 8, "vocabulary": 50}))
    assert not end.value.code
    assert json.loads(capsys.readouterr().out)["seconds"] > 0


def test_checkpoints(start: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """20 steps of 1 s; a save after step 10 pauses for 0.5 s and slows the next two steps down by 1 s each: 12%."""
    records = [{"split": "train", "step": step, "step_time": 2.0 if step in (11, 12) else 1.0,
                "tokens/computed": 100 * step + step % 2} for step in range(1, 21)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "checkpoints" / "step-10").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-10" / "trainer.json").write_text(json.dumps({"step": 10, "stall_s": 0.5}))
    start("bench/checkpoints.py", tmp_path, "--writing", "4")
    said = capsys.readouterr().out
    assert "20 steps in 22 s with 1 saves" in said
    assert "saving took 11.36% of the wall time" in said


def test_rendering(start: Callable[..., Any], fixture_tokenizer: Any, feedback: Path, tmp_path: Path) -> None:
    ours = runpy.run_path(str(ROOT / "bench" / "rendering.py"))["ours"]
    seconds, tokens, first = ours(feedback, fixture_tokenizer, 1, tmp_path)
    assert seconds > 0
    assert tokens == sum(map(len, first))
    assert len(first) == 43


def test_cut_layers(start: Callable[..., Any], tiny_model_dir: Path, tmp_path: Path) -> None:
    start("tools/cut_layers.py", tiny_model_dir, tmp_path / "cut", "--keep", "1")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "cut").config.num_hidden_layers == 1


def test_make_demo_data(start: Callable[..., Any], tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("Hello?\n\nWho are you?\n")
    start("tools/make_demo_data.py", tiny_model_dir, tmp_path / "rows.jsonl", "--prompts", tmp_path / "prompts.txt",
          "--completions", "2", "--max-new-tokens", "3")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows
    assert set(rows[0]) == {"id", "prompt", "completion", "label"}


def test_golden_runs(start: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its inputs are made, every run's arguments name them, and an unknown run is refused."""
    script = runpy.run_path(str(ROOT / "tools" / "golden_runs.py"))
    inputs = script["make_inputs"](tmp_path)
    assert all(Path(path).exists() for path in inputs.values())
    assert all(word.format(**inputs) for words in script["RUNS"].values() for word in words)
    with pytest.raises(SystemExit):
        start("tools/golden_runs.py", "--only", "nothing")
    assert "unknown run nothing" in capsys.readouterr().err
