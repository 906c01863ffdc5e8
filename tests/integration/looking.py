"""The command line as a user has it: files in, `--json` and run directories out."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers import build_tokenizer
from tropism.cli.app import main


class Bench:
    """A place with a model, files and runs of their own.

    Args:
        path: an empty directory.
        model: a directory with weights, config and tokenizer.
        capsys: where commands are heard.
    """

    def __init__(self, path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self.model, self.capsys = path, model, capsys
        self._first = model
        self.out = self.err = ""
        self._runs = 0

    def file(self, rows: Sequence[dict[str, Any]], name: str = "rows.jsonl") -> Path:
        """Rows as JSONL."""
        path = self.path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    def with_tokenizer(self, name: str = "model", **changes: Any) -> Path:
        """A model directory with another tokenizer; `changes` as in `build_tokenizer`. It becomes `self.model`."""
        path = self.path / name
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self._first, path)
        (path / "chat_template.jinja").unlink(missing_ok=True)
        build_tokenizer(**changes).save_pretrained(path)
        self.model = path
        return path

    def call(self, *tokens: Any) -> int:
        """Run a command; its exit code. What it said is in `out` and `err`."""
        code = main([str(token) for token in tokens])
        said = self.capsys.readouterr()
        self.out, self.err = said.out, said.err
        return code

    def look(self, data: Any, *options: Any, code: int = 0) -> dict[str, Any]:
        """`tropism inspect`: what `--json` has; of a command that must fail, nothing."""
        path = data if isinstance(data, Path) else self.file(data)
        report = self.path / "report.json"
        report.unlink(missing_ok=True)
        found = self.call("inspect", path, "--model", self.model, "--json", report, "--rows", 20, *options)
        assert found == code, self.err
        return json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}

    def train(self, method: str, data: Any, *options: Any, code: int = 0) -> Path:
        """One step of training, if `options` do not say how many; its run directory. The store stays."""
        path = data if isinstance(data, Path) else self.file(data)
        self._runs += 1
        run = self.path / f"run{self._runs}"
        more = ["--store", self.path / "store"] if method != "sft" else []
        more += ["--max-steps", 1] if "--max-steps" not in options else []
        found = self.call(method, "--model", self.model, "--data", path, "--output", run, "--samples", 0, *more,
                          *options)
        assert found == code, self.err
        return run


@pytest.fixture
def bench(tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    """The tiny model and an empty directory."""
    return Bench(tmp_path, tiny_model_dir, capsys)


def audit(run: Path) -> dict[str, Any]:
    """`audit.json`."""
    return json.loads((run / "audit.json").read_text(encoding="utf-8"))


def steps(run: Path) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl` that are about training."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["split"] == "train"]


def by_id(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows that were shown."""
    return {row["id"]: row for row in report["shown"]}


def prompt_text(shown: dict[str, Any]) -> str:
    """Text of a shown prompt."""
    return "".join(piece["text"] for piece in shown["prompt"])


def prompt_ids(shown: dict[str, Any]) -> list[int]:
    """Ids of a shown prompt."""
    return [piece["id"] for piece in shown["prompt"]]


def answer_ids(shown: dict[str, Any], side: int = 0, *, learned: bool = False) -> list[int]:
    """Ids of a shown completion; of those that are learned only."""
    tokens = shown["completions"][side]["tokens"]
    return [piece["id"] for piece in tokens if piece["supervised"] or not learned]


def learned(shown: dict[str, Any]) -> list[list[str]]:
    """The learned text of each completion."""
    return [side["supervised"] for side in shown["completions"]]


def left_out(report: dict[str, Any]) -> dict[int, str]:
    """Reason by line of each row left out."""
    return {int(drop["place"].rsplit(":", 1)[1].removeprefix("row ")): drop["reason"]
            for drop in report["dropped_rows"]}
