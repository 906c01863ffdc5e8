"""Files of the store that are damaged, from elsewhere, or made to harm: they are computed again, and never followed."""

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from tropism.cli.app import main
from tropism.errors import ReferenceMismatchError
from tropism.train.frozen import score_store
from tropism.train.frozen.score_store import ScoreStore, clean, entries
from tropism.train.frozen.topk_store import TopKStore
from tropism.train.frozen.topk_store import _checksum as topk_checksum

ONE, TWO = "1" * 32, "2" * 32
SCORES = {bytes([n] * 16): -1.0 - n for n in range(5)}
LIKELIEST = {bytes([n] * 16): (np.array([[3, 4]]), np.log([[0.5, 0.25]]), np.log([0.25])) for n in range(3)}


def scores_at(root: Path, name: str = ONE) -> Path:
    ScoreStore(root, name, {"model": "m"}).add(SCORES)
    file, = (root / name).glob("*.npz")
    return file


def tokens_at(root: Path, name: str = TWO) -> Path:
    TopKStore(root, name, {"model": "t"}).add(LIKELIEST, 50)
    file, = (root / name).glob("*.safetensors")
    return file


def load(root: Path, name: str = ONE) -> tuple[dict[bytes, float], list[Path]]:
    store = ScoreStore(root, name, {})
    return store.load(), store.damaged


# --- files from elsewhere ---------------------------------------------------------------------------------------------


def test_scores_of_another_model_are_not_taken(tmp_path: Path) -> None:
    """R4: the name of a file covers the fingerprint, so a copy from another directory is damaged."""
    for file, opened in ((scores_at(tmp_path), ScoreStore(tmp_path, "3" * 32, {})),
                         (tokens_at(tmp_path), TopKStore(tmp_path, "4" * 32, {}))):
        copy = opened.path / file.name
        copy.parent.mkdir()
        copy.write_bytes(file.read_bytes())
        found = opened.load() if isinstance(opened, ScoreStore) else opened.open()
        assert not found
        assert opened.damaged == [copy]
        opened.discard_damaged()
        assert not copy.exists()
    assert load(tmp_path)[0] == SCORES


def test_a_file_of_an_earlier_version_is_computed_again(tmp_path: Path) -> None:
    """Its name was a hash of its content alone."""
    file = scores_at(tmp_path)
    with np.load(file) as content:
        old = score_store._checksum("", content["keys"], content["logps"])
    old_file = file.rename(file.with_stem(old))
    store = ScoreStore(tmp_path, ONE, {})
    assert store.load() == {}
    assert store.damaged == [old_file]
    store.add(SCORES)
    store.discard_damaged()
    assert load(tmp_path) == (SCORES, [])


def test_only_what_is_needed_is_loaded_and_counts_as_used(tmp_path: Path) -> None:
    store = ScoreStore(tmp_path, ONE, {})
    for part in ({b"a" * 16: -1.0}, {b"b" * 16: -2.0}):
        store.add(part)
    for file in store.path.glob("*.npz"):
        os.utime(file, (0, 0))
    assert store.load({b"a" * 16}) == {b"a" * 16: -1.0}
    assert [store.file_of(key * 16).stat().st_mtime > 0 for key in (b"a", b"b")] == [True, False]


