"""Names that no file has, and files that may not be read: a sentence and exit code 2."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given

from hostile import PAYLOADS, TEXTS, as_an_ordinary_user, is_harmless
from tropism.cli.app import main
from tropism.config import METHODS, ConvertOptions, InspectOptions, ScoringOptions
from tropism.options import check_file_name

NAMES = {"empty": "", "blank": " \t", "NUL": "a\0b", "long": "a" * 3000, "long part": "/tmp/" + "\u00fc" * 130,
         "long path": "/".join(["a" * 200] * 40), "no user": "~no-such-user-here/x", "half a character": "a\ud800"}
DATA = ("--data", "d.jsonl")


def kto(flag: str, value: str) -> list[str]:
    """A run of one step with this option."""
    options = {"--model": "m", "--data": "d.jsonl", "--output": "o", "--store": "s", "--max-steps": "1", flag: value}
    return ["kto", *(text for option in options.items() for text in option)]


COMMANDS: list[tuple[str, list[str]]] = [
    *((flag, kto(flag, "{}")) for flag in (
        "--model", "--data", "--output", "--store", "--reference", "--eval-data", "--log-dir", "--chat-template",
        "--lora.adapter", "--resume", "--config", "--teacher")), ("CONFIG", ["train", "{}"]), ("RUN", ["resume", "{}"]),
    ("RUN", ["verify", "{}"]), ("--json", ["verify", "r", "--json", "{}"]), ("RUN", ["export", "{}", "--to", "d"]),
    ("--to", ["export", "r", "--to", "{}"]), ("--base", ["export", "r", "--to", "d", "--base", "{}"]),
    ("--checkpoint", ["export", "r", "--to", "d", "--checkpoint", "{}"]),
    ("DATA", ["inspect", "{}", "--model", "m"]), ("--model", ["inspect", "d", "--model", "{}"]),
    ("--html", ["inspect", "d", "--model", "m", "--html", "{}"]),
    ("--json", ["inspect", "d", "--model", "m", "--json={}"]),
    ("--output", ["convert", "d", "--to", "paired", "--output", "{}"]), ("DATA", ["convert", "{}", "--to", "paired",
                                                                                 "--output", "o.csv"]),
    ("MODEL", ["evaluate", "{}", *DATA]), ("--json", ["evaluate", "m", *DATA, "--json", "{}"]),
    ("--output", ["score", "m", *DATA, "--output", "{}"]), ("--store", ["store", "list", "--store", "{}"]),
    ("--store", ["store", "clean", "--store", "{}"]), ("FINGERPRINT", ["store", "clean", "{}"]),
    ("--output", ["demo", "--output", "{}"])]


@pytest.mark.parametrize(("flag", "tokens"), COMMANDS, ids=[f"{tokens[0]} {flag}" for flag, tokens in COMMANDS])
def test_every_name_of_every_command(flag: str, tokens: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before anything is read or written, with the option."""
    monkeypatch.chdir(tmp_path)
    for kind in ("empty", "NUL", "long") if flag != "--data" else NAMES:
        name = NAMES[kind]
        assert main([token.replace("{}", name) for token in tokens]) == 2, kind
        said = capsys.readouterr()
        assert said.err.startswith(f"tropism: {flag}: "), (kind, said.err)
        assert said.err.count("\n") == 1
        assert is_harmless(said.err)
        assert len(said.err) < 8000
        assert not said.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["model", "data", "reference", "store", "chat_template", "lora"])
