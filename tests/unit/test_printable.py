"""Text from elsewhere in messages: shown, and without effect."""

import json
import logging
import pickle
import subprocess
import sys
import warnings
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hostile import PAYLOADS, TEXTS, is_harmless
from tropism.cli import app
from tropism.cli.library_output import clean_library_output
from tropism.config import KTOOptions
from tropism.config_file import read_yaml
from tropism.errors import DataError, OutputError, TropismError, UsageError
from tropism.printable import escaped, json_text, lines, one_line


@given(TEXTS)
def test_a_text_is_one_harmless_line_that_hides_nothing(text: str) -> None:
    shown = escaped(text)
    assert shown.isprintable()
    shown.encode()  # can be
    assert escaped(shown) == shown
    if text.isprintable():
        assert shown == text
    if "\\" not in text:
        assert shown.encode("latin-1", "backslashreplace").decode("unicode_escape") == text


def test_a_long_line_keeps_both_ends() -> None:
    """The place stands at the beginning, the remedy at the end."""
    shown = one_line("file:1: " + "x" * 1_000_000 + "\x1b. Remove it")
    assert shown.startswith("file:1: xxx")
    assert shown.endswith(r"\x1b. Remove it")
    assert "999,0" not in shown
    assert " characters ... " in shown
    assert len(shown) < 2400
    assert one_line("x" * 2400) == "x" * 2400


@given(st.recursive(TEXTS, lambda inner: st.dictionaries(TEXTS, inner, max_size=2) | st.lists(inner, max_size=2)))
def test_json_keeps_its_values(value: object) -> None:
    for indent in (None, 2):
        text = json_text(json.dumps(value, ensure_ascii=False, indent=indent))
        assert is_harmless(text)
        text.encode()
        assert json.loads(text) == json.loads(json.dumps(value))


@given(TEXTS)
@example(r"\[/x]")
def test_a_command_that_fails_prints_one_line(text: str) -> None:
    """Whatever is named in the error, and whichever error it is."""
    for error in (DataError(f"{text}: row {text}"), UsageError(text),
                  OutputError.because(Path("a"), OSError(28, text))):
        with pytest.MonkeyPatch.context() as patch, redirect_stderr(StringIO()) as err:
            patch.setattr(app, "requested", lambda _, error=error: (_ for _ in ()).throw(error))
            assert app.main(["kto"]) == error.exit_code
        said = err.getvalue()
        assert said.startswith("tropism: ")
        assert said.count("\n") == 1
        assert is_harmless(said)
        assert escaped(text[:1000]) in said or len(text) > 1000
        assert len(said) < 30_000


def test_an_error_is_clean_wherever_it_goes() -> None:
    """In Python, between processes and in a manifest too; only the lines of its own stay lines."""
    error = DataError("a\nb\x1b[31m", "  c")
    for found in (error, pickle.loads(pickle.dumps(error))):
        assert type(found) is DataError
        assert str(found) == "a\\nb\\x1b[31m\n  c"
    assert str(TropismError()) == ""


@pytest.mark.parametrize("payload", PAYLOADS[:-1])
def test_keys_and_values_of_a_configuration_file(tmp_path: Path, payload: str) -> None:
    """H2, G3: named with the line, as text."""
    file = tmp_path / "c.yaml"
    for content in ({payload: 1}, {"method": payload}, {"beta": payload}, {"lora": {payload: 1}}, {"loss": payload},
                    {"model": f"{payload}\0"}):
        file.write_text(json.dumps(content), encoding="utf-8")
        with pytest.raises(UsageError) as caught:
            read_yaml(file, "kto")
        assert str(caught.value).isprintable()
        assert str(caught.value).startswith(f"{file}")


def test_log_records_and_warnings_of_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    clean_library_output()
    logger, out = logging.getLogger("a-library"), StringIO()
    handler = logging.StreamHandler(out)
    logger.addHandler(handler)
    try:
        for payload in PAYLOADS:
            logger.warning("token %s", payload)
            logger.warning(f"file {payload}".replace("%", "%%"))
            try:
                raise ValueError(payload)
            except ValueError:
                logger.exception("failed")
            warned = warnings.formatwarning(payload, UserWarning, "f.py", 1, "")
            assert is_harmless(warned)
    finally:
        logger.removeHandler(handler)
    assert is_harmless(out.getvalue())
    assert r"token \x1b[2J\x1b[31m" in out.getvalue()
    assert "ValueError: [bold" in out.getvalue()
    assert "Logging error" not in capsys.readouterr().err


def test_a_traceback_of_an_unexpected_error() -> None:
    code = ("from tropism.cli import app; app.requested = lambda _: {}['a\\x1b]52;\\x07\\x9b']\n"
            "app.main(['kto'])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=60)
    said = done.stderr.decode()
    assert done.returncode == 1
    assert "Traceback" in said
    assert "KeyError" in said
    assert is_harmless(said)


def test_lines_of_libraries_stay_lines() -> None:
    assert lines("a\x1b\nb\r\n") == "a\\x1b\nb\\r\n"


def test_python_options_say_so_too() -> None:
    """The same check stands behind the trainers."""
    with pytest.raises(ValueError, match="NUL"):
        KTOOptions(model="m\0", data="d", output="o")
