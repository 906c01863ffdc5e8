"""The store of a teacher's likeliest tokens: what is written is read, and nothing else ever is."""

import shutil
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from tropism.cli.app import main
from tropism.errors import OutputError, ReferenceMismatchError
from tropism.train.frozen.score_store import ScoreStore, clean, entries
from tropism.train.frozen.topk_store import TopkEntry, TopKStore, bytes_per_token

NAME = "0123456789abcdef" * 2
K = 3


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def entry(number: int, tokens: int | None = None, k: int = K, dtype: Any = np.float32,
          vocabulary: int = 50) -> TopkEntry:
    """What a teacher might say of a completion: `k` distinct tokens by falling probability, and the rest."""
    generator = np.random.default_rng(number)
    logits = generator.normal(size=(tokens or 1 + number % 4, vocabulary))
    logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = np.argsort(-logps)[:, :k]
    kept = np.take_along_axis(logps, ids, -1)
    return ids, kept.astype(dtype), np.log(1 - np.exp(kept).sum(-1)).astype(dtype)


def store_at(root: Path, name: str = NAME) -> TopKStore:
    store = TopKStore(root, name, {"model": "some/teacher", "precision": "fp32", "layout": "tree",
                                   "holds": "top 3 at temperature 2"})
    store.open()
    return store


def filled(root: Path, numbers: range = range(8)) -> Path:
    """A store of one file; that file."""
    store_at(root).add({key(n): entry(n) for n in numbers}, 50)
    file, = (root / NAME).glob("*.safetensors")
    return file


def assert_holds(store: TopKStore, numbers: range, **how: Any) -> None:
    for number in numbers:
        for read, written in zip(store.read(key(number)), entry(number, **how), strict=True):
            np.testing.assert_array_equal(read, written)


# --- what is written is read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "vocabulary"), [(np.float32, 50), (np.float64, 50), (np.float32, 70_000)])
def test_round_trip(tmp_path: Path, dtype: Any, vocabulary: int) -> None:
    """R4: bit by bit, in the precision of the run, whatever the vocabulary; over several files, one at a time."""
    how = {"dtype": dtype, "vocabulary": vocabulary}
    store = store_at(tmp_path)
    for numbers in (range(5), range(5, 9)):
        store.add({key(n): entry(n, **how) for n in numbers}, vocabulary)
    store.add({}, vocabulary)
    again = store_at(tmp_path)
    assert len(again) == 9
    assert key(8) in again
    assert key(9) not in again
    assert_holds(again, range(9), **how)
    assert all(part.dtype == dtype for part in again.read(key(3))[1:])
    assert len(list((tmp_path / NAME).glob("*.safetensors"))) == 2
    assert not list((tmp_path / NAME).glob(".*"))


def test_largest_ids(tmp_path: Path) -> None:
    """L4: ids at the edge of the narrow type, and beyond it."""
    for vocabulary in (2**16, 2**16 + 1):
        ids = np.array([[vocabulary - 1, 0, 2**15]])
        one = (ids, *entry(0, tokens=1)[1:])
        store = store_at(tmp_path, f"{vocabulary:032x}")
        store.add({key(0): one}, vocabulary)
        store.open()
        np.testing.assert_array_equal(store.read(key(0))[0], ids)


@pytest.mark.parametrize(("vocabulary", "k", "dtype", "per_token"), [
    (50_000, 16, np.float32, 16 * 6 + 4), (150_000, 16, np.float32, 16 * 8 + 4), (102, 4, np.float64, 4 * 10 + 8)])
def test_the_estimate_is_what_it_takes(tmp_path: Path, vocabulary: int, k: int, dtype: Any, per_token: int) -> None:
    """R4: bytes per token as they are announced before the pass, less the keys and the header of a file."""
    assert bytes_per_token(k, vocabulary, np.dtype(dtype).itemsize) == per_token
    tokens = 400
    store = store_at(tmp_path)
    store.add({key(n): entry(n, tokens, k, dtype, 64) for n in range(4)}, vocabulary)
    file, = store.path.glob("*.safetensors")
    assert 0 <= file.stat().st_size - 4 * tokens * per_token < 1024


