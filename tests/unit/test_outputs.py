"""G4: outputs under names that a user chose: written through what is no regular file, and atomic where it is one."""

import errno
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tropism.cli.app import main
from tropism.commands.files import check_new, check_reports, write_json, write_text
from tropism.commands.scoring import write
from tropism.errors import OutputError, UsageError
from tropism.files import bytes_on_disk, check_output, check_space, output, replacing, write_whole

ROWS = [{"prompt": f"Name tree {i}. ", "completion": "oak", "label": i % 2 == 0} for i in range(6)]
ROOT = os.geteuid() == 0


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


WRITERS: dict[str, Callable[[Path], object]] = {
    "text": lambda path: write_text(path, "new"),
    "json": lambda path: write_json(path, {"a": 1}),
    "scores": lambda path: write([{"id": "1", "logps": -1.0}], path),
}


def _device(path: Path, minor: int) -> Path:
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
    except PermissionError:
        pytest.skip("no right to make a device")
    return path


@pytest.mark.parametrize("name", WRITERS)
def test_a_device_stays_a_device(tmp_path: Path, name: str) -> None:
    """`--json /dev/null` as root must not replace it. Nothing is made beside it, not even for a moment."""
    folder = tmp_path / "dev"
    folder.mkdir()
    null, link = _device(folder / "null", 3), tmp_path / "link"
    link.symlink_to(null)
    folder.chmod(0o555)
    before = folder.stat().st_mtime_ns
    for path in (null, link):
        check_new(path)
        check_output(path)
        WRITERS[name](path)
    assert stat.S_ISCHR(null.lstat().st_mode)
    assert link.is_symlink()
    assert os.listdir(folder) == ["null"]
    assert folder.stat().st_mtime_ns == before


def test_a_full_device_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"full: cannot be written: No space left on device$"):
        write_text(_device(tmp_path / "full", 7), "new")


@pytest.mark.parametrize("name", WRITERS)
def test_a_named_pipe_gets_everything_once(tmp_path: Path, name: str) -> None:
    fifo, got = tmp_path / "fifo", []
    os.mkfifo(fifo)
    check_new(fifo)  # does not wait for a reader
    reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()))
    reader.start()
    WRITERS[name](fifo)
    reader.join(10)
    assert len(got[0]) > 2
    assert stat.S_ISFIFO(fifo.lstat().st_mode)


def test_links_lead_to_what_is_written(tmp_path: Path) -> None:
    """A link to a link, a relative one, and one to a file that does not exist yet."""
    (tmp_path / "deep").mkdir()
    real = tmp_path / "deep" / "real.json"
    real.write_text("old")
    real.chmod(0o640)
    (tmp_path / "one").symlink_to("deep/real.json")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    (tmp_path / "dangling").symlink_to("deep/later.json")
    for name in ("two", "dangling"):
        check_output(tmp_path / name)
        write_text(tmp_path / name, "new")
        assert (tmp_path / name).is_symlink()
    assert real.read_text() == (tmp_path / "deep" / "later.json").read_text() == "new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path / "deep")) == ["later.json", "real.json"]


def test_names_that_cannot_be_written_are_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "file").write_text("")
    for path, reason in ((tmp_path / "a", "symbolic links"), (tmp_path, "directory"),
                         (tmp_path / "file" / "x", "directory"), (tmp_path / ("x" * 300), "too long")):
        with pytest.raises(OutputError, match=reason):
            check_output(path)
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "file"]


@pytest.mark.parametrize("writer", [write_text, lambda path, text: write_whole(path, text.encode())])
def test_mode_owner_and_attributes_stay(tmp_path: Path, writer: Callable[[Path, str], None]) -> None:
    path = tmp_path / "secret.json"
    path.write_text("old")
    path.chmod(0o600)
    if ROOT:
        os.chown(path, 12345, 54321)
    try:
        os.setxattr(path, "user.note", b"mine")
        noted = True
    except OSError:
        noted = False
    old = path.stat()
    writer(path, "new")
    found = path.stat()
    assert path.read_text() == "new"
    assert found.st_ino != old.st_ino  # replaced at once, not overwritten
    assert (found.st_mode, found.st_uid, found.st_gid) == (old.st_mode, old.st_uid, old.st_gid)
    assert found.st_mtime_ns > old.st_mtime_ns
    assert not noted or os.getxattr(path, "user.note") == b"mine"


def test_nobody_reads_the_new_content_of_a_private_file_early(tmp_path: Path) -> None:
    path = tmp_path / "secret.json"
    path.write_text("old")
    path.chmod(0o600)
    with output(path) as temporary:
        temporary.write_text("new")
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600


