"""A run directory has one owner; a killed one leaves a lock that is taken over."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tropism.errors import OutputError, OutputLockedError
from tropism.observe import lock
from tropism.observe.lock import Owner, lend, owned
from tropism.observe.rundir import RunDirectory

HOLD = ("import sys, time; from pathlib import Path; from tropism.observe.lock import owned\n"
        "with owned(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)")


@pytest.fixture
def holder(tmp_path: Path) -> Callable[[], subprocess.Popen[str]]:
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start  # type: ignore[misc]
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def write(directory: Path, owner: Owner) -> None:
    (directory / "lock").write_text(json.dumps(asdict(owner)))


def test_a_second_process_is_refused_with_who_and_since_when(
        tmp_path: Path, holder: Callable[[], subprocess.Popen[str]]) -> None:
    process = holder()
    with pytest.raises(OutputLockedError) as error, owned(tmp_path):
        pass
    for part in (f"process {process.pid}", os.uname().nodename, "since 20", "--output"):
        assert part in str(error.value)
    assert error.value.exit_code == 2
    assert json.loads((tmp_path / "lock").read_text())["pid"] == process.pid  # the owner's lock stays


@pytest.mark.parametrize("collected", [True, False])
def test_a_killed_process_leaves_a_lock_that_is_taken_over(
        tmp_path: Path, holder: Callable[[], subprocess.Popen[str]], collected: bool) -> None:
    """kill -9: nothing is released. A process that nobody has waited for yet is gone all the same."""
    process = holder()
    process.send_signal(signal.SIGKILL)
    if collected:
        process.wait()
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    said: list[str] = []
    with owned(tmp_path, said.append):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert len(said) == 1
    assert f"process {process.pid}" in said[0]
    assert "takes over" in said[0]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, None])
def test_it_is_released_whatever_happens(tmp_path: Path, error: type[BaseException] | None) -> None:
    def go() -> None:
        with owned(tmp_path):
            assert (tmp_path / "lock").exists()
            if error is not None:
                raise error

    if error is None:
        go()
    else:
        with pytest.raises(error):
            go()
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_another_process_has_now_is_no_owner(tmp_path: Path) -> None:
    write(tmp_path, replace(Owner.here(), started="1"))
    with owned(tmp_path):
        pass


def test_another_boot_is_no_owner(tmp_path: Path) -> None:
    write(tmp_path, replace(Owner.here(), boot="before the reboot"))
    with owned(tmp_path):
        pass


def test_another_namespace_of_this_machine_is_no_owner_only_when_it_is_silent(tmp_path: Path) -> None:
    """A container that shares the network has this machine's name and boot, and a process of that number is another."""
    write(tmp_path, replace(Owner.here(), pid=2**22 + 1, started="1", namespace="pid:[1]"))
    with pytest.raises(OutputLockedError, match="From here nobody can see whether that process still runs"), \
            owned(tmp_path):
        pass
    os.utime(tmp_path / "lock", (time.time() - 700, time.time() - 700))
    said: list[str] = []
    with owned(tmp_path, said.append):
        pass
    assert "has given no sign of life for 12 minutes" in said[0]
    write(tmp_path, replace(Owner.here(), boot="before the reboot", namespace="pid:[1]"))
    with owned(tmp_path):
        pass


def test_a_live_run_of_another_namespace_keeps_its_lock(tmp_path: Path,
                                                        holder: Callable[[], subprocess.Popen[str]]) -> None:
    """Its number is nobody's there."""
    holder()
    code = ("import sys; from pathlib import Path; from tropism.observe.lock import owned\n"
            "owned(Path(sys.argv[1])).__enter__()")
    other = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code, str(tmp_path)],
                           capture_output=True, text=True)
    if "unshare failed" in other.stderr:
        pytest.skip("no right to make a namespace")
    assert "OutputLockedError" in other.stderr


@pytest.mark.parametrize("alive", [True, False])
def test_a_lock_of_an_earlier_release_is_read(tmp_path: Path, alive: bool) -> None:
    """It names no namespace; what it says of its process counts."""
    content = asdict(Owner.here() if alive else replace(Owner.here(), started="1"))
    del content["namespace"]
    (tmp_path / "lock").write_text(json.dumps(content))
    if alive:
        with pytest.raises(OutputLockedError, match=f"is in use by process {os.getpid()}"), owned(tmp_path):
            pass
    else:
        with owned(tmp_path):
            pass