def test_an_opened_store_stays_on_the_disk(tmp_path: Path) -> None:
    """O1: neither opening nor reading keeps more than what is asked for in memory."""
    whole = entry(1, tokens=20_000, k=40, vocabulary=64)
    store_at(tmp_path).add({key(n): whole for n in range(3)}, 64)
    file, = (tmp_path / NAME).glob("*.safetensors")
    size = file.stat().st_size
    assert size > 10 * 2**20
    tracemalloc.start()
    try:
        store = store_at(tmp_path)
        held_open = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        read = store.read(key(2))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(read[1], whole[1])
    assert held_open < size / 20
    assert peak < size * 0.8  # a third, with what turning bytes into an array takes for a moment


def test_equal_entries_are_one_file(tmp_path: Path) -> None:
    """R4: a file is named after its content, so writing it twice changes nothing."""
    assert filled(tmp_path) == filled(tmp_path)
    assert len(store_at(tmp_path)) == 8


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0.0, 0.002, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_a_flipped_byte_is_noticed(tmp_path: Path, place: float) -> None:
    """R4: in the length of the header, the header, the keys, the ids or the log-probs."""
    file = filled(tmp_path)
    store_at(tmp_path).add({key(9): entry(9)}, 50)
    content = bytearray(file.read_bytes())
    content[round(place * (len(content) - 1))] ^= 1
    file.write_bytes(bytes(content))
    store = store_at(tmp_path)
    assert store.damaged == [file]
    assert key(0) not in store
    assert_holds(store, range(9, 10))


@pytest.mark.parametrize("keep", [0.0, 0.05, 0.5, 0.999])
def test_a_cut_file_is_noticed(tmp_path: Path, keep: float) -> None:
    """R4: as a full disk or a broken copy leaves it."""
    file = filled(tmp_path)
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content))])
    store = store_at(tmp_path)
    assert store.damaged == [file]
    assert len(store) == 0


def test_a_repaired_file_stays_listed(tmp_path: Path) -> None:
    """R4: the same content has the same name, so repair replaces the damaged file; that it was damaged is still
    there to be said."""
    file = filled(tmp_path)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    store = store_at(tmp_path)
    store.add({key(n): entry(n) for n in range(8)}, 50)
    store.open()
    assert store.damaged == [file]
    assert_holds(store, range(8))
    assert store_at(tmp_path).damaged == []


def test_a_renamed_file_is_damaged(tmp_path: Path) -> None:
    """R4: a name that is not the hash of the content vouches for nothing."""
    file = filled(tmp_path)
    other = file.rename(file.with_stem("f" * 32))
    assert store_at(tmp_path).damaged == [other]


def _cut_short(ids: Any, logps: Any, tail: Any) -> TopkEntry:
    return ids, logps, np.full_like(tail, -50.0)


def _renormalized(ids: Any, logps: Any, tail: Any) -> TopkEntry:
    return ids, logps - np.log(np.exp(logps).sum(-1, keepdims=True)), tail


def _of_logits(ids: Any, logps: Any, tail: Any) -> TopkEntry:
    return ids, logps + 1.0, tail


def _not_a_number(ids: Any, logps: Any, tail: Any) -> TopkEntry:
    return ids, logps, np.where(np.arange(len(tail)) == 0, np.nan, tail).astype(tail.dtype)


@pytest.mark.parametrize("spoil", [_cut_short, _renormalized, _of_logits, _not_a_number])
def test_what_no_teacher_says_stops_the_run(tmp_path: Path, spoil: Callable[..., TopkEntry]) -> None:
    """R4, L4: an intact file of probabilities that do not add up to 1 is an error, with the remedy."""
    store_at(tmp_path).add({key(0): entry(0), key(1): spoil(*entry(1))}, 50)
    with pytest.raises(ReferenceMismatchError, match="do not sum to 1") as caught:
        store_at(tmp_path)
    assert f"tropism store clean --store {tmp_path}" in str(caught.value)


def test_a_missing_key_is_an_error(tmp_path: Path) -> None:
    """R4: nothing is made up for a completion that is not there."""
    filled(tmp_path)
    with pytest.raises(ReferenceMismatchError, match="no entry in the teacher's store"):
        store_at(tmp_path).read(key(99))


