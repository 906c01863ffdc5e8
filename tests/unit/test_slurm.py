"""`examples/slurm.sh` on stand-ins for SLURM's commands: what it starts, and when it queues itself again."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm.sh"
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.mark.parametrize(("code", "again"), [(1, True), (0, False), (1, False)])
def test_it_goes_on_as_long_as_there_is_something_to_do(tmp_path: Path, code: int, again: bool) -> None:
    """C2: a run that was stopped is queued again; one that is done or failed is not, also if it had stopped before."""
    output, notes = tmp_path / "run", tmp_path / "run.torchrun-41"
    output.mkdir()
    (output / "manifest.json").write_text('{\n  "status": "stopped"\n}\n')
    commands = {
        "scontrol": f"[ $1 = show ] && echo node7 || echo \"$@\" > {tmp_path}/requeued",
        "srun": f"echo \"$@\" > {tmp_path}/started; env > {tmp_path}/variables; "
                f"{f'mkdir -p {notes}/none_x/attempt_0 && touch {notes}/none_x/attempt_0/tropism-stopped; ' * again}"
                f"exit {code}"}
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[7-8]",
                 "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "41", "SLURM_GPUS_ON_NODE": "4",
                 "SLURM_CPUS_PER_TASK": "32"}
    done = subprocess.run(["bash", str(SCRIPT), "dpo", "--config", "c.yaml", f"--output={output}"], env=variables,
                          capture_output=True, text=True, check=False)
    assert done.returncode == (0 if again else code), done.stderr
    started = (tmp_path / "started").read_text()
    assert f"--nnodes 2 --nproc-per-node 4 --log-dir {notes} --rdzv-id 41" in started
    assert "--rdzv-endpoint node7:29500 -m tropism dpo --config c.yaml" in started
    assert started.rstrip().endswith("--resume auto --max-time 225min --parallel.replicate 2")
    assert "--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1" in started
    assert {"SRUN_CPUS_PER_TASK=32", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300"} <= set(
        (tmp_path / "variables").read_text().splitlines())
    assert (tmp_path / "requeued").exists() == again
    assert not notes.exists()


def test_it_needs_a_place_for_the_run(tmp_path: Path) -> None:
    variables = {**os.environ, "SLURM_JOB_NODELIST": "n", "SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1"}
    done = subprocess.run(["bash", str(SCRIPT), "dpo"], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--output" in done.stderr