def test_files_that_another_run_removes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no damage. What is open can still be read, and the rest is computed again."""
    file, tokens = scores_at(tmp_path), tokens_at(tmp_path)
    opened = TopKStore(tmp_path, TWO, {})
    opened.open()
    real = score_store._read

    def late(path: Path) -> Any:
        path.unlink()
        return real(path)

    monkeypatch.setattr(score_store, "_read", late)
    assert load(tmp_path) == ({}, [])
    assert not file.exists()
    tokens.unlink()
    opened.open()
    opened.mark(LIKELIEST)
    np.testing.assert_array_equal(opened.read(next(iter(LIKELIEST)))[0], [[3, 4]])
    assert opened.damaged == []


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-5])
def test_a_certain_completion_has_a_log_prob_of_zero(tmp_path: Path, value: float) -> None:
    """R4: up to rounding."""
    ScoreStore(tmp_path, ONE, {}).add({b"k" * 16: value})
    assert load(tmp_path)[0] == {b"k" * 16: value}


# --- arrays that are none ---------------------------------------------------------------------------------------------


def npz(keys: Any, logps: Any, compression: int = zipfile.ZIP_STORED) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression) as archive:
        for name, array in (("keys", keys), ("logps", logps)):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(array), allow_pickle=True)
    return content.getvalue()


KEYS = np.zeros((2, 16), np.uint8)


@pytest.mark.parametrize(("keys", "logps"), [
    (KEYS, np.zeros((2, 3))), (KEYS, -np.ones(3)), (KEYS, np.array(-1.0)), (np.zeros((2, 8), np.uint8), -np.ones(2)),
    (np.zeros(16, np.uint8), -np.ones(16)), (KEYS, -np.ones(2, np.float32)), (KEYS, np.array(["a", "b"])),
    (KEYS.astype(np.complex128), -np.ones(2)), (KEYS, -np.ones(2, np.complex128)), (KEYS, np.array([None, 1], object))])
def test_other_arrays_under_a_right_name(tmp_path: Path, keys: Any, logps: Any) -> None:
    """Anybody can compute the name of a file."""
    file = tmp_path / ONE / f"{score_store._checksum(ONE, keys, logps)}.npz"
    file.parent.mkdir()
    file.write_bytes(npz(keys, logps))
    assert load(tmp_path) == ({}, [file])
    assert [found.scores for found in entries(tmp_path)] == [0]


def test_a_bomb_is_not_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """80 MB of zeros in 80 kB: whatever is compressed is not the store's."""
    keys, logps = np.zeros((2, 16), np.uint8), np.zeros(10_000_000)
    file = tmp_path / ONE / f"{score_store._checksum(ONE, keys, logps)}.npz"
    file.parent.mkdir()
    file.write_bytes(npz(keys, logps, zipfile.ZIP_DEFLATED))
    assert file.stat().st_size < 10**6
    monkeypatch.setattr(np, "load", lambda *args, **how: pytest.fail("read"))
    assert load(tmp_path) == ({}, [file])


@pytest.mark.parametrize("shape", ["(1000000000000000, 16)", "(2, 16)" + " " * 5000, "(" * 3000, "(-1, 16)", "2**99"])
def test_a_header_that_promises_more_than_there_is(tmp_path: Path, shape: str) -> None:
    content = io.BytesIO()
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}\n".encode("latin1")
    with zipfile.ZipFile(content, "w") as archive:
        for name in ("keys", "logps"):
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    file = tmp_path / ONE / f"{ONE}.npz"
    file.parent.mkdir()
    file.write_bytes(content.getvalue())
    assert load(tmp_path) == ({}, [file])


def changed(**parts: Any) -> dict[str, Any]:
    whole = {"keys": np.arange(32, dtype=np.uint8).reshape(2, 16), "offsets": np.array([0, 1, 2]),
             "ids": np.array([[3, 4], [5, 6]], np.uint16), "logps": np.log([[0.5, 0.25]] * 2),
             "tail": np.log([0.25] * 2)}
    return {**whole, **parts}


@pytest.mark.parametrize("arrays", [
    changed(offsets=np.array([0, 1])), changed(offsets=np.array([0, 2, 1])), changed(offsets=np.array([0, 1, 900])),
    changed(offsets=np.array([-1, 1, 2])), changed(offsets=np.array([0.0, 1.0, 2.0])), changed(tail=np.log([0.25])),
    changed(keys=np.zeros((2, 8), np.uint8)), changed(ids=np.array([3, 4], np.uint16)),
    changed(ids=np.array([[3.0, 4.0]] * 2)), changed(logps=np.zeros((2, 2), np.int64))])
def test_other_teacher_arrays_under_a_right_name(tmp_path: Path, arrays: dict[str, Any]) -> None:
    file = tmp_path / TWO / f"{topk_checksum(TWO, arrays)}.safetensors"
    file.parent.mkdir()
    file.write_bytes(save(arrays))
    store = TopKStore(tmp_path, TWO, {}, 2, 50)
    store.open()
    assert store.damaged == [file]
    assert len(store) == 0


@pytest.mark.parametrize(("arrays", "match"), [
    (changed(ids=np.array([[3, 50], [5, 6]])), "token ids outside of the vocabulary"),
    (changed(ids=np.array([[3, -1], [5, 6]])), "token ids outside of the vocabulary"),
    (changed(ids=np.array([[3]] * 2), logps=np.log([[0.75]] * 2)), "1 tokens instead of 2")])
def test_teacher_tokens_that_no_run_writes(tmp_path: Path, arrays: dict[str, Any], match: str) -> None:
    file = tmp_path / TWO / f"{topk_checksum(TWO, arrays)}.safetensors"
    file.parent.mkdir()
    file.write_bytes(save(arrays))
    with pytest.raises(ReferenceMismatchError, match=match):
        TopKStore(tmp_path, TWO, {}, 2, 50).open()


