"""Notes on CPUs that a run shares, and the environment that torch reads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tropism.cli import environment
from tropism.train.setup import cpu_load
from tropism.train.setup.cpu_load import cpu_limit, cpu_notes


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Four quiet cores without a limit."""
    monkeypatch.setattr(cpu_load, "_CGROUP", tmp_path)
    monkeypatch.setattr(cpu_load, "usable_cores", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (4.0, 9.0, 9.0))
    return monkeypatch


def test_a_quiet_machine_is_not_mentioned(machine: pytest.MonkeyPatch) -> None:
    assert list(cpu_notes(4, 1)) == list(cpu_notes(2, 2)) == list(cpu_notes(1, 1)) == []


def test_a_load_above_the_cores_is_noted(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(os, "getloadavg", lambda: (4.1, 0.0, 0.0))
    assert list(cpu_notes(1, 1)) == ["other programs use this machine: its load is 4.1, with 4 cores. Steps take "
                                     "longer until they end."]
    machine.delattr(os, "getloadavg")  # as on Windows
    assert list(cpu_notes(1, 1)) == []


@pytest.mark.parametrize(("threads", "processes", "said"), [
    (8, 1, "the run has 8 threads, but only 4 cores, so that threads wait for each other. Set OMP_NUM_THREADS=4."),
    (4, 2, "the run has 8 threads in 2 processes, but only 4 cores, so that threads wait for each other. Set "
           "OMP_NUM_THREADS=2.")])
def test_more_threads_than_cores_are_noted(machine: pytest.MonkeyPatch, threads: int, processes: int,
                                           said: str) -> None:
    assert list(cpu_notes(threads, processes)) == [said]


@pytest.mark.parametrize(("files", "limit"), [
    ({"cpu.max": "150000 100000\n"}, 1.5), ({"cpu.max": "max 100000\n"}, None), ({"cpu.max": ""}, None),
    ({"cpu.max": "5 0"}, None), ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
    ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None), ({}, None)])
def test_the_limit_of_a_container(machine: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str],
                                  limit: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_limit() == limit
    expected = [] if limit is None else [
        f"this container may use {limit:g} CPUs, but the run has 4 threads, which then wait for each other. Set "
        "OMP_NUM_THREADS=1, or raise the limit."]
    assert list(cpu_notes(4, 1)) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="segments that grow need Linux")
@pytest.mark.parametrize(("given", "policy", "allocator"), [
    ({}, "passive", "expandable_segments:True"),
    ({"OMP_WAIT_POLICY": "active", "PYTORCH_ALLOC_CONF": "a"}, "active", "a"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "b"}, "passive", None)])
def test_what_the_user_sets_counts(monkeypatch: pytest.MonkeyPatch, given: dict[str, str], policy: str,
                                   allocator: str | None) -> None:
    for name in ("OMP_WAIT_POLICY", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
        if name in given:
            monkeypatch.setenv(name, given[name])
    environment.set_environment()
    assert (os.environ["OMP_WAIT_POLICY"], os.environ.pop("PYTORCH_ALLOC_CONF", None)) == (policy, allocator)


def test_the_environment_is_set_before_torch_is_imported() -> None:
    code = ("import sys\nfrom tropism.cli import app\nseen = []\n"
            "app.set_environment = lambda: seen.append('torch' in sys.modules)\n"
            "app.main(['kto', '--model', 'x'])\nassert seen == [False]\nassert 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
