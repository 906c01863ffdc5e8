"""A run directory has one owner; a killed one leaves a lock that is taken over."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock, SoftFileLease

from tropism.errors import OutputError, OutputLockedError
from tropism.observe import lock
from tropism.observe.lock import lend, owned
from tropism.observe.rundir import RunDirectory

DEAD = "1"  # a start that no process of today has
HOLD = ("import sys, time; from pathlib import Path; from tropism.observe.lock import owned\n"
        "with owned(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)")


@pytest.fixture(autouse=True)
def short_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_WATCH_S", 0.05)


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


TAKE = ("import sys; from pathlib import Path; from tropism.observe.lock import owned\n"
        "owned(Path(sys.argv[1])).__enter__()")


def write(directory: Path, **changes: str) -> None:
    """A lock of this process with some lines changed."""
    with owned(directory):
        text = (directory / "lock").read_text()
    for name, value in changes.items():
        text, count = re.subn(f"(?m)^{name}=.*$", f"{name}={value}", text)
        assert count == 1
    (directory / "lock").write_text(text)


def said_by(directory: Path) -> dict[str, str]:
    """The lines of a lock."""
    return dict(line.split("=", 1) for line in (directory / "lock").read_text().splitlines()[1:])


def be_silent(directory: Path, seconds: float) -> None:
    """Let the last heartbeat of a lock be some time ago."""
    then = time.time() - seconds
    os.utime(directory / "lock", (then, then))


def test_a_second_process_is_refused_with_who_and_since_when(
        tmp_path: Path, holder: Callable[[], subprocess.Popen[str]]) -> None:
    process = holder()
    with pytest.raises(OutputLockedError) as error, owned(tmp_path):
        pass
    for part in (f"process {process.pid}", os.uname().nodename, "since 20", "--output"):
        assert part in str(error.value)
    assert error.value.exit_code == 2
    assert said_by(tmp_path)["pid"] == str(process.pid)  # the owner's lock stays


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
        assert said_by(tmp_path)["pid"] == str(os.getpid())
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
    write(tmp_path, start=DEAD)
    with owned(tmp_path):
        pass


def test_a_lock_of_another_boot_is_kept_until_it_is_silent(tmp_path: Path) -> None:
    """It may be of this machine before a reboot, or of a live one of the same name: nothing here tells them apart."""
    write(tmp_path, boot="another")
    for silent_s in (0, 590):  # this machine may have been booted in between
        be_silent(tmp_path, silent_s)
        with pytest.raises(OutputLockedError, match="This machine cannot tell whether"), owned(tmp_path):
            pass
    be_silent(tmp_path, 610)
    with owned(tmp_path):
        pass


def test_another_namespace_of_this_machine_is_respected_until_it_is_silent(tmp_path: Path) -> None:
    """A container that shares the network has this machine's name and boot, and its process numbers are its own. One
    that is started again has its old name too."""
    write(tmp_path, pid=str(2**22 + 1), namespace="pid:[1]")
    with pytest.raises(OutputLockedError, match="This machine cannot tell whether that process is still"), \
            owned(tmp_path):
        pass
    be_silent(tmp_path, 700)
    said: list[str] = []
    with owned(tmp_path, said.append):
        pass
    assert "no heartbeat for 12 minutes" in said[0]


def test_a_live_run_of_another_namespace_keeps_its_lock(tmp_path: Path,
                                                        holder: Callable[[], subprocess.Popen[str]]) -> None:
    """Its process number is not in use there."""
    holder()
    other = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", TAKE, str(tmp_path)],
                           capture_output=True, text=True)
    if "unshare failed" in other.stderr:
        pytest.skip("no right to make a namespace")
    assert "OutputLockedError" in other.stderr


def test_another_host_is_refused_with_the_file_to_remove(tmp_path: Path) -> None:
    """Also if a process of that number does not exist here."""
    write(tmp_path, host="elsewhere", pid=str(2**22 + 1), boot="theirs")
    with pytest.raises(OutputLockedError) as error, owned(tmp_path):
        pass
    assert f"delete {tmp_path / 'lock'}" in str(error.value)
    assert "on elsewhere" in str(error.value)
    (tmp_path / "lock").unlink()
    with owned(tmp_path):
        pass


@pytest.mark.parametrize("content", ["", "{", '{"pid": 1, "host": "an earlier release"}', "17\nsomewhere\n",
                                     "filelock/2\npid=17\nhost=somewhere\nmode=exclusive\n", "x" * 5000])
def test_a_file_that_names_no_owner_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    """Also if nobody has written to it for long."""
    (tmp_path / "lock").write_text(content)
    be_silent(tmp_path, 7000)
    for _ in range(2):
        with pytest.raises(OutputLockedError, match="does not name an owner"), owned(tmp_path):
            pass
    assert (tmp_path / "lock").read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_long_command_is_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """filelock reads no more than 1024 bytes of a lock."""
    monkeypatch.setattr(sys, "argv", ["tropism", "a\nb", "\udcff", *["\u8a9e" * 100] * 10])
    with owned(tmp_path):
        assert (tmp_path / "lock").stat().st_size <= 1024
        with pytest.raises(OutputLockedError, match=r"\(tropism 'a b' .*\u8a9e{50}"), owned(tmp_path):
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
    other = subprocess.run([sys.executable, "-c", TAKE, str(tmp_path)], capture_output=True, text=True)
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


KILLED = """
import os, signal, sys
from pathlib import Path
from tropism.observe.lock import owned
left, after = int(sys.argv[2]), sys.argv[3] == "after"
def killing(real):
    def call(*args, **options):
        global left
        left -= 1
        if left < 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **options)
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return call
for name in ("open", "write", "unlink"):
    setattr(os, name, killing(getattr(os, name)))
