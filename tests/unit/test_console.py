"""What is printed is text: no markup, no emoji codes, nothing that acts on the terminal."""

import ast
import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
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
    with voice.bar(text) as report, voice.bar(f"{text} inside") as inner:
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
