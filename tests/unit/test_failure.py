"""What is written and said of a run that does not come to its end."""

import json
from pathlib import Path

import pytest
import torch

from tropism.distributed import World
from tropism.errors import StoppedEarly, TropismError
from tropism.observe.manifest import Manifest
from tropism.observe.rundir import RunDirectory
from tropism.train.failure import record_failure

GLOO = "[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:3461\nmore"


@pytest.mark.parametrize(("error", "size", "sentence"), [
    (RuntimeError(GLOO), 2, "another process of the run failed .*first error in the log"),
    (torch.OutOfMemoryError("CUDA out of memory.\nTried to"), 1, "out of memory .*--microbatch-tokens below 2048")])
def test_the_manifest_has_the_sentence_that_is_said(tmp_path: Path, error: BaseException, size: int,
                                                    sentence: str) -> None:
    """X1."""
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    with pytest.raises(TropismError, match=sentence) as raised:
        record_failure(directory, Manifest(directory, {}), error, World(0, size, torch.device("cpu")), 2048, True)
    found = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (found["status"], found["error"]) == ("failed", str(raised.value))


@pytest.mark.parametrize(("size", "machines", "command"), [
    (1, "", "tropism resume RUN"),
    (8, "1", "torchrun --nproc-per-node 8 -m tropism resume RUN (or, in one process, tropism resume RUN)"),
    (16, "2", "torchrun, as before on 2 machines, with -m tropism resume RUN (or, in one process, tropism resume RUN)"),
])
def test_a_run_that_was_stopped_says_which_command_goes_on(monkeypatch: pytest.MonkeyPatch, size: int, machines: str,
                                                           command: str) -> None:
    """C1: as it was started, with torchrun, or in one process."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", machines)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8" if machines else "")
    monkeypatch.setattr(World, "broadcast", lambda self, value: value)
    monkeypatch.setattr(World, "on_main", lambda self, action: action())
    world = World(0, size, torch.device("cpu"))
    with pytest.raises(StoppedEarly) as raised:
        record_failure(RunDirectory(Path("RUN")), None, StoppedEarly("received SIGTERM"), world, 2048, True)
    assert str(raised.value) == ("stopped: received SIGTERM. There is no checkpoint yet, so a resumed run starts at "
                                 f"step 1 with the stored scores. Resume with: {command}")
