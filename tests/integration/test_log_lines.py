"""A whole run with `--log-format json`, and one with `--quiet`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hostile import PAYLOADS, is_harmless
from tropism.cli.app import main


@pytest.fixture
def arguments(tiny_model_dir: Path, tmp_path: Path) -> list[str]:
    """A short run on rows that hold texts which would act on a terminal."""
    texts = [payload.encode(errors="ignore").decode() for payload in PAYLOADS if len(payload) < 100]
    data = tmp_path / "rows\x1b[31m\n.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"p{number} {text}", "completion": text, "label": number % 2 == 0,
                                        "id": text}) + "\n" for number, text in enumerate(texts)))
    return [str(word) for word in ("kto", "--model", tiny_model_dir, "--data", data, "--output", tmp_path / "run",
                                   "--store", tmp_path / "store", "--max-steps", 2, "--batch-size", 8, "--samples", 1,
                                   "--eval-fraction", 0.2)]


def test_json(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
              monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line is an object, and those of steps have the metrics of metrics.jsonl."""
    monkeypatch.setenv("TQDM_DISABLE", "1")  # as it sets
    assert main([*arguments, "--log-format", "json"]) == 0
    printed = capsys.readouterr()
    found: list[dict[str, Any]] = [json.loads(line, parse_constant=pytest.fail)
                                   for line in (printed.out + printed.err).splitlines()]
    assert all(is_harmless(one["text"]) for one in found)
    steps = {(one["stage"], one["step"]): one["metrics"] for one in found if "stage" in one}
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == len(records)
    for record in records:
        metrics = steps[record["split"], record["step"]]
        assert metrics.items() <= record.items()
        assert "loss" in metrics
    table = next(one for one in found if "before" in one)
    assert table["after"]["rewards/auc"] == steps["eval", 2]["rewards/auc"]
    assert sum(one["text"].startswith("verdict: ") for one in found) == 1


def test_quiet(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Warnings, and from the table of results on what any run prints."""
    assert main([*arguments, "--quiet"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    result = next(place for place, line in enumerate(lines) if "held-out rows, before and after" in line)
    assert result > 0
    assert all(re.match("(warning|note): ", line) for line in lines[:result])
    assert sum(line.startswith("verdict: ") for line in lines) == 1
    assert "next:" in lines
    assert not printed.err
    assert main(["verify", str(Path(arguments[6])), "--quiet"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert main(["kto", "--quiet", "--beta", "x"]) == 2
    assert capsys.readouterr().err