def test_another_host_is_refused_with_the_file_to_remove(tmp_path: Path) -> None:
    """Also if a process of that number does not exist here."""
    write(tmp_path, replace(Owner.here(), host="elsewhere", pid=2**22 + 1, boot="theirs"))
    with pytest.raises(OutputLockedError) as error, owned(tmp_path):
        pass
    assert f"remove {tmp_path / 'lock'}" in str(error.value)
    assert "on elsewhere" in str(error.value)
    (tmp_path / "lock").unlink()
    with owned(tmp_path):
        pass


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"pid": 1}'])
def test_a_lock_of_nobody_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.05)
    (tmp_path / "lock").write_text(content)
    with pytest.raises(OutputLockedError, match="does not say whose"), owned(tmp_path):
        pass


def test_the_same_process_twice(tmp_path: Path) -> None:
    with owned(tmp_path), pytest.raises(OutputLockedError), owned(tmp_path):
        pass
    assert not (tmp_path / "lock").exists()


def test_a_writer_that_outlives_the_block_keeps_the_lock(tmp_path: Path) -> None:
    """Other processes are refused until it ends; this one waits for it."""
    held = threading.Event()
    writer = threading.Thread(target=held.wait, daemon=True)
    with suppress(KeyboardInterrupt), owned(tmp_path):
        lend(tmp_path, writer)
        writer.start()
        raise KeyboardInterrupt
    code = ("import sys; from pathlib import Path; from tropism.observe.lock import owned\n"
            "owned(Path(sys.argv[1])).__enter__()")
    other = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert "OutputLockedError" in other.stderr
    threading.Timer(0.2, held.set).start()
    with owned(tmp_path):
        assert not writer.is_alive()
        assert (tmp_path / "lock").is_file()
    assert not (tmp_path / "lock").exists()


def test_a_writer_in_the_directory_of_another_process_is_not_kept(tmp_path: Path) -> None:
    """X1: ranks other than the main one write their parts of a checkpoint, and own nothing."""
    lend(tmp_path, threading.Thread())
    assert tmp_path.resolve() not in lock._writers


@pytest.mark.parametrize(("call", "done"), [("open", True), ("fsync", True), ("link", False), ("link", True)])
def test_a_process_killed_while_it_makes_the_lock_keeps_nobody_out(tmp_path: Path, call: str, done: bool) -> None:
    """C1: at no moment is there a lock that does not say whose it is; what else is left is tidied up by a run."""
    code = ("import os, signal, sys; from pathlib import Path; from tropism.observe.lock import owned\n"
            "call, done = sys.argv[2:]; real = getattr(os, call)\n"
            "def killed(*args):\n    done and real(*args); os.kill(os.getpid(), signal.SIGKILL)\n"
            "setattr(os, call, killed); owned(Path(sys.argv[1])).__enter__()")
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path), call, "done" * done], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir())
    RunDirectory(tmp_path).refuse_if_used()
    with owned(tmp_path):
        RunDirectory(tmp_path).create()
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_disk_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is made all the same, by one process only."""
    def link(*_: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    with owned(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
        with pytest.raises(OutputLockedError, match="is in use by"), owned(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []


def test_others_between_a_look_and_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tidies up what is not linked yet, the next is faster; of our own link the first answer was lost."""
    real, calls = os.link, []

    def link(temporary: Path, path: Path) -> None:
        calls.append(path)
        if len(calls) == 1:
            temporary.unlink()
        elif len(calls) == 2:
            write(tmp_path, replace(Owner.here(), started="1"))
        else:
            real(temporary, path)
        real(temporary, path)

    monkeypatch.setattr(os, "link", link)
    said: list[str] = []
    with owned(tmp_path, said.append):
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    assert (len(calls), len(said)) == (3, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_never_began_holds_nothing(tmp_path: Path) -> None:
    with suppress(KeyboardInterrupt), owned(tmp_path):
        lend(tmp_path, threading.Thread(target=lambda: None, daemon=True))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_one_of_many_takes_a_lock_over(tmp_path: Path) -> None:
    """Six processes find the lock of one that is gone at the same moment; one gets it."""
    write(tmp_path, replace(Owner.here(), started="1"))
    code = ("import sys; from pathlib import Path; from tropism.observe.lock import owned\n"
            "from tropism.errors import OutputLockedError\n"
            "print('ready', flush=True); sys.stdin.readline()\n"
            "try:\n    with owned(Path(sys.argv[1])):\n        print('got it', flush=True); sys.stdin.readline()\n"
            "except OutputLockedError:\n    print('refused', flush=True)")
    processes = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, text=True) for _ in range(6)]
    heard = []
    for word in ("ready", ""):
        heard = [process.stdout.readline().strip() for process in processes]  # type: ignore[union-attr]
        assert not word or set(heard) == {word}
        for process in processes:
            if process.poll() is None:
                with suppress(BrokenPipeError):
                    process.stdin.write("\n")  # type: ignore[union-attr]
                    process.stdin.flush()  # type: ignore[union-attr]
    for process in processes:
        process.communicate()
    assert sorted(heard) == ["got it"] + ["refused"] * 5


