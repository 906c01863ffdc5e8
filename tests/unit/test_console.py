"""What is printed is text: no markup, no emoji codes, nothing that acts on the terminal."""

import ast
import contextlib
import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from unicodedata import category

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

import tropism
from hostile import PAYLOADS, STYLING, TEXTS, is_harmless
from tropism.observe.console import Voice
from tropism.printable import escaped, one_line

SOURCE = Path(tropism.__file__).parent


def heard(say: Callable[[Voice], None], terminal: bool = False) -> str:
    """What a console is sent."""
    out = io.StringIO()
    say(Voice(console=Console(file=out, force_terminal=terminal, width=100_000, soft_wrap=True)))
    return out.getvalue()


def a_bar(voice: Voice, text: str) -> None:
    with voice.bar(text, lasting=True) as report, voice.bar(f"{text} inside") as inner:
        for done in (1, 2):
            report(done, 2, loss=text)
            inner(done, None)


WAYS: dict[str, Callable[[Voice, str], None]] = {
    "say": lambda voice, text: voice.say(text, text), "warn": lambda voice, text: voice.warn(text),
    "styled": lambda voice, text: voice.styled((text, "red"), (text, "")),
    "figures": lambda voice, text: voice.figures(text, {text: 1.0, f"{text}_low": 0.0, f"{text}_high": 2.0}),
    "before and after": lambda voice, text: voice.before_after(text, {text: 1.0}, {text: 2.0}), "bar": a_bar}


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=25)
@given(text=TEXTS)
@example(text=r"\[/x]")
@example(text="[/x] :smile: [red]a[/red] {task.x}")
def test_a_text_is_shown_as_it_is(way: str, text: str) -> None:
    """In every kind of output, with a terminal and without."""
    said = heard(lambda voice: WAYS[way](voice, text))
    assert is_harmless(said)
    shown = one_line(text)
    # A text column is as wide as the longest word of rich's own layout: spaces at its ends are not kept.
    assert shown.strip() in said or len(shown) != len(shown.strip()) or len(text) > 1000
    styled = heard(lambda voice: WAYS[way](voice, text), terminal=True)
    assert is_harmless(STYLING.sub("", styled).replace("\r", ""))
    usual = heard(lambda voice: WAYS[way](voice, "x"), terminal=True)
    assert set(STYLING.findall(styled)) <= set(STYLING.findall(usual))


