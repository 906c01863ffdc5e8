"""A disk that is full, read-only or gone: what was there stays as it was, and the error says why and what is needed."""

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tropism.commands.files import write_json, write_text
from tropism.commands.scoring import write
from tropism.errors import OutputError
from tropism.files import append_line, bytes_on_disk, system_errors, write_whole
from tropism.model import save
from tropism.observe.lock import owned
from tropism.observe.rundir import RunDirectory
from tropism.train.frozen.score_store import ScoreStore
from tropism.train.frozen.topk_store import TopKStore

MIB = 2**20
ROWS = [{"id": str(i), "text": os.urandom(32).hex()} for i in range(1000)]


def scores(count: int, seed: int = 0) -> dict[bytes, float]:
    generator = np.random.default_rng(seed)
    return {generator.bytes(16): -1.0 - index for index in range(count)}


def likeliest(count: int) -> dict[bytes, Any]:
    generator = np.random.default_rng(0)
    return {generator.bytes(16): (np.zeros((4, 2), np.int64), np.full((4, 2), -1.0), np.full(4, -1.3))
            for _ in range(count)}


class Tiny(torch.nn.Module):
    """As much of a model as `export` looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(64, 64))


WRITERS: dict[str, Callable[[Path], Any]] = {
    "append": lambda path: RunDirectory(path).append_record({"step": 1, "text": "x" * 8192}),
    "replace": lambda path: RunDirectory(path).write_json("manifest.json", {"text": "x" * 8192}),
    "held-out rows": lambda path: RunDirectory(path).write_lines("eval_rows.jsonl", [{"id": "x" * 8192}]),
    "config": lambda path: RunDirectory(path).write_config({"text": "x" * 8192}),
    "store": lambda path: ScoreStore(path, "f" * 32, {"model": "m"}).add(scores(1000)),
    "top-k store": lambda path: TopKStore(path, "f" * 32, {"model": "m"}).add(likeliest(200), 50),
    "scores": lambda path: write(ROWS, path / "scores.jsonl"),
    "scores in Parquet": lambda path: write(ROWS, path / "scores.parquet"),
    "figures": lambda path: write_json(path / "figures.json", {"text": "x" * 8192}),
    "page": lambda path: write_text(path / "page.html", "x" * 8192),
    "lock": lambda path: owned(path).__enter__(),
}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True,
                          check=False) if shutil.which("mount") else None
    if done is None or done.returncode:
        pytest.skip("no right to mount a small disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)  # an exception may hold a file of it open


def fill(disk: Path, leave_bytes: int = 0) -> None:
    """Fill up all but some bytes, in whole blocks."""
    free = shutil.disk_usage(disk).free - leave_bytes
    (disk / "ballast").write_bytes(bytes(max(0, free)))


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*"))
            if path.is_file() and path.name != "ballast"}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("leave_bytes", [0, 4096])
def test_a_full_disk_leaves_what_was_there(small_disk: Path, name: str, leave_bytes: int) -> None:
    """Nothing half-written stays: not a line, not a file, also where a part of it fitted."""
    run = small_disk / "run"
    run.mkdir()
    RunDirectory(run).append_record({"step": 0})
    RunDirectory(run).write_json("manifest.json", {"status": "running"})
    ScoreStore(run, "f" * 32, {"model": "m"}).add(scores(3, seed=1))
    before = content(run)
    fill(small_disk, leave_bytes)
    if name == "lock" and leave_bytes:
        pytest.skip("a lock fits into one block")
    with pytest.raises(OutputError, match="cannot be written") as error:
        WRITERS[name](run)
    assert "space" in str(error.value)
    assert "bytes are needed" in str(error.value) or name == "scores in Parquet" or name == "scores"
    assert content(run) == before
    (small_disk / "ballast").unlink()
    WRITERS[name](run)  # with room again it goes through
    assert all(json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())


def test_a_model_that_does_not_fit_leaves_nothing_behind(small_disk: Path, tiny_model_dir: Path) -> None:
    """S1: half a model would keep the disk full."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    fill(small_disk, 64 * 1024)
    with pytest.raises(OutputError, match=r"the model could not be written.*bytes are needed"):
        save.export(model, tokenizer, small_disk / "model", torch.float32, [2])
    assert content(small_disk) == {}
    assert not (small_disk / ".model.partial").exists()


@pytest.mark.parametrize("name", WRITERS)
def test_a_read_only_disk(small_disk: Path, name: str) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(OutputError, match=r"[Rr]ead-only"):
        WRITERS[name](small_disk)


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in (
    "store", "top-k store", "scores", "scores in Parquet", "figures", "page")])
def test_a_directory_that_has_vanished(tmp_path: Path, name: str) -> None:
    """The run directory is not made anew by a later write: it would hold a part of a run only."""
    gone = tmp_path / "gone"
    with pytest.raises(OutputError, match="cannot be written: No such file or directory"):
        WRITERS[name](gone)
    assert not gone.exists()


def test_a_line_is_whole_or_absent_where_the_system_writes_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                  ) -> None:
    """As a quota does: some bytes are taken, the rest is not."""
    path = tmp_path / "lines.jsonl"
    append_line(path, "first")
    real = Path.open

    def partly(self: Path, *args: Any, **kwargs: Any) -> Any:
        file = real(self, *args, **kwargs)

        class Part:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: Any) -> None:
                file.close()

            tell = staticmethod(file.tell)

            def write(self, data: bytes) -> int:
                return int(file.write(data[:3]))

        return Part()

    monkeypatch.setattr(Path, "open", partly)
    with pytest.raises(OutputError, match=os.strerror(errno.ENOSPC)):
        append_line(path, "second")
    monkeypatch.undo()
    assert path.read_text() == "first\n"


def test_a_replaced_file_keeps_its_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "manifest.json"
    write_whole(path, b"old")

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutputError, match=rf"\({bytes_on_disk([3], path):,} bytes are needed, [\d,]+ are free"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_errors_of_the_system_from_libraries_in_rust(tmp_path: Path, fixture_tokenizer: Any) -> None:
    """C2: tokenizers raises a bare `Exception`, safetensors a class of its own."""
    from safetensors.torch import save_file

    writers: tuple[Callable[[Path], None], ...] = (
        lambda path: save_file({"a": torch.zeros(3)}, path),
        lambda path: fixture_tokenizer.backend_tokenizer.save(str(path)))
    for save_to in writers:
        with pytest.raises(FileNotFoundError), system_errors():
            save_to(tmp_path / "not" / "there")
    for passes in (ZeroDivisionError(), OutputError("x: cannot be read: gone (os error 2)")):
        with pytest.raises(type(passes)) as error, system_errors():
            raise passes
        assert error.value is passes
