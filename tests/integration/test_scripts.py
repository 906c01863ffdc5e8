"""Every script of bench/, tools/ and examples/ starts, explains itself, and does its work on the tiny model."""

import argparse
import importlib
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

from processes import tropism

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for folder in ("bench", "tools", "examples") for path in (ROOT / folder).glob("*.py"))
SHELL_SCRIPTS = sorted(path for folder in ("bench", "tools", "examples") for path in (ROOT / folder).glob("*.sh"))
RUNNABLE = [path for path in SCRIPTS if path.parent.name == "bench"]
NEEDS_TRL = ["bench/compare.py --model m --data d --method dpo", "bench/table.py",
             "bench/rendering.py --tokenizer t --data d", "tools/make_oracle.py folder"]


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
    """A description, and a help text for every argument."""
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


@pytest.mark.parametrize("script", RUNNABLE, ids=lambda path: path.name)
def test_smoke(script: Path, start: Callable[..., Any], capsys: pytest.CaptureFixture[str],
               monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every script of bench/ does its work on a tiny random model, without TRL and without files of its own."""
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.chdir(tmp_path)
    if script.name == "plan_accuracy.py":
        monkeypatch.setattr(subprocess, "run", tropism)
    codes = []
    try:
        start(f"bench/{script.name}", "--smoke")
    except SystemExit as end:
        codes.append(end.code)
    assert not any(codes)
    assert capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_every_script_is_started() -> None:
    """A new tool has a test that starts it by its name (`test_smoke` and test_examples.py list theirs)."""
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [path for path in SCRIPTS if path.parent.name == "tools" and path.name not in tests
                and f"import {path.stem}" not in tests]


@pytest.mark.parametrize("method", ["kto", "dpo", "kd"])
def test_a_comparison_finds_equal_work(method: str, start: Callable[..., Any], capsys: pytest.CaptureFixture[str],
                                       tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        start("bench/compare.py", "--smoke", "--method", method, "--json", tmp_path / "found.jsonl")
    assert end.value.code == 0
    record = json.loads((tmp_path / "found.jsonl").read_text())
    assert record["same_work"]
    assert set(record["sides"]) == {"Tropism", "plain loop"}
    for side in record["sides"].values():
        assert side["gates"]["ok"]
        assert side["gates"]["last_loss"] != side["gates"]["loss"]
        assert min(side["ratio"], side["tokens_per_s"], side["mfu"]) > 0
    assert ": ok" in capsys.readouterr().out


def test_a_comparison_finds_different_work(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    """A side with another loss (beta doubled) is not timed as if it were the same."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.setattr(importlib.import_module("harness.rivals"), "BETA", 0.2)
    with pytest.raises(SystemExit) as end:
        start("bench/compare.py", "--smoke", "--method", "dpo")
    assert end.value.code == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_a_finished_comparison_is_not_measured_again(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Nor is one that failed lost: the rest is measured, and the exit code says so."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    comparison = importlib.import_module("harness.comparison")
    called: list[str] = []

    def compare(cell: Any, rivals: list[str], *rest: Any, **more: Any) -> dict[str, Any]:
        called.append(cell.method)
        if cell.method == "kto" and len(called) == 1:
            raise EOFError
        side = {"median_s": 1.0, "ratio": 2.0, "ratio_range": [1.5, 2.5], "cpu_ratio": 2.0, "tokens_per_s": 3.0,
                "mfu": 0.5, "peak_gib": 1.0, "beyond_states_gib": 0.5,
                "gates": {"loss": 0.5, "expected_loss": 0.5, "logps_apart": 0.0, "grad_norm": 1.0,
                          "grad_norm_apart": 0.0, "changed": 1e-6, "ok": True}}
        return {"cell": {"method": cell.method, "data": "d", "precision": "fp32"}, "same_work": True,
                "sides": {"Tropism": side}, "versions": {"torch": "2"}, "date": "2030-01-01", "gpu": None, "cpu": "c",
                "load": [0.0, 0.0]}

    monkeypatch.setattr(comparison, "compare", compare)
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- measured: here -->\nold\n<!-- measured: end -->\nb\n")
    codes = []
    for _ in range(3):
        with pytest.raises(SystemExit) as end:
            start("bench/table.py", "--model", tmp_path, "--rivals", "plain", "--results", tmp_path / "results",
                  "--write", page)
        codes.append(end.value.code)
    assert codes == [2, 0, 0]
    assert called == ["kto", "dpo", "kto"]
    assert "old" not in page.read_text()
    assert page.read_text().count("| Tropism |") == 2
    assert page.read_text().startswith("a\n<!-- measured: here -->")


def test_growth_above_the_work_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(ROOT / "bench" / "growth.py"))
    assert names["report"]("prompt", [("256", 1e3, 1.0), ("512", 1e4, 11.0)], 1.3)
    assert not names["report"]("prompt", [("256", 1e3, 1.0), ("512", 1e4, 14.0)], 1.3)
    assert names["report"]("rows: packing", [("1k", 1e3, 1.0), ("10k", 1e4, 25.0)], 1.3)
    assert not names["report"]("rows: packing", [("1k", 1e3, 1.0), ("10k", 1e4, 90.0)], 1.3)
    assert "FASTER THAN ITS WORK" in capsys.readouterr().out


def test_checkpoints(start: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    start("bench/checkpoints.py", "--smoke")
    said = capsys.readouterr().out
    assert "20 steps in 22 s with 1 saves" in said
    assert "saving took 11.36% of the wall time" in said


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