def test_a_new_name_gets_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "new.json", "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new.json").stat().st_mode) == 0o640


def test_a_file_in_a_directory_that_cannot_be_written_is_written_through(tmp_path: Path) -> None:
    """Only as another user than root, whom no mode stops."""
    code = ("import os, sys; from pathlib import Path; from tropism.files import check_output\n"
            "from tropism.commands.files import write_text\n"
            "import rich.console\n"
            "os.setgid(65534); os.setuid(65534)\n"
            "path = Path(sys.argv[1]); check_output(path); write_text(path, 'new')")
    if not ROOT:
        pytest.skip("needs root, to become another user")
    folder = Path("/var/tmp") / f"tropism-{os.getpid()}"
    folder.mkdir()
    try:
        shared = folder / "shared.json"
        shared.write_text("old")
        shared.chmod(0o666)
        done = subprocess.run([sys.executable, "-c", code, str(shared)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert shared.read_text() == "new"
        assert (shared.stat().st_uid, stat.S_IMODE(shared.stat().st_mode)) == (0, 0o666)
        shared.chmod(0o644)
        done = subprocess.run([sys.executable, "-c", code, str(shared)], capture_output=True, text=True, check=False)
        assert "shared.json: cannot be written: Permission denied" in done.stderr
    finally:
        shutil.rmtree(folder)


def test_files_of_a_run_are_replaced_by_name(tmp_path: Path) -> None:
    """Links in somebody else's run directory or store do not lead outside; what is no file there is not replaced."""
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (tmp_path / "manifest.json").symlink_to(outside)
    write_whole(tmp_path / "manifest.json", b"{}")
    assert outside.read_text() == "mine"
    assert (tmp_path / "manifest.json").read_text() == "{}"
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", "."):
        with pytest.raises(OutputError, match=r"is a directory|not a regular file"), replacing(tmp_path / name):
            pass
    assert stat.S_ISFIFO((tmp_path / "fifo").lstat().st_mode)


# --- commands -------------------------------------------------------------------------------------------------------


def _pipe(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tropism", *map(str, arguments)], capture_output=True, text=True,
                          check=False)


def test_standard_output_gets_the_output_alone(data: Path, tmp_path: Path) -> None:
    """So that a pipe into another program reads it; what is said goes to standard error."""
    done = _pipe("convert", data, "--to", "unpaired", "--output", "/dev/stdout", "--json", tmp_path / "report.json")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["completion"] for line in done.stdout.splitlines()] == ["oak"] * 6
    assert "6 rows" in done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["rows"]
    done = _pipe("convert", data, "--to", "unpaired", "--output", tmp_path / "o.jsonl", "--json", "/proc/self/fd/1")
    assert json.loads(done.stdout)["to"] == "unpaired"


@pytest.mark.parametrize(("command", "option"), [("evaluate", "--json"), ("score", "--output"), ("inspect", "--json")])
def test_standard_output_of_commands_with_a_model(command: str, option: str, data: Path, tmp_path: Path,
                                                  tiny_model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = [str(data), "--model", str(tiny_model_dir)] if command == "inspect" else [str(tiny_model_dir), "--data",
                                                                                       str(data)]
    assert main([command, *given, "--store", str(tmp_path / "store"), option, "/dev/stdout"]) == 0
    out, said = capfd.readouterr()
    assert len([json.loads(line) for line in out.splitlines()] if command == "score" else json.loads(out)) >= 3
    assert "row" in said


def test_standard_output_that_is_a_file_is_not_replaced(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    with out.open("w") as stream:
        stream.write("before\n")
        stream.flush()
        subprocess.run([sys.executable, "-m", "tropism", "convert", str(data), "--to", "unpaired", "--output",
                        str(tmp_path / "o.jsonl"), "--json", "/dev/stdout"], stdout=stream, check=True)
        stream.write("after\n")
    text = out.read_text()
    assert text.startswith("before\n{")
    assert text.endswith("}\nafter\n")


def test_a_descriptor_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("kept")
    with (tmp_path / "in").open("rb") as file:
        for number, reason in ((file.fileno(), "open only for reading"), (987, "closed"), (10**30, "closed")):
            for call in (check_output, check_new, lambda path: write_text(path, "new")):
                with pytest.raises(OutputError, match=reason):
                    call(Path(f"/dev/fd/{number}"))
    assert (tmp_path / "in").read_text() == "kept"


def test_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("target")
        for call in (check_output, check_new, lambda path: write_text(path, "new")):
            with pytest.raises(OutputError, match="it is a socket"):
                call(Path("target"))


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    read, write_end = os.pipe()
    os.close(read)
    try:
        write_text(Path(f"/dev/fd/{write_end}"), "new")
    finally:
        os.close(write_end)


def test_a_full_temporary_directory_is_an_error(tmp_path: Path) -> None:
    """What goes into a stream is gathered there first."""
    with (tmp_path / "out").open("wb") as file, pytest.raises(OutputError, match="cannot be written: No space left"), \
            output(Path(f"/dev/fd/{file.fileno()}")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("rest", "code", "said"), [
    ("--output /dev/stdout | true", 0, ""), ("--output new.jsonl --json report.json | true", 0, ""),
    ("--output new.jsonl > full", 1, "standard output: cannot be written: No space left on device"),
    ("--help > full", 1, "standard output: cannot be written: No space left on device"),
    ("--output new.jsonl 2> full > full", 1, ""),
    ("--output new.jsonl --json /dev/stdout >&-", 1, "/dev/stdout: cannot be written: it is closed")])
def test_standard_output_that_fails_is_no_traceback(data: Path, rest: str, code: int, said: str) -> None:
    """The command does its work in any case, and its exit code tells of what was lost."""
    _device(data.parent / "full", 7)
    command = f"set -o pipefail; {sys.executable} -m tropism convert {data} --to unpaired {rest}"
    done = subprocess.run(["bash", "-c", command], cwd=data.parent, capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr, "roken" in done.stderr) == (code, False, False), done.stderr
    assert said in done.stderr
    assert (data.parent / "new.jsonl").exists() == ("new.jsonl" in rest and "closed" not in said)


def test_what_is_read_is_never_written(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = data.read_bytes()
    (tmp_path / "link.json").symlink_to(data)
    for name in (data, tmp_path / "link.json"):
        assert main(["convert", str(data), "--to", "unpaired", "--output", str(tmp_path / "o.jsonl"),
                     "--json", str(name)]) == 2
        assert f"{name} is read by this command, and was not changed" in capsys.readouterr().err
    assert main(["convert", str(data), "--to", "unpaired", "--output", str(tmp_path / "o.jsonl"),
                 "--json", str(tmp_path / "o.jsonl")]) == 2
    assert "is named twice" in capsys.readouterr().err
    assert data.read_bytes() == before
    assert not (tmp_path / "o.jsonl").exists()


def test_files_of_a_run_are_not_reports(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    for name in ("manifest.json", "metrics.jsonl", "model/config.json", "evaluation.json"):
        (run / name).write_text("{}")
    for name in ("manifest.json", "metrics.jsonl", "model/config.json"):
        with pytest.raises(UsageError, match="is read by this command"):
            check_reports(run / name, inputs=f"data,{run}")
    check_reports(run / "evaluation.json", None, inputs=str(run))  # an earlier report
    check_reports(run / "new.json", inputs=str(run))


# --- space ------------------------------------------------------------------------------------------------------------


def test_space_counts_blocks_and_entries(tmp_path: Path) -> None:
    block = os.statvfs(tmp_path).f_frsize
    assert bytes_on_disk([], tmp_path) == 0
    assert bytes_on_disk([0, 1, block, block + 1], tmp_path / "not" / "there") == (1 + 2 + 2 + 3) * block


def test_what_is_said_to_fit_fits(tmp_path: Path) -> None:
    """On a disk with exactly the needed bytes the check passes and so does the write; with a block less, neither."""
    place = tmp_path / "disk"
    place.mkdir()
    made = shutil.which("mount") and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)],
                                                    capture_output=True, check=False).returncode == 0
    if not made:
        pytest.skip("no right to mount a small disk")
    try:
        needed = bytes_on_disk([100_000], place)
        for spare in (0, -4096 * 3):
            (place / "ballast").write_bytes(bytes(shutil.disk_usage(place).free - needed - spare))
            if spare == 0:
                check_space(place / "file", needed, "cannot be written")
                write_whole(place / "file", bytes(100_000))
                (place / "file").unlink()
            else:
                with pytest.raises(OutputError, match=r"[\d,]+ bytes are needed, [\d,]+ are free"):
                    check_space(place / "file", needed, "cannot be written")
                with pytest.raises(OutputError) as error:
                    write_whole(place / "file", bytes(100_000))
                said = [int(word.replace(",", "")) for word in str(error.value).replace("(", " ").split()
                        if word.replace(",", "").isdigit()]
                assert said[0] > said[1] == shutil.disk_usage(place).free
            (place / "ballast").unlink()
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