def test_a_header_of_safetensors_that_promises_more_than_there_is(tmp_path: Path) -> None:
    file = tmp_path / TWO / f"{TWO}.safetensors"
    file.parent.mkdir()
    for content in ((2**63).to_bytes(8, "little"), (90 * 2**20).to_bytes(8, "little") + b"{", b"\xff" * 100,
                    (100_000).to_bytes(8, "little") + b'{"a":' * 20_000):
        file.write_bytes(content)
        store = TopKStore(tmp_path, TWO, {})
        store.open()
        assert store.damaged == [file]


# --- what is no file --------------------------------------------------------------------------------------------------


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_directory(path: Path) -> None:
    path.mkdir()


def a_loop(path: Path) -> None:
    path.symlink_to(path)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_link_to_nowhere(path: Path) -> None:
    path.symlink_to(path / "nowhere")


@pytest.mark.parametrize("make", [a_pipe, a_directory, a_loop, a_device, a_link_to_nowhere])
def test_what_is_no_file_is_passed_by(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """Reading, listing, and cleaning neither wait nor stop; the true files serve."""
    scores_at(tmp_path)
    tokens_at(tmp_path)
    make(tmp_path / ONE / ("a" * 32 + ".npz"))
    make(tmp_path / TWO / ("a" * 32 + ".safetensors"))
    (tmp_path / ONE / "meta.json").unlink()
    make(tmp_path / ONE / "meta.json")
    found, damaged = load(tmp_path)
    assert found == SCORES
    assert damaged == [tmp_path / ONE / ("a" * 32 + ".npz")]
    store = TopKStore(tmp_path, TWO, {})
    store.open()
    assert len(store) == 3
    assert [(model.scores, model.meta) for model in entries(tmp_path)] == [(5, {}), (3, {"model": "t"})]
    assert main(["store", "list", "--store", str(tmp_path)]) == 0
    assert clean(tmp_path) == 2
    assert entries(tmp_path) == []


def test_clean_follows_no_link(tmp_path: Path) -> None:
    """Neither as a file, nor as a directory of scores or rows, nor as `rows` itself; a user's own `rows` stays."""
    root, outside = tmp_path / "store", tmp_path / "outside"
    kept = [scores_at(outside), tokens_at(outside)]
    scores_at(root)
    (root / ONE / "b.npz").symlink_to(kept[0])
    (root / TWO).symlink_to(outside / TWO)
    (root / "rows").symlink_to(outside)
    assert main(["store", "clean", "--store", str(root)]) == 0
    assert all(path.is_file() for path in kept)
    assert not (root / TWO).exists()
    (root / "rows").unlink()
    (root / "rows").mkdir()
    (root / "rows" / "mine.arrow").write_text("rows of the user")
    assert main(["store", "clean", "--store", str(root)]) == 0
    assert (root / "rows" / "mine.arrow").exists()


@pytest.mark.parametrize("content", [
    b"", b"\xff\xfe\x00", b"null", b"[]", b"7", b'"text"', b"[" * 100_000, b'{"a":' * 100_000, b"{" + b" " * 10**6,
    b'{"model": 7, "precision": ["fp32"], "layout": {"a": 1}, "holds": null}', b'{"model": "m"'])
def test_a_damaged_description_is_no_reason_to_stop(tmp_path: Path, content: bytes,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    scores_at(tmp_path)
    (tmp_path / ONE / "meta.json").write_bytes(content)
    assert load(tmp_path) == (SCORES, [])
    assert main(["store", "list", "--store", str(tmp_path)]) == 0
    assert f"{ONE}  5 scores" in capsys.readouterr().out
    assert main(["store", "clean", ONE[:4], "--store", str(tmp_path)]) == 0


def test_a_description_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is text from others."""
    scores_at(tmp_path)
    (tmp_path / ONE / "meta.json").write_text(json.dumps({
        "model": "\x1b]0;title\x07\x1b[2J[red]m[/red]\r\n  fake line" + "x" * 5000, "precision": "fp\x9b31m32"}))
    assert main(["store", "list", "--store", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(said)
    assert "[red]m[/red]" in said
    assert said.count("\n") == 2
    assert len(said) < 1000


def test_the_last_use_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores_at(tmp_path)
    for path in (tmp_path / ONE).iterdir():
        os.utime(path, (1_000_000_000, 1_000_000_000))
    main(["store", "list", "--store", str(tmp_path)])
    assert "last used 2001-09-0" in capsys.readouterr().out
    os.utime(tmp_path / ONE / "meta.json", (2**45, 2**45))
    assert main(["store", "list", "--store", str(tmp_path)]) == 0
