"""`--log-format json`: each line is one JSON object, whatever it holds. `--quiet`: warnings, errors and results."""

import io
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hostile import PAYLOADS, TEXTS, is_harmless
from tropism.cli.app import main
from tropism.cli.library_output import library_output_as_json
from tropism.cli.output_options import output_options
from tropism.observe import log_format
from tropism.observe.console import Voice
from tropism.observe.log_format import LogFormat, json_line, printing
from tropism.printable import one_line

JSON = LogFormat(json=True)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A format that an exception has kept does not reach other tests."""
    for name in ("TROPISM_LOG_FORMAT", "TROPISM_QUIET", "TQDM_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    before = warnings.showwarning, logging.StreamHandler.emit, sys.stdout, sys.stderr
    yield
    warnings.showwarning, logging.StreamHandler.emit, sys.stdout, sys.stderr = before  # type: ignore[method-assign]
    log_format._given = None
    os.environ.pop("TQDM_DISABLE", None)


def objects(text: str) -> list[dict[str, Any]]:
    """The objects of a log, which has nothing else."""
    assert text.isascii()
    found = [json.loads(line, parse_constant=pytest.fail) for line in text.split("\n")[:-1]]
    assert text.endswith("\n") or not text
    for one in found:
        assert list(one)[:3] == ["time", "kind", "text"]
        assert one["kind"] in ("info", "warning", "error", "metrics")
        assert one["time"].endswith("Z")
        assert len(one["time"]) == len("2030-01-01T00:00:00.000Z")
    return found


def heard(monkeypatch: pytest.MonkeyPatch, say: Callable[[Voice], None], how: LogFormat = JSON) -> str:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal that takes colors
    with printing(how):
        say(Voice())
    monkeypatch.undo()
    return out.getvalue()


WAYS: dict[str, Callable[[Voice, str], None]] = {
    "say": lambda voice, text: voice.say(text), "warn": lambda voice, text: voice.warn(text, text),
    "error": lambda voice, text: voice.error(text, place=text),
    "styled": lambda voice, text: voice.styled((text, "red")),
    "measured": lambda voice, text: voice.measured("eval", 1, 2, text, {text: 1.0}),
    "figures": lambda voice, text: voice.figures(text, {text: 1.0}),
    "before and after": lambda voice, text: voice.before_after(text, {text: 1.0}, {text: float("nan")}),
    "side by side": lambda voice, text: voice.side_by_side(text, [text], [{text: 1.0}]),
    "table": lambda voice, text: voice.table(text, (text, "b"), [(text, text)])}


def everything_in(value: Any) -> str:
    """All texts of a value, on lines."""
    if isinstance(value, dict):
        return "\n".join(map(everything_in, [*value, *value.values()]))
    return "\n".join(map(everything_in, value)) if isinstance(value, list) else str(value)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=10)
@given(text=TEXTS)
@example(text="a\n{\"kind\": \"error\"}\nb")
def test_any_text_is_one_valid_object(way: str, text: str) -> None:
    """Also for those that reject lone surrogates and numbers that are none; decoded, it does nothing to a terminal."""
    with pytest.MonkeyPatch.context() as patched:
        said = heard(patched, lambda voice: WAYS[way](voice, text))
    found = objects(said)
    assert len(found) == (1 if text.strip() or way not in ("say", "styled") else 0)
    for one in found:
        assert is_harmless(everything_in(one))
        everything_in(one).encode()  # whole characters
        assert one_line(text).strip() in everything_in(one) or "\n" in text or len(text) > 1000


@given(number=st.floats())
def test_numbers(number: float) -> None:
    """One that is not finite is null, as in metrics.jsonl; others are exact."""
    held = json.loads(json_line("metrics", "", metrics={"loss": number}), parse_constant=pytest.fail)["metrics"]["loss"]
    assert held == (number if abs(number) < float("inf") else None)


def test_a_bar_is_lines_with_their_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bar on a terminal either."""
    def train(voice: Voice) -> None:
        with voice.bar("train", lasting=True) as report:
            for step in (1, 2):
                report(step, 2, {"loss": 0.5, "grad_norm": float("inf")}, loss="0.5000")

    found = objects(heard(monkeypatch, train))
    assert [one["text"] for one in found] == ["train 1/2  loss 0.5000", "train 2/2  loss 0.5000"]
    for step, one in enumerate(found, 1):
        assert {**one, "time": ""} == {
            "time": "", "kind": "metrics", "text": f"train {step}/2  loss 0.5000", "stage": "train", "step": step,
            "total": 2, "metrics": {"loss": 0.5, "grad_norm": None}}