def test_a_directory_that_vanishes_or_cannot_be_written(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with pytest.raises(OutputError, match="cannot be written"), owned(gone):
        pass
    gone.mkdir()
    with owned(gone):
        (gone / "lock").unlink()
        gone.rmdir()


def test_a_lock_that_nobody_touches_on_another_host_is_taken_over(tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner would have touched it every minute; after ten of silence it is gone, and that is said."""
    write(tmp_path, replace(Owner.here(), host="elsewhere"))
    os.utime(tmp_path / "lock", (time.time() - 500, time.time() - 500))
    with pytest.raises(OutputLockedError, match="or wait: 10 minutes after its last sign of life"), owned(tmp_path):
        pass
    os.utime(tmp_path / "lock", (time.time() - 700, time.time() - 700))
    said: list[str] = []
    with owned(tmp_path, said.append):
        assert json.loads((tmp_path / "lock").read_text())["host"] == os.uname().nodename
    assert len(said) == 1
    assert "has given no sign of life for 12 minutes; this run takes over" in said[0]


def test_silence_is_no_end_where_it_can_be_seen_that_the_owner_lives(
        tmp_path: Path, holder: Callable[[], subprocess.Popen[str]]) -> None:
    holder()
    os.utime(tmp_path / "lock", (0, 0))
    with pytest.raises(OutputLockedError, match="is in use by"), owned(tmp_path):
        pass


def test_an_owner_touches_its_lock_and_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where it is taken over between a look and the touch, because we stood still."""
    path, real, looks, take_over = tmp_path / "lock", lock._owner_in, threading.Semaphore(0), threading.Event()

    def look(content: bytes) -> Owner | None:
        found = real(content)
        if threading.current_thread().name == "lock":
            if take_over.is_set():
                take_over.clear()
                path.unlink()
                write(tmp_path, replace(Owner.here(), host="elsewhere"))
                os.utime(path, (0, 0))
            looks.release()
        return found

    def wait_for_looks(count: int) -> None:
        while looks.acquire(blocking=False):
            pass
        for _ in range(count):
            assert looks.acquire(timeout=30)

    monkeypatch.setattr(lock, "_BEAT_S", 0.01)
    monkeypatch.setattr(lock, "_owner_in", look)
    with owned(tmp_path):
        os.utime(path, (0, 0))
        wait_for_looks(2)
        assert time.time() - path.stat().st_mtime < 60
        take_over.set()
        wait_for_looks(4)  # one before it, that of the take-over, and two later ones
        assert real(path.read_bytes()).host == "elsewhere"  # type: ignore[union-attr]
        assert path.stat().st_mtime == 0
    assert path.exists()


def test_a_process_that_leaves_its_writer_behind_leaves_no_lock(tmp_path: Path) -> None:
    """C1: after a second interrupt the command ends, and a daemon that writes ends with it."""
    code = ("import sys, threading; from pathlib import Path; from tropism.observe.lock import lend, owned\n"
            "with owned(Path(sys.argv[1])):\n"
            "    writer = threading.Thread(target=threading.Event().wait, daemon=True); writer.start()\n"
            "    lend(Path(sys.argv[1]), writer); raise KeyboardInterrupt")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=False)
    assert list(tmp_path.iterdir()) == []
