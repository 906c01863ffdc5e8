"""The feedback that the demo ships with, and its rule."""

import json
import re
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest

from tropism.commands.demo.rule import passes
from tropism.commands.demo.run import options, report
from tropism.observe.console import Voice
from tropism.runner import RunResult

FEEDBACK = files("tropism.commands.demo") / "feedback.jsonl"
ROWS = [json.loads(line) for line in FEEDBACK.read_text("utf-8").splitlines()]


def test_every_label_is_what_the_rule_says() -> None:
    for row in ROWS:
        assert row["label"] is passes(row["completion"][0]["content"]), row["id"]


def test_rows_are_distinct_and_both_classes_are_common() -> None:
    keys = {(row["prompt"][0]["content"], row["completion"][0]["content"]) for row in ROWS}
    assert len(keys) == len(ROWS) > 500
    share = Counter(row["label"] for row in ROWS)[True] / len(ROWS)
    assert 0.25 < share < 0.5


@pytest.mark.parametrize(("answer", "right"), [
    ("You can boil it for six minutes.", True), ("Boil it for six minutes.", False), ("You can boil it for", False),
    ("Do you like it?", True), ("You can:\n1. boil it.", False), ("**You** boil it.", False),
    ("- You boil it.", False), ("Keep your eggs cold!", True), ("The youth boils it.", False), ("", False)])
def test_the_rule(answer: str, right: bool) -> None:
    assert passes(answer) is right


def test_the_report_gives_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = options(Path("m.gguf"), Path("d.jsonl"), tmp_path, 140)
    assert (chosen.samples, chosen.eval_fraction) == (28, 0.2)
    samples = [{"prompt": "<|im_start|>user\nHow?<|im_end|>\n", "before": "Boil it.", "after": "You boil it."}] * 2
    figures = {"rewards/auc": 0.5, "rewards/auc_low": 0.4, "rewards/auc_high": 0.6, "rewards/margins": 0.0}
    report(RunResult(tmp_path, tmp_path, 1, 1.0, figures, {**figures, "rewards/auc": 0.7}, samples), Voice())
    out = capsys.readouterr().out
    assert "0% -> 100%" in out
    assert re.search(r"0\.500 -> 0\.700 +\(95% interval 0\.400 to 0\.600\)", out)
    assert "How?\n  before: Boil it.\n  after:  You boil it." in out
    assert "2 held-out prompts" in out