# --- several writers, and the disk ----------------------------------------------------------------------------------


def test_two_writers_side_by_side(tmp_path: Path) -> None:
    """R4, X1: two runs fill one store while a third reads it: no file is ever seen half-written, none is lost."""
    def write(numbers: range) -> None:
        for number in numbers:
            store_at(tmp_path).add({key(number): entry(number), key(1000): entry(1000)}, 50)

    def read(_: int) -> list[Path]:
        return store_at(tmp_path).damaged

    with ThreadPoolExecutor(3) as pool:
        writers = [pool.submit(write, range(40)), pool.submit(write, range(40, 80))]
        seen = [pool.submit(read, turn).result() for turn in range(10)]
        for writer in writers:
            writer.result()
    assert not any(seen)
    store = store_at(tmp_path)
    assert len(store) == 81
    assert_holds(store, range(80))
    assert_holds(store, range(1000, 1001))
    assert not list(store.path.glob(".*"))


def test_an_opened_store_sees_what_others_wrote(tmp_path: Path) -> None:
    """X1: each rank writes its own files and opens the store again to read all."""
    one, other = store_at(tmp_path), store_at(tmp_path)
    one.add({key(n): entry(n) for n in range(3)}, 50)
    other.add({key(n): entry(n) for n in range(3, 6)}, 50)
    one.open()
    assert_holds(one, range(6))


def test_the_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R4: a full disk in the middle is an error in words, and leaves nothing behind."""
    filled(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    real = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        real(path, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutputError, match="teacher's store cannot be written: No space left on device"):
        store_at(tmp_path).add({key(50): entry(50)}, 50)
    assert sorted(tmp_path.rglob("*")) == before
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(OutputError, match="cannot be written"):
        TopKStore(blocked, NAME, {}).add({key(0): entry(0)}, 50)


def test_space_is_checked_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R4: what it will take, what is free, and what to do; the folder need not exist yet."""
    store = TopKStore(tmp_path / "not" / "yet", NAME, {})
    store.check_space(1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10 * 2**30))
    store.check_space(9 * 2**30)
    with pytest.raises(OutputError) as caught:
        store.check_space(10 * 2**30)
    assert "need 10.0 GiB, but only 10.0 GiB are free" in str(caught.value)
    assert "--top-k" in str(caught.value)
    assert "--store" in str(caught.value)
    assert not (tmp_path / "not").exists()


# --- the command line -----------------------------------------------------------------------------------------------


def test_it_is_listed_and_cleaned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R4: `tropism store list` says what it is, and `clean` removes it, by the beginning of its name or with all."""
    filled(tmp_path)
    ScoreStore(tmp_path, "f" * 32, {"model": "a/reference"}).add({key(1): -1.0})
    assert [(found.path.name, found.scores) for found in entries(tmp_path)] == [(NAME, 8), ("f" * 32, 1)]
    assert main(["store", "list", "--store", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "scores of 2 frozen models" in said
    assert f"{NAME}  8 scores" in said
    assert "some/teacher (fp32, tree, top 3 at temperature 2)" in said
    assert main(["store", "clean", NAME[:6], "--store", str(tmp_path)]) == 0
    assert [found.path.name for found in entries(tmp_path)] == ["f" * 32]
    filled(tmp_path)
    assert clean(tmp_path) == 2
    assert entries(tmp_path) == []


def test_facts_that_are_gone_change_nothing(tmp_path: Path) -> None:
    """R4: without its meta.json a store is still read, listed and cleaned."""
    filled(tmp_path)
    (tmp_path / NAME / "meta.json").unlink()
    assert [found.scores for found in entries(tmp_path)] == [8]
    assert_holds(store_at(tmp_path), range(8))
    assert clean(tmp_path) == 1


def test_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    """R4: what lies on the disk can be read by anybody, as the module says."""
    with safe_open(filled(tmp_path), framework="numpy") as opened:
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    tokens = sum(len(entry(n)[2]) for n in range(8))
    assert shapes == {"keys": (8, 16), "offsets": (9,), "ids": (tokens, K), "logps": (tokens, K), "tail": (tokens,)}
