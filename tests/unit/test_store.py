"""The store as a directory: what it may hold, what is in use, what is removed, and who else can write to it."""

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tropism import store
from tropism.config import METHODS
from tropism.errors import OutputError, UsageError
from tropism.options import size_bytes
from tropism.store import exposure, tidy

ONE, TWO = "1" * 32, "2" * 32
DAY = 86400.0


@pytest.fixture(autouse=True)
def no_leases() -> Iterator[None]:
    yield
    store.release()


def put(root: Path, name: str, size: int, days: float, directory: str = ONE) -> Path:
    """A file of the store that was last used some days ago."""
    path = root / directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (time.time() - days * DAY,) * 2)
    return path


def names(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


# --- the limit --------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_files_are_removed_first(tmp_path: Path) -> None:
    """Scores, teacher's tokens and rendered rows share one limit; a directory goes with its last file."""
    files = [put(tmp_path, "a.npz", 1000, 5), put(tmp_path, "b.safetensors", 1000, 4, TWO),
             put(tmp_path, "c.arrow", 1000, 3, f"rows/{ONE}"), put(tmp_path, "d.npz", 1000, 2),
             put(tmp_path, "e.arrow", 1000, 1, f"rows/{TWO}")]
    put(tmp_path, "meta.json", 0, 9, TWO)
    assert tidy(tmp_path, 5000).files == 0
    found = tidy(tmp_path, 2500)
    assert (found.files, found.size_bytes, found.left_bytes) == (3, 3000, 2000)
    assert [path.exists() for path in files] == [False, False, False, True, True]
    assert not (tmp_path / TWO).exists()
    assert not (tmp_path / "rows" / ONE).exists()
    assert tidy(tmp_path, None).files == 0


def test_what_a_run_uses_is_kept(tmp_path: Path) -> None:
    """Also if the limit is exceeded by that; what it does not use in the same directory is removed."""
    old, other, needed = (put(tmp_path, f"{name}.npz", 1000, 5) for name in "abc")
    late = put(tmp_path, "d.arrow", 1000, 9, f"rows/{ONE}")
    store.use(tmp_path / ONE)
    store.touch(needed)
    found = tidy(tmp_path, 1)
    assert (found.files, found.left_bytes) == (3, 1000)
    assert [path.exists() for path in (old, other, needed, late)] == [False, False, True, False]
    store.release()
    assert names(tmp_path) == [f"{ONE}/c.npz"]
    assert tidy(tmp_path, 1).files == 1


def test_the_lease_of_another_process_counts_until_it_is_silent(tmp_path: Path) -> None:
    """A kill leaves the lease; it counts for ten minutes and is removed later. Its content may be anything."""
    file = put(tmp_path, "a.npz", 1000, 0.5)
    lease = put(tmp_path, ".lease.1.77", 0, 0)
    lease.write_text(str(int((time.time() - DAY) * 1e9)))
    assert tidy(tmp_path, 1).files == 0
    lease.write_text(str(time.time_ns()))
    assert tidy(tmp_path, 10**6).files == 0
    lease.write_text("what")  # it is being written
    assert tidy(tmp_path, 1).files == 0
    lease.write_text("0")
    os.utime(lease, (time.time() - 1200,) * 2)
    assert tidy(tmp_path, 1).files == 1
    assert not file.exists()
    put(tmp_path, "a.npz", 1000, 0.5)
    os.utime(lease, (time.time() - 2 * DAY,) * 2)
    tidy(tmp_path, None)
    assert names(tmp_path) == [f"{ONE}/a.npz"]


def test_leases_end_with_the_process(tmp_path: Path) -> None:
    script = ("import sys; from pathlib import Path; from tropism import store; store.use(Path(sys.argv[1])); "
              "print(len(list(Path(sys.argv[1]).iterdir())))")
    command = [sys.executable, "-c", script, str(tmp_path / ONE)]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert said.stdout == "1\n"
    assert not (tmp_path / ONE).exists()  # nothing is left in it, so it goes too


def test_half_written_files_are_removed(tmp_path: Path) -> None:
    """Those of a process that is gone at once, others after an hour; what a live process writes stays."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    put(tmp_path, f".a.npz.{dead.pid}.5", 9, 0)
    put(tmp_path, f".b.arrow.{os.getpid()}.5", 9, 0.5, f"rows/{ONE}")
    put(tmp_path, f".meta.json.{os.getpid()}.5", 9, 0.5)
    live = put(tmp_path, f".c.safetensors.{os.getpid()}.5", 9, 0)
    mine = put(tmp_path, ".mine.txt.1.5", 9, 99)
    tidy(tmp_path, 10**9)
    assert names(tmp_path) == sorted(str(path.relative_to(tmp_path)) for path in (live, mine))


def test_a_file_that_is_removed_while_it_is_written_is_written_again(tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run may clean the store at any moment."""
    real, calls = Path.replace, 0

    def interrupted(path: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == 1:
            store.remove(path.parent)
        return real(path, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    store.write(tmp_path / ONE / "a.npz", b"content")
    assert (tmp_path / ONE / "a.npz").read_bytes() == b"content"


def test_nothing_outside_is_removed(tmp_path: Path) -> None:
    """Neither through links nor beside the store's own files."""
    outside = tmp_path / "outside"
    kept = [put(tmp_path, name, 1000, 9, "outside") for name in ("a.npz", "meta.json", "b.arrow")]
    root = tmp_path / "store"
    put(root, "a.npz", 1000, 9)
    (root / TWO).symlink_to(outside)
    (root / ONE / "b.npz").symlink_to(kept[0])
    (root / "rows").symlink_to(outside)
    (outside / ONE).mkdir()
    kept.append(put(tmp_path, "c.arrow", 1000, 9, f"outside/{ONE}"))
    notes = put(root, "notes.txt", 10, 9)
    user = put(root, "a.npz", 10, 9, "mine")
    tidy(root, 1)
    for directory in store.directories(root):
        store.remove(directory)
    assert all(path.exists() for path in (*kept, notes, user))
    assert not (root / TWO).exists()


@pytest.mark.parametrize(("text", "count"), [("20GB", 20 * 10**9), ("500MB", 500 * 10**6), ("1.5 kib", 1536), (77, 77),
                                             (0, None), ("0GB", None), ("none", None), ("None", None), (None, None)])
def test_limits(tmp_path: Path, text: object, count: int | None) -> None:
    options = METHODS["sft"](model="m", data="d", output="o", store_limit=text)
    assert options.store_bytes == count
    assert METHODS["sft"](model="m", data="d", output="o").store_bytes == 20 * 10**9
    again = METHODS["sft"](**{name: value for name, value in options.dump().items() if name != "method"})
    assert again.store_bytes == count


@pytest.mark.parametrize("text", ["much", "-1GB", "1e9", "", True, "9" * 400])
def test_what_is_no_limit(text: object) -> None:
    with pytest.raises((UsageError, ValueError), match="not a valid size"):
        METHODS["sft"](model="m", data="d", output="o", store_limit=text)
    with pytest.raises(ValueError, match="not a valid size"):
        size_bytes(str(text))


# --- other users ------------------------------------------------------------------------------------------------------


@pytest.fixture
def private(tmp_path: Path) -> Path:
    root = tmp_path / "home" / "store"
    put(root, "a.npz", 10, 0)
    put(root, "b.arrow", 10, 0, f"rows/{TWO}")
    for path in (tmp_path / "home", *(tmp_path / "home").rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return root


@pytest.mark.parametrize("part", [".", "..", ONE, f"{ONE}/a.npz", "rows", f"rows/{TWO}", f"rows/{TWO}/b.arrow"])
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_a_part_that_others_can_write_is_named(private: Path, part: str, mode: int) -> None:
    """R4: with the command that ends it."""
    assert exposure(private) is None
    path = (private / part).resolve()
    path.chmod(mode)
    said = exposure(private)
    assert said is not None
    assert said.startswith(f"{path}: other users can write to it")
    assert f"chmod {'' if part == '..' else '-R '}go-w {path if part == '..' else private}" in said
    assert "--store" in said


def test_a_sticky_directory_protects_what_lies_in_it(private: Path) -> None:
    """As /tmp does. It does not protect a store that is sticky itself, where others can put files."""
    private.parent.chmod(0o1777)
    assert exposure(private) is None
    private.chmod(0o1777)
    assert str(exposure(private)).startswith(f"{private}: other users can write to it")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("part", [".", "..", ONE, f"{ONE}/a.npz"])
def test_a_part_of_another_user_is_named(private: Path, part: str) -> None:
    path = (private / part).resolve()
    os.chown(path, 4242, 4242)
    assert str(exposure(private)).startswith(f"{path}: belongs to another user, who can ")


def test_a_link_is_as_safe_as_where_it_lies_and_where_it_leads(private: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(private)
    assert exposure(link) is None
    private.parent.chmod(0o777)
    assert exposure(link) is not None


def test_a_store_that_is_not_there_or_no_directory_is_not_exposed(tmp_path: Path) -> None:
    assert exposure(tmp_path / "not" / "yet") is None
    assert tidy(tmp_path / "not" / "yet", 1).left_bytes == 0


@pytest.mark.parametrize(("root_mode", "expected"), [(0o755, 0), (0o775, stat.S_IWGRP), (0o777, 0o022)])
def test_a_new_part_is_as_open_as_the_store(tmp_path: Path, root_mode: int, expected: int) -> None:
    """Whatever the umask: nobody gains access by accident, and who shares a store can add to all of it."""
    for umask in (0o002, 0o022, 0o000):
        root = tmp_path / f"store{umask}"
        before = os.umask(umask)
        try:
            store.make(root)
            assert root.stat().st_mode & 0o022 == 0
            root.chmod(root_mode)
            store.write(root / ONE / "a.npz", b"1")
            store.write(root / "rows" / TWO / "b.arrow", b"1")
        finally:
            os.umask(before)
        for part in (ONE, f"{ONE}/a.npz", "rows", f"rows/{TWO}", f"rows/{TWO}/b.arrow"):
            assert (root / part).stat().st_mode & 0o022 == expected, part


# --- what cannot be written -------------------------------------------------------------------------------------------


def test_an_error_tells_read_only_from_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, read_only in ((30, True), (13, True), (1, True), (28, False), (122, False)):
        def fails(path: Path, data: bytes, number: int = number) -> int:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_bytes", fails)
            with pytest.raises(OutputError) as caught:
                store.write(tmp_path / ONE / "a.npz", b"1")
        assert store.is_read_only(caught.value) is read_only


def test_a_lease_without_the_right_to_write_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store.use(tmp_path / "file" / ONE)
    assert store._leases == {}


@pytest.mark.parametrize(("size", "text"), [(0, "0 KiB"), (2**20 - 2**10, "1,023 KiB"), (2**20, "1.0 MiB"),
                                            (20 * 10**9, "18.6 GiB")])
def test_a_size_is_told_in_a_unit_that_fits(size: int, text: str) -> None:
    assert store.size_text(size) == text
