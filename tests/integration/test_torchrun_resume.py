"""`examples/torchrun_resume.sh`: exit code 75 for a run that torchrun ends with code 1 although it only stopped."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tropism.cli.app import main

SCRIPT = Path(__file__).parents[2] / "examples" / "torchrun_resume.sh"
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
_STAND_IN = """#!/usr/bin/env bash
echo "$@" > {place}/started
echo $TORCH_ELASTIC_SHUTDOWN_TIMEOUT >> {place}/started
note() {{ mkdir -p "$2/none_x/attempt_$1" && touch "$2/none_x/attempt_$1/tropism-stopped"; }}
[ "$1" = --log-dir ] || exit 3
{body}
"""


def start(place: Path, body: str, *arguments: str) -> subprocess.Popen[str]:
    """The script with a stand-in for torchrun, whose log directory is $2."""
    torchrun = place / "torchrun"
    torchrun.write_text(_STAND_IN.format(place=place, body=body))
    torchrun.chmod(0o755)
    variables = {**os.environ, "PATH": f"{place}:{os.environ['PATH']}", "TMPDIR": str(place)}
    variables.pop("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", None)
    return subprocess.Popen(["bash", str(SCRIPT), *arguments], env=variables, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("body", "code"), [
    ("exit 0", 0), ("exit 1", 1), ("exit 7", 7), ("note 0 $2; exit 1", 75), ("note 0 $2; note 1 $2; exit 1", 75),
    ("kill -9 $$", 137)])
def test_the_exit_code(body: str, code: int, tmp_path: Path) -> None:
    """A failed run keeps its code; nothing is left in the directory of temporary files."""
    script = start(tmp_path, body, "--nproc-per-node", "2", "--", "kto", "--output", "a run")
    assert script.wait(30) == code
    options, timeout = (tmp_path / "started").read_text().splitlines()
    assert options.endswith("--nproc-per-node 2 -m tropism kto --output a run --resume auto")
    assert timeout == "300"
    assert {path.name for path in tmp_path.iterdir()} == {"torchrun", "started"}


@pytest.mark.parametrize(("given", "passed"), [
    ("-- kto --resume never", "-m tropism kto --resume never"), ("-- kto --resume=RUN", "-m tropism kto --resume=RUN"),
    ("-- resume RUN", "-m tropism resume RUN"), ("-- evaluate RUN", "-m tropism evaluate RUN")])
def test_what_is_passed_on(given: str, passed: str, tmp_path: Path) -> None:
    assert start(tmp_path, "exit 0", *given.split()).wait(30) == 0
    assert (tmp_path / "started").read_text().splitlines()[0].endswith(passed)


@pytest.mark.parametrize("given", ["", "--nproc-per-node 2", "--nproc-per-node 2 kto", "--"])
def test_without_a_command(given: str, tmp_path: Path) -> None:
    script = start(tmp_path, "exit 0", *given.split())
    assert script.communicate(timeout=30)[1].startswith("usage: ")
    assert script.returncode == 2
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "USR1"])
def test_a_signal_reaches_torchrun(name: str, tmp_path: Path) -> None:
    """And the script waits for the save, also if a second signal comes."""
    body = (f"trap 'echo {name} > {tmp_path}/heard; note 0 $2' {name}; touch {tmp_path}/ready\n"
            f"until [ -e {tmp_path}/heard ]; do sleep 0.02; done; sleep 0.3; exit 1")
    script = start(tmp_path, body, "--", "kto", "--output", "RUN")
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    for _ in range(2):
        script.send_signal(signal.Signals[f"SIG{name}"])
        time.sleep(0.05)
    assert script.wait(30) == 75
    assert (tmp_path / "heard").read_text() == f"{name}\n"


@pytest.mark.slow
def test_a_run_of_two_processes_is_stopped_and_resumed(tiny_model_dir: Path, feedback: Path, tmp_path: Path) -> None:
    """By a real torchrun: 75 after SIGTERM, 1 for a usage error, 0 when the same line has finished the run."""
    run = tmp_path / "run"
    line = ["bash", str(SCRIPT), "--standalone", "--nproc-per-node", "2", "--", "kto", "--model", str(tiny_model_dir),
            "--data", str(feedback), "--output", str(run), "--store", str(tmp_path / "store"), "--batch-size", "8",
            "--samples", "0", "--max-steps", "400", "--epochs", "100"]
    variables = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                 "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}
    script = subprocess.Popen(line, env=variables)
    metrics = run / "metrics.jsonl"
    ends = time.monotonic() + 240
    while not (metrics.exists() and '"train"' in metrics.read_text()):
        assert script.poll() is None
        assert time.monotonic() < ends
        time.sleep(0.1)
    script.terminate()
    assert script.wait(180) == 75
    assert json.loads((run / "manifest.json").read_text())["status"] == "stopped"
    stopped = max(json.loads(one)["step"] for one in metrics.read_text().splitlines())
    assert subprocess.run([*line, "--beta", "x"], env=variables, check=False).returncode == 1
    line[line.index("400")] = str(stopped + 2)
    assert subprocess.run(line, env=variables, check=False).returncode == 0
    assert json.loads((run / "manifest.json").read_text())["status"] == "done"
    assert main(["verify", str(run)]) == 0