def test_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings and errors always, messages only if they are the result; bars never."""
    def speak(voice: Voice) -> None:
        for phase in (voice.preparing, voice.concluding):
            phase()
            for say in WAYS.values():
                say(voice, phase.__name__)
            with voice.bar("bar", every=True, lasting=True) as report:
                report(1, 1, {"loss": 1.0})

    found = objects(heard(monkeypatch, speak, LogFormat(json=True, quiet=True)))
    assert len(found) == 2 + len(WAYS)
    assert [one["kind"] for one in found[:2]] == ["warning", "error"]
    text = heard(monkeypatch, speak, LogFormat(quiet=True))
    assert text.split("\n")[1] == "preparing"
    assert text.count("preparing") == 3
    assert "bar" not in text


def test_libraries_speak_json_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What they print, log, warn of and draw; what a line pretends to be is text. Files get what they did."""
    logger = logging.getLogger("a library")
    file = io.StringIO()
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(sys.stderr), logging.StreamHandler(file)])
    logger.handlers[1].setLevel(logging.ERROR)
    monkeypatch.setattr(logger, "propagate", False)
    with printing(JSON), library_output_as_json():
        for payload in PAYLOADS:
            print(payload)
        print('{"kind": "error", "text": "no"}')
        logger.warning("of %s", "a log\nand more")
        logger.error("worse")
        logger.warning("%d", "no number")
        warnings.warn("deprecated\nfor long", FutureWarning, stacklevel=1)
        print("10%\r50%\r", end="", file=sys.stderr)
        print("no line end", end="", file=sys.stderr)
    printed = capsys.readouterr()
    assert {one["kind"] for one in objects(printed.out)} == {"info"}
    assert json.loads(objects(printed.out)[-1]["text"]) == {"kind": "error", "text": "no"}
    assert [(one["kind"], one["text"]) for one in objects(printed.err)] == [
        ("warning", "warning: of a log\\nand more"), ("error", "worse"),
        ("warning", "warning: FutureWarning: deprecated\\nfor long"), ("info", "10%"), ("info", "50%"),
        ("info", "no line end")]
    assert file.getvalue() == "worse\n"
    print("as before")
    assert capsys.readouterr().out == "as before\n"


@pytest.mark.parametrize(("arguments", "code"), [
    ("--log-format json", 0), ("--log-format=json --help", 0), ("kto --help --log-format json", 0),
    ("--version --log-format json --quiet", 0), ("--log-format json nothing", 2), ("kto --bta 1 --log-format=json", 2),
    ("kto --log-format json --quiet maybe", 2), ("kto --log-format json --quiet=maybe", 2),
    ("kto --log-format json --model", 2), ("--log-format json -x", 2), ("verify /\x1b[31mnowhere --log-format json", 2),
    ("train --log-format json", 2), ("plan --log-format json", 2), ("migrate --log-format json trl", 2)])
def test_a_command_prints_json_alone(arguments: str, code: int, capsys: pytest.CaptureFixture[str],
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Help, usage errors and errors; the same if the environment asks for it, as under torchrun."""
    assert main(arguments.split()) == code
    given = capsys.readouterr()
    monkeypatch.setenv("TROPISM_LOG_FORMAT", "json")
    assert main([word for word in arguments.replace("=json", " json").split() if word not in ("--log-format", "json")]
                ) == code
    by_environment = capsys.readouterr()
    assert [one["text"] for one in objects(given.out)] == [one["text"] for one in objects(by_environment.out)]
    assert [one["text"] for one in objects(given.err)] == [one["text"] for one in objects(by_environment.err)]
    assert [one["kind"] for one in objects(given.err)] == ["error"] * (code == 2)
    assert bool(given.out) == (code == 0)


@pytest.mark.parametrize(("arguments", "variables", "said"), [
    (["--log-format", "jsn"], {}, "tropism: --log-format: 'jsn' is not one of text, json"),
    (["--log-format"], {}, "tropism: --log-format: '' is not one of text, json"),
    (["--quiet=2"], {}, "tropism: --quiet: '2' is not true or false"),
    ([], {"TROPISM_LOG_FORMAT": "xml"}, "tropism: TROPISM_LOG_FORMAT: 'xml' is not one of text, json"),
    (["kto"], {"TROPISM_QUIET": "\x1b"}, "tropism: TROPISM_QUIET: '\\x1b' is not true or false"),
    (["kto", "--quite"], {}, "tropism: unknown option --quite. Did you mean --quiet?")])
def test_a_wrong_choice_is_named(arguments: list[str], variables: dict[str, str], said: str,
                                 capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"{said}\n"


@pytest.mark.parametrize(("arguments", "json", "quiet", "rest"), [
    ("kto --log-format json --quiet --beta 1", True, True, "kto --beta 1"),
    ("--log-format json --log-format text kto", False, False, "kto"),
    ("--quiet kto --no-quiet", False, False, "kto"), ("kto --quiet false --beta 1", False, False, "kto --beta 1"),
    ("kto --quiet True x", False, True, "kto x"), ("kto -- --quiet", False, False, "kto -- --quiet"),
    ("migrate --quiet trl cmd --log-format x", False, True, "migrate trl cmd --log-format x"),
    ("migrate trl --quiet", False, False, "migrate trl --quiet"), ("", False, False, "")])
def test_where_the_options_may_be(arguments: str, json: bool, quiet: bool, rest: str) -> None:
    """Anywhere; but the words of another trainer's command are its own."""
    assert output_options(arguments.split()) == (LogFormat(json, quiet), rest.split(), None)


def test_the_command_line_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROPISM_LOG_FORMAT", "json")
    monkeypatch.setenv("TROPISM_QUIET", "1")
    assert output_options(["--no-quiet"])[0] == LogFormat(json=True)
    assert output_options(["--log-format", "text"])[0] == LogFormat(quiet=True)
    assert Voice()._json  # from Python too


def test_a_crash_is_one_object() -> None:
    """Its traceback is printed after the command has ended."""
    code = ("import sys; from tropism.cli import app; app.requested = lambda tokens: 1 / 0\n"
            "sys.exit(app.main(['--log-format', 'json']))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    found, = objects(done.stderr)
    assert (done.returncode, done.stdout, found["kind"]) == (1, "", "error")
    assert found["text"] == "ZeroDivisionError: division by zero"
    assert "Traceback" in found["traceback"]


def test_other_processes_stay_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with printing(JSON):
        voice = Voice(loud=False)
        for say in WAYS.values():
            say(voice, "text")
    assert capsys.readouterr() == ("", "")
