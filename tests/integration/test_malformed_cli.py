"""Malformed files on the command line: an exit code and one sentence, or a result. Never a traceback."""

import json
from typing import Any

import pytest

from integration.looking import Bench, audit, bench, by_id, steps
from malformed_files import malformed, well_said

__all__ = ["bench"]
ABOUT_ALL_ROWS = ("have the same prompt", "this method requires both")  # said of all files of a run together


def check(bench: Bench, code: int, path: Any, number: int) -> None:
    assert code in (0, 2), (number, bench.err)
    if code == 0:
        return
    assert bench.err.startswith("tropism: "), number
    assert well_said(bench.err, path) or any(sentence in bench.err for sentence in ABOUT_ALL_ROWS), (number, bench.err)


def test_inspect_of_malformed_files(bench: Bench) -> None:
    """H3, K3: what was asked for, or why not, with file and line."""
    codes = []
    for number in range(20_000, 20_060):
        name, whole = malformed(number)
        path = bench.path / name
        path.write_bytes(whole)
        codes.append(bench.call("inspect", path, "--model", bench.model, "--json", bench.path / "report.json"))
        check(bench, codes[-1], path, number)
        if codes[-1] == 0:
            assert json.loads((bench.path / "report.json").read_text(encoding="utf-8"))["rows"]["kept"] >= 1
    assert codes.count(0) > 8
    assert codes.count(2) > 20


@pytest.mark.parametrize("method", ["kto", "dpo", "sft"])
def test_training_on_malformed_files(bench: Bench, method: str) -> None:
    """H3, D1: a run that starts has rows and a finite loss; one that does not has left nothing behind."""
    trained = 0
    for number in range(21_000, 21_024):
        name, whole = malformed(number)
        path = bench.path / name
        path.write_bytes(whole)
        run = bench.path / f"run{number}"
        store = ["--store", bench.path / "store"] if method != "sft" else []
        code = bench.call(method, "--model", bench.model, "--data", path, "--output", run, "--max-steps", 1,
                          "--samples", 0, *store)
        check(bench, code, path, number)
        if code == 0:
            trained += 1
            assert audit(run)["rows"]["kept"] >= steps(run)[0]["examples"] >= 1
            assert 0 < steps(run)[0]["loss"] < 1000
        else:
            assert not run.exists()
    assert trained


def test_what_a_terminal_is_sent(bench: Bench) -> None:
    """H3: names, texts and roles of the data are shown, and do nothing to the terminal."""
    rows = [{"id": "\ud800", "prompt": "a ", "completion": "b\x9b31m", "label": True, "source": ["x"]},
            {"id": "x\x1b[31m\nq", "prompt": "c ", "completion": "d\x7f", "label": False, "source": {"a": 1}},
            {"id": {"a": [1]}, "prompt": "e ", "completion": "d\u202e", "label": False, "\ud800": 1}]
    report = bench.look(rows, "--html", bench.path / "page.html")
    assert list(by_id(report)) == ["\\ud800", "x\x1b[31m\nq", "{'a': [1]}"]
    assert "id \\ud800, desirable" in bench.out
    assert "id x\\x1b[31m\\nq, undesirable" in bench.out
    assert all(char.isprintable() or char == "\n" for char in bench.out)
    bench.look([{"messages": [{"role": "a\x1b", "content": "a"}], "\x1b": 1},
                {"chosen": [{"role": "a\x1b", "content": "a"}], "rejected": [{"role": "b", "content": "a"}]}], code=2)
    assert all(char.isprintable() or char == "\n" for char in bench.err)
