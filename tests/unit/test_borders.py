"""What happens at the borders to other libraries: every failure is a sentence, and nothing is read without a bound."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tropism.borders import border, is_out_of_memory, read_bytes, read_object
from tropism.cli.app import main
from tropism.distributed import World
from tropism.errors import DataError, ModelError, TropismError, UsageError
from tropism.observe.manifest import Manifest
from tropism.observe.rundir import RunDirectory
from tropism.train.failure import record_failure


class PanicException(BaseException):
    """As the bindings of Rust libraries raise it."""


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


CPU_ALLOCATION = RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
                              "memory: you tried to allocate 4000000000000000 bytes. Error code 12")


@pytest.mark.parametrize(("error", "sentence"), [
    (PanicException("index out of bounds"), "PanicException: index out of bounds"),
    (RecursionError("maximum recursion depth exceeded"), "it is nested too deeply"),
    (MemoryError(), "there is not enough memory for it"), (CPU_ALLOCATION, "there is not enough memory for it"),
    (KeyError("metadata"), "KeyError: 'metadata'"), (ZeroDivisionError("modulo by zero"), "ZeroDivisionError: modulo"),
    (OSError(13, "Permission denied"), "Permission denied"), (ValueError("wrong\nin detail"), "wrong"),
    (Exception("untagged enum"), "untagged enum"), (ValueError("\ud800"), r"\\ud800"), (TypeError(), "TypeError$")])
def test_whatever_a_library_raises_is_an_error_for_users(error: BaseException, sentence: str) -> None:
    """G2: of the class that was asked for, with the file."""
    with pytest.raises(DataError, match=f"^FILE: not readable: {sentence}") as raised, border("FILE: not readable",
                                                                                              DataError):
        raise error
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit(), UsageError("as it was")])
def test_what_is_no_failure_of_a_library_passes(error: BaseException) -> None:
    """A user who interrupts, an exit, and our own errors."""
    with pytest.raises(type(error)) as raised, border("FILE"):
        raise error
    assert raised.value is error


def test_messages_are_short() -> None:
    with pytest.raises(ModelError) as raised, border("FILE", advice="Do this."):
        raise ValueError("x" * 10**6)
    assert len(str(raised.value)) < 500
    assert str(raised.value).endswith("Do this.")


def test_a_real_panic_is_caught(tmp_path: Path, tiny_model_dir: Path, fixture_tokenizer: Any) -> None:
    """G2: tokenizers panics at a template that names a token which it does not have."""
    from tropism.model.load import load_tokenizer
    from tropism.model.source import ModelSource

    content = json.loads((tiny_model_dir / "tokenizer.json").read_text())
    content["post_processor"] = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "X", "type_id": 0}}],
                                 "pair": [], "special_tokens": {}}
    fixture_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "config.json").write_text((tiny_model_dir / "config.json").read_text())
    panicking = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BaseException) as raised:  # noqa: PT011  (not even an Exception)
        panicking.encode("a")
    assert not isinstance(raised.value, Exception)
    with pytest.raises(ModelError, match="the tokenizer fails on a simple text: PanicException"):
        load_tokenizer(ModelSource(str(tmp_path)))


def test_only_regular_files_of_a_plausible_size_are_read(tmp_path: Path) -> None:
    """G2: a fifo would be waited for, and a device has no end."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "large").write_bytes(b"x" * 11)
    for name, sentence in (("fifo", "is not a regular file"), ("link", "is not a regular file"),
                           ("large", "too large"), (".", "[Ii]s a directory"), ("none", "No such file")):
        with pytest.raises(UsageError, match=sentence):
            read_bytes(tmp_path / name, 10, UsageError)
    assert read_bytes(tmp_path / "large", 11) == b"x" * 11


@pytest.mark.parametrize(("text", "sentence"), [
    ('{"a": 1, "a": 2}', "'a' has two values"), ('{"a": NaN}', "contains NaN"), ("[1]", "not a JSON object"),
    ('{"a": ' + "[" * 70 + "]" * 70 + "}", "nested too deeply"), ("[" * 10**5, "nested too deeply"),
    ('{"a": ' + "9" * 5000 + "}", "4300 digits"), ("", "Expecting value"), ('{"a": 1', "Expecting")])
def test_json_that_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(ModelError, match=f"f.json: .*{sentence}"):
        read_object(tmp_path / "f.json")


def test_json_that_is_accepted(tmp_path: Path) -> None:
    """Infinity is a value that configs have; a key may repeat its value."""
    (tmp_path / "f.json").write_text('{"a": 1, "a": 1, "b": Infinity, "c": {"d": [[]]}}')
    assert read_object(tmp_path / "f.json") == {"a": 1, "b": float("inf"), "c": {"d": [[]]}}


# --- memory -----------------------------------------------------------------------------------------------------------


def test_what_runs_out_of_memory() -> None:
    assert all(map(is_out_of_memory, (MemoryError(), CPU_ALLOCATION, OutOfMemoryError("x"),
                                      torch.OutOfMemoryError("CUDA out of memory"))))
    assert not any(map(is_out_of_memory, (RuntimeError("other"), ValueError("can't allocate memory"))))
    with pytest.raises(RuntimeError) as raised:
        torch.empty(10**15)
    assert is_out_of_memory(raised.value)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("error", [MemoryError(), CPU_ALLOCATION, torch.OutOfMemoryError("out of memory")])
def test_the_memory_that_is_short_is_named(tmp_path: Path, error: BaseException, size: int) -> None:
    """G2: a CPU is no GPU, also under torchrun; the pack is said, with what to do."""
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    with pytest.raises(TropismError, match=r"this machine is out of memory.*--microbatch-tokens below 2048") as raised:
        record_failure(directory, Manifest(directory, {}), error, World(0, size, torch.device("cpu")), 2048, True)
    assert "GPU" not in str(raised.value)


def test_a_command_without_memory_says_so(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    """G2: outside of training too."""
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("tropism.commands.inspect.inspect", fail)
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    assert main(["inspect", str(data), "--model", str(tiny_model_dir)]) == 1
    assert capsys.readouterr().err.startswith("tropism: out of memory. ")