Path.open, Path.touch = killing(Path.open), killing(Path.touch)
owned(Path(sys.argv[1])).__enter__()
os._exit(0)
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_killed_while_it_takes_the_lock_keeps_nobody_out(tmp_path: Path, when: str) -> None:
    """C1: at any call of the system, with a lock there whose owner is gone. The next run leaves nothing of it."""
    for number in range(100):
        write(tmp_path, start=DEAD)
        killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(number), when], check=False)
        if killed.returncode == 0:
            break
        assert killed.returncode == -signal.SIGKILL
        RunDirectory(tmp_path).refuse_if_used()
        with owned(tmp_path):
            RunDirectory(tmp_path).create()
            assert [path.name for path in tmp_path.iterdir()] == ["lock"]
        assert list(tmp_path.iterdir()) == []
    assert 6 <= number < 99


def test_a_disk_without_kernel_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no guard then, and still one owner."""
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    write(tmp_path, start=DEAD)
    with owned(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
        assert said_by(tmp_path)["pid"] == str(os.getpid())
        with pytest.raises(OutputLockedError, match="is in use by"), owned(tmp_path):
            pass
        monkeypatch.setattr(lock, "_clear", lambda *_: None)  # another process was faster
        with pytest.raises(OutputLockedError, match="is in use by"), owned(tmp_path):
            pass
        assert said_by(tmp_path)["pid"] == str(os.getpid())
    assert list(tmp_path.iterdir()) == []


def test_one_process_at_a_time_takes_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two could find the same owner gone, and the slower one would remove the lock of the faster."""
    monkeypatch.setattr(lock, "_GUARD_S", 0.1)
    write(tmp_path, start=DEAD)
    with FileLock(tmp_path / lock.GUARD), pytest.raises(OutputLockedError, match="another process"), owned(tmp_path):
        pass
    assert said_by(tmp_path)["start"] == DEAD
    assert (tmp_path / lock.GUARD).exists()


def test_filelock_does_not_decide_who_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own takeover exchanges two names, which NFS and Lustre cannot."""
    monkeypatch.setattr(SoftFileLease, "_try_break_stale_lock", lambda _: pytest.fail("asked"), raising=False)
    write(tmp_path, start=DEAD)
    with owned(tmp_path):
        pass


def test_a_writer_that_never_began_holds_nothing(tmp_path: Path) -> None:
    with suppress(KeyboardInterrupt), owned(tmp_path):
        lend(tmp_path, threading.Thread(target=lambda: None, daemon=True))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_one_of_many_takes_a_lock_over(tmp_path: Path) -> None:
    """Six processes find the lock of one that is gone at the same moment; one gets it."""
    write(tmp_path, start=DEAD)
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


def test_a_silent_lock_of_another_host_is_taken_over(tmp_path: Path) -> None:
    """Its owner sends a heartbeat every minute. After ten minutes without one the lock expires, with a note."""
    write(tmp_path, host="elsewhere", boot="theirs")
    be_silent(tmp_path, 500)
    with pytest.raises(OutputLockedError, match="or wait: the lock expires 10 minutes after its last heartbeat"), \
            owned(tmp_path):
        pass
    be_silent(tmp_path, 700)
    said: list[str] = []
    with owned(tmp_path, said.append):
        assert said_by(tmp_path)["host"].startswith(os.uname().nodename)
    assert len(said) == 1
    assert re.search("elsewhere.*no heartbeat for 12 minutes.*takes over", said[0])


def test_a_live_owner_that_can_be_seen_keeps_its_lock_however_silent(
        tmp_path: Path, holder: Callable[[], subprocess.Popen[str]]) -> None:
    """A suspended process. filelock by itself would take it over."""
    holder()
    be_silent(tmp_path, 7000)
    with pytest.raises(OutputLockedError, match="is in use by"), owned(tmp_path):
        pass


def test_an_owner_renews_its_lock_and_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither renews nor releases the lock of another host that has taken over."""
    path = tmp_path / "lock"
    monkeypatch.setattr(lock, "_BEAT_S", 0.01)
    with owned(tmp_path):
        be_silent(tmp_path, 7000)
        deadline = time.monotonic() + 30
        while time.time() - path.stat().st_mtime > 60:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        theirs = tmp_path / "theirs"
        theirs.write_text("theirs")
        theirs.replace(path)
        be_silent(tmp_path, 7000)
        time.sleep(0.2)
        assert time.time() - path.stat().st_mtime > 60
    assert path.read_text() == "theirs"


def test_a_process_that_leaves_its_writer_behind_leaves_no_lock(tmp_path: Path) -> None:
    """C1: after a second interrupt the command ends, and a daemon that writes ends with it."""
    code = ("import sys, threading; from pathlib import Path; from tropism.observe.lock import lend, owned\n"
            "with owned(Path(sys.argv[1])):\n"
            "    writer = threading.Thread(target=threading.Event().wait, daemon=True); writer.start()\n"
            "    lend(Path(sys.argv[1]), writer); raise KeyboardInterrupt")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=False)
    assert list(tmp_path.iterdir()) == []