@pytest.mark.parametrize("way", WAYS)
def test_an_encoding_that_lacks_a_character(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run under PYTHONIOENCODING=ascii does not end at the first name with an umlaut."""
    for encoding, terminal in (("ascii", False), ("ascii", True), ("latin-1", True), ("utf-8", True)):
        for errors in (False, True):
            raw = io.BytesIO()
            stream = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
            monkeypatch.setattr(sys, "stderr" if errors else "stdout", stream)
            monkeypatch.setenv("COLUMNS", "40")
            if terminal:
                monkeypatch.setenv("FORCE_COLOR", "1")
            for payload in (*PAYLOADS, "\u00fc\u65e5\u672c \U0001f600 " * 9):
                WAYS[way](Voice(errors=errors), payload)
            text = raw.getvalue().decode(encoding)
            monkeypatch.undo()
            assert is_harmless(STYLING.sub("", text).replace("\r", ""))
            assert ("\\u65e5" in text.replace("\n", "")) or encoding == "utf-8" or way not in ("say", "warn", "styled")


def test_a_row_id_that_looks_like_markup_does_not_end_a_run() -> None:
    """Rich would raise MarkupError."""
    said = heard(lambda voice: voice.warn(r"row \[/x]: the gradient is not finite"))
    assert said == "note: row \\[/x]: the gradient is not finite\n"


def test_a_line_of_a_name_is_not_a_line_of_the_output() -> None:
    """A row id cannot pretend to be a verdict."""
    said = heard(lambda voice: voice.say("row a\nruns/first: intact, reproducible on this machine", "second"))
    assert said == "row a\\nruns/first: intact, reproducible on this machine\nsecond\n"
    assert escaped("\r\n") == "\\r\\n"


@settings(max_examples=50)
@given(text=TEXTS)
@example(text="\u3042 \U0001f469\u200d\U0001f4bb\xa0\u0645\u06cc\u200c\n\n\tx ")
def test_a_part_of_a_text_has_no_line_end_of_its_own(text: str) -> None:
    """What scripts and emoji need stays; nothing acts on the terminal."""
    for terminal in (False, True):
        said = heard(lambda voice: voice.stream(text), terminal)
        assert is_harmless("".join(char for char in said if char not in "\u200c\u200d" and category(char) != "Zs"))
        assert said.count("\n") == text.count("\n")
        if text.isprintable() or not (set(text) - set("\n\xa0\u3000\u200d")):
            assert said == text


def test_there_is_one_door() -> None:
    """Only the console prints, and the command line its help and tracebacks."""
    doors = {"observe/console.py", "cli/app.py", "cli/library_output.py"}
    for file in SOURCE.rglob("*.py"):
        if (name := file.relative_to(SOURCE).as_posix()) in doors:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Name):
                assert node.id not in ("print", "Console"), name
            if isinstance(node, ast.Attribute):
                assert node.attr != "print", name


def in_terminal(say: Callable[[Voice], None], width: int) -> list[str]:
    """The lines that a terminal of this width is sent."""
    out = io.StringIO()
    say(Voice(console=Console(file=out, force_terminal=True, color_system=None, width=width, soft_wrap=True)))
    return out.getvalue().rstrip("\n").split("\n")


WORDS = st.lists(st.text(st.characters(categories=["L", "N", "P"], exclude_characters="`"), min_size=1, max_size=30),
                 min_size=1, max_size=40)


@given(words=WORDS, width=st.integers(20, 200), indent=st.integers(0, 4))
def test_lines_wrap_between_words(words: list[str], width: int, indent: int) -> None:
    """No word is divided, no line is wider than the terminal unless it is one word, and nothing else changes."""
    text = " " * indent + " ".join(words)
    lines = in_terminal(lambda voice: voice.say(text), width)
    assert [word for line in lines for word in line.split(" ") if word] == [word for word in text.split(" ") if word]
    for line in lines[1:]:
        assert line.startswith(" " * (indent + 2))
        assert not line.startswith(" " * (indent + 3))
    assert not [line for line in lines if cell_len(line) > width and len(line.split()) > 1]
    assert heard(lambda voice: voice.say(text)) == f"{text}\n"


@pytest.mark.parametrize("copied", [
    "`tropism export runs/first --to DIR --merge`", "/a/path/that/is/longer/than/one/line/of/this/terminal",
    "runs/first/model/model.safetensors:12:", "--per-device-train-batch-size", "1,234,567.890"])
@pytest.mark.parametrize("width", [30, 50, 80])
def test_what_one_copies_is_not_divided(copied: str, width: int) -> None:
    lines = in_terminal(lambda voice: voice.warn(f"a message with some words before, then {copied} and more."), width)
    assert [line for line in lines if copied in line]


def test_a_command_at_the_end_is_one_line() -> None:
    command = "tropism kto --model Qwen/Qwen3-0.6B --data feedback.jsonl --output runs/first"
    assert in_terminal(lambda voice: voice.say(f"--model is required. Example: {command}"), 40) == [
        "--model is required. Example:", f"  {command}"]


def test_a_table_that_is_too_wide_becomes_lines() -> None:
    """Numbers are not divided either; a file gets the whole table."""
    before, after = {"logps/chosen": -576.975, "rewards/auc": 0.5}, {"logps/chosen": -12345.678, "rewards/auc": 0.75}
    assert in_terminal(lambda voice: voice.before_after("rows", before, after), 40) == [
        "rows", "  logps/chosen: -576.9750 -> -12345.6780", "  rewards/auc: 0.5000 -> 0.7500"]
    for width in (80, 200):
        assert "│ logps/chosen │ -576.9750 │ -12345.6780 │" in in_terminal(
            lambda voice: voice.before_after("rows", before, after), width)
    row = ("a", "0.5", "0.1", "3 s")
    assert in_terminal(lambda voice: voice.table("runs", ("run", "AUC", "KL", "time"), [row]), 25) == [
        "runs", "  a: AUC 0.5, KL 0.1,", "    time 3 s"]
    out = io.StringIO()
    Voice(console=Console(file=out, width=20, soft_wrap=True)).before_after("rows", before, after)
    assert "│ logps/chosen │ -576.9750 │ -12345.6780 │" in out.getvalue()


def test_columns_that_do_not_fit_are_divided_among_tables() -> None:
    """Every value stands below the name of its model, which is text and not markup."""
    names = ["runs/[a]", "runs/b", "runs/c"]
    records = [{"rewards/accuracies": 0.1 * number} for number in range(3)]

    def printed(width: int) -> list[str]:
        return in_terminal(lambda voice: voice.side_by_side("rows", names, records), width)

    assert [line.split() for line in printed(80) if "metric" in line] == [
        ["┃", "metric", "┃", "runs/[a]", "┃", "runs/b", "┃", "runs/c", "┃"]]
    divided = [line.split("┃")[1:-1] for line in printed(45) if "metric" in line]
    assert [[cell.strip() for cell in row] for row in divided] == [["metric", "runs/[a]", "runs/b"],
                                                                   ["metric", "runs/c"]]
    assert max(map(len, printed(45))) <= 45
    assert printed(28) == ["rows", "runs/[a]:", "  rewards/accuracies: 0.0000", "runs/b:",
                           "  rewards/accuracies: 0.1000", "runs/c:", "  rewards/accuracies: 0.2000"]


@pytest.mark.parametrize(("lasting", "every", "wanted"), [
    (True, False, 26), (True, True, 50), (False, False, 0)])
def test_a_bar_leaves_lines_in_a_terminal(lasting: bool, every: bool, wanted: int) -> None:
    """Those that a file gets; other bars vanish."""
    def work(voice: Voice) -> None:
        with voice.bar("train", lasting, every) as report:
            for done in range(1, 51):
                report(done, 50, loss="0.5")
                if done == 25:
                    voice.say("between")

    found = [line for line in STYLING.sub("", "\n".join(in_terminal(work, 80))).replace("\r", "\n").split("\n")
             if line.startswith("train ") and "loss 0.5" in line and "left" not in line]
    assert len(found) == wanted
    if lasting:
        assert found == [line for line in heard(work).split("\n") if line.startswith("train")]


@pytest.mark.parametrize(("total", "wanted"), [
    (1, [1]), (10, [*range(1, 11)]), (24, [*range(1, 25)]), (60, [1, *range(5, 61, 5)]),
    (1003, [1, *range(50, 1001, 50), 1003]), (0, [0])])
def test_lines_come_at_round_numbers(total: int, wanted: list[int]) -> None:
    def work(voice: Voice) -> None:
        with voice.bar("train", lasting=True) as report:
            for done in range(min(1, total), total + 1):
                report(done, total)

    assert heard(work).splitlines() == [f"train {done}/{total}" for done in wanted]


SPEAKER = """
from tropism.observe.console import Voice
voice = Voice()
voice.warn("the prompt of 55 rows was truncated on the left (46%, first data.jsonl:1). Raise --max-length.")
with voice.bar("train", lasting=True) as report:
    for done in range(1, 4):
        report(done, 3, loss="0.5000")
voice.say("end")
"""


@pytest.mark.parametrize(("width", "wanted"), [
    (80, ["note: the prompt of 55 rows was truncated on the left (46%, first data.jsonl:1).",
          "  Raise --max-length."]),
    (200, ["note: the prompt of 55 rows was truncated on the left (46%, first data.jsonl:1). Raise --max-length."])])
def test_in_a_terminal_of_the_system(width: int, wanted: list[str]) -> None:
    """As a user sees it, with the width that the terminal has."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    with subprocess.Popen([sys.executable, "-c", SPEAKER], stdin=slave, stdout=slave, stderr=slave,
                          env={**os.environ, "TERM": "xterm"}) as process:
        os.close(slave)
        said = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while part := os.read(master, 4096):
                said += part
    os.close(master)
    assert process.returncode == 0
    lines = [line.rpartition("\r")[2] for line in STYLING.sub("", said.decode()).replace("\r\n", "\n").split("\n")]
    assert lines[:len(wanted)] == wanted
    assert [line for line in lines if line.startswith("train") and "left" not in line] == [
        f"train {done}/3  loss 0.5000" for done in (1, 2, 3)]
    assert "end" in lines[-2:]


def test_a_stage_of_seconds_leaves_no_lines_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long one leaves a line every five seconds at most."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def work(voice: Voice) -> None:
        nonlocal now
        with voice.bar("score") as report:
            for done in range(1, 63):
                now += 1.0
                report(done, 62)

    assert heard(work).splitlines() == [f"score {done}/62" for done in (*range(5, 61, 5), 62)]