def test_names_in_a_configuration_file(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """H2: with file and line."""
    file = tmp_path / "c.yaml"
    for name in ("", "a\0", "x" * 3000):
        file.write_text("method: kto\n" + yaml.safe_dump({key: {"adapter": name} if key == "lora" else name}))
        assert main(["train", str(file)]) == 2
        named = "lora.adapter" if key == "lora" else key
        assert capsys.readouterr().err.startswith(f"tropism: {file}:{3 if key == 'lora' else 2}: {named}: the name ")


@pytest.mark.parametrize("tokens", [kto("--output", "a\udcff"), ["export", "r", "--to", "a\udcff"],
                                    ["score", "m", *DATA, "--output", "a\udcff.parquet"]], ids=lambda tokens: tokens[0])
def test_a_model_is_written_to_a_name_of_text(tokens: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Libraries that write weights and tokenizers take no other: they would fail after the training."""
    assert main(tokens) == 2
    assert "has a character that file names cannot have here" in capsys.readouterr().err


def test_every_option_that_names_a_file_is_checked() -> None:
    """An option that is added later, too."""
    for options in (*METHODS.values(), InspectOptions, ConvertOptions, ScoringOptions):
        for option in options.described():
            if option.values in ("MODEL", "DATA", "PATH", "DIR", "FILE"):
                group, dot, name = option.name.rpartition(".")
                owner: Any = options.model_fields[group].annotation if dot else options
                with pytest.raises(ValueError, match="NUL"):
                    owner(**{name: "a\0"})


@given(TEXTS)
def test_a_name_is_usable_or_refused(text: str) -> None:
    """No other error than the one that says so."""
    with suppress(ValueError):
        check_file_name(text)
        Path(text).expanduser().exists()  # raises nothing now
        assert text.strip()
        assert "\0" not in text


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Path]:
    """A directory that nobody may enter, beside a data file."""
    path = tmp_path_factory.mktemp("permissions")
    (path / "d.jsonl").write_text("".join(json.dumps({"prompt": f"{text} ", "completion": "b", "label": text == "a"})
                                          + "\n" for text in ("a", "b")))
    (path / "locked").mkdir(mode=0)
    (path / "m").symlink_to(tiny_model_dir)
    yield path
    (path / "locked").chmod(0o700)


@pytest.mark.parametrize("tokens", [
    *(kto(f"--{name}", "locked/x") for name in ("model", "data", "output", "reference", "eval-data", "config",
                                                "chat-template", "lora.adapter", "teacher")),
    *(line.split() for line in (
        "train locked/c.yaml", "resume locked/r", "verify locked/r", "export locked/r --to e",
        "inspect locked/d.jsonl --model m --store s", "inspect d.jsonl --model locked/m --store s",
        "convert locked/d.jsonl --to single --output c.csv", "convert d.jsonl --to single --output locked/c.csv",
        "evaluate locked/m --data d.jsonl --store s", "evaluate m --data locked/d.jsonl --store s",
        "evaluate m --data d.jsonl --reference locked/m --store s", "score m --data d.jsonl --output locked/s.jsonl",
        "store list --store locked/s", "store clean --store locked/s"))], ids=" ".join)
def test_what_may_not_be_read(locked: Path, tokens: list[str], monkeypatch: pytest.MonkeyPatch,
                              capsys: pytest.CaptureFixture[str]) -> None:
    """The path and the reason, whichever command meets it."""
    monkeypatch.chdir(locked)
    with as_an_ordinary_user():
        assert main(tokens) in (1, 2)  # an output that cannot be written is a failure, not a wrong use
    said = capsys.readouterr().err
    assert said.startswith("tropism: ")
    assert "Permission denied" in said
    assert "locked/" in said
    assert said.count("\n") == 1


def test_a_system_error_without_a_file_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be no sentence."""
    def fail(_: object) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("tropism.cli.app.requested", fail)
    with pytest.raises(OSError, match="Input/output"):
        main(["kto"])


def test_rows_of_files_with_odd_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory of data may hold a file whose name is no text."""
    folder = tmp_path / "data"
    folder.mkdir()
    rows = json.dumps({"prompt": "a ", "completion": "b", "label": True}) + "\n" + "{\n"
    for payload in PAYLOADS[:-1]:
        name = payload.replace("/", "").replace("\0", "").encode(errors="surrogatepass") + b"\xff.jsonl"
        file = folder / os.fsdecode(name)
        file.write_text(rows)
        code = main(["convert", str(folder), "--to", "single", "--output", str(tmp_path / "o.jsonl")])
        said = capsys.readouterr()
        assert code == 2
        assert is_harmless(said.out + said.err)
        assert ".jsonl:2: " in said.err
        file.unlink()


def test_a_weight_of_a_name_with_a_line_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a\nb.jsonl").write_text(json.dumps({"prompt": "a ", "completion": "b", "label": True}) + "\n")
    assert main(["convert", f"{tmp_path}/a\nb.jsonl:2", "--to", "unpaired", "--output", str(tmp_path / "o.csv")]) == 0
    assert "2 rows" in capsys.readouterr().out
