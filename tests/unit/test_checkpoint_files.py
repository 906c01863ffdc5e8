"""A checkpoint on the disk: whole or not there, and each damage has a sentence of its own."""

import errno
import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tropism.distributed.training_state import TrainingState, check_plain, read_tensors
from tropism.errors import CheckpointError, OutputError, UsageError
from tropism.observe.checksums import checksums, differences, file_hash
from tropism.train.checkpoints import files as checkpoint
from tropism.train.checkpoints.rng_state import random_state, set_random_state
from tropism.train.checkpoints.saver import Retention

TRAINER = {"step": 3, "value": 0.1 + 0.2, "tiny": 5e-324}


def tensors() -> dict[str, torch.Tensor]:
    return {"model/weight": torch.randn(5, 7, generator=torch.Generator().manual_seed(0)),
            "optimizer/weight/exp_avg": torch.randn(5, 7), "optimizer/weight/step": torch.tensor(3.0)}


@pytest.fixture
def written(tmp_path: Path) -> checkpoint.Checkpoint:
    checkpoint.write(tmp_path / "checkpoints", 3, tensors(), TRAINER)
    return checkpoint.listed(tmp_path / "checkpoints")[0]


def files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def test_what_is_written_is_read_back(written: checkpoint.Checkpoint) -> None:
    """C1: tensors and floats to the bit."""
    assert written.step == 3
    assert files(written.path) == ["COMPLETE", "files.json", "state/.metadata", "state/__0_0.distcp", "trainer.json"]
    trainer = checkpoint.verify(written.path)
    assert trainer == {"schema_version": 1, **TRAINER}
    wanted = tensors() | {"optimizer/weight/exp_avg": torch.zeros(5, 7)}
    found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    read_tensors(found, written.state)
    assert torch.equal(found["model/weight"], wanted["model/weight"])
    assert found["optimizer/weight/step"] == 3


HOSTILE = ["[]", "null", "5", "{", "[" * 100_000, '{"trainer.json": 5}', '{"trainer.json": {"bytes": "36"}}',
           '{"../../../../../etc/passwd": {"bytes": 1, "blake2b": ""}}', '{"a\\u0000b": {}}',
           json.dumps({"x" * 5000: {}})]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
@pytest.mark.parametrize("name", ["files.json", "trainer.json"])
def test_files_of_someone_else_whose_hashes_are_right(name: str, number: int, written: checkpoint.Checkpoint) -> None:
    """C2: a sentence, and no file outside the checkpoint is read."""
    path = written.path
    (path / name).write_text(HOSTILE[number])
    if name == "trainer.json":
        for other in ("files.json", "COMPLETE"):
            (path / other).unlink()
        (path / "files.json").write_text(json.dumps(checksums(path)))
    (path / "COMPLETE").write_text(file_hash(path / "files.json") + "\n")
    if name == "trainer.json" and HOSTILE[number].startswith('{"'):
        assert checkpoint.verify(path) == json.loads(HOSTILE[number])
        return
    with pytest.raises(CheckpointError, match=r"JSON|not found|no size and hash|not part of"):
        checkpoint.verify(path)


def test_checksums_of_someone_else(tmp_path: Path) -> None:
    """A named pipe is not opened, and a checksum of another form is named."""
    os.mkfifo(tmp_path / "pipe")
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("")
    known: Any = {"pipe": {"bytes": 0, "blake2b": "00" * 16}, "a": {"bytes": 0, "blake2b": 5}, "b": 3,
                  "c": {"bytes": 0, "blake2b": "00" * 5000}}
    assert differences(tmp_path, known) == ["pipe is not a regular file", "a has an invalid checksum",
                                            "b has an invalid checksum", "c has an invalid checksum"]


NAMES = ["COMPLETE", "files.json", "state/.metadata", "state/__0_0.distcp", "trainer.json"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
def test_a_damaged_byte_is_found_and_its_file_named(name: str, where: float, written: checkpoint.Checkpoint,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """C2: nothing is unpickled from a directory whose hashes do not match."""
    file = written.path / name
    content = bytearray(file.read_bytes())
    content[int(where * (len(content) - 1))] ^= 0x10
    file.write_bytes(content)
    monkeypatch.setattr(pickle, "Unpickler", None)
    with pytest.raises(CheckpointError, match=rf"{name}: (corrupted file|unsupported schema)|not the one in {name}"):
        checkpoint.verify(written.path)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_named(name: str, written: checkpoint.Checkpoint) -> None:
    """C2."""
    (written.path / name).unlink()
    sentence = "incomplete checkpoint" if name == "COMPLETE" else f"{name}: not found"
    with pytest.raises(CheckpointError, match=sentence):
        checkpoint.verify(written.path)


def test_a_cut_file_and_another_version(written: checkpoint.Checkpoint) -> None:
    """C2."""
    state = written.path / "state" / "__0_0.distcp"
    size = state.stat().st_size
    os.truncate(state, size // 2)
    with pytest.raises(CheckpointError, match=f"corrupted file: {size // 2:,} of {size:,} bytes"):
        checkpoint.verify(written.path)
    trainer = json.loads((written.path / "trainer.json").read_text())
    (written.path / "trainer.json").write_text(json.dumps({**trainer, "schema_version": 7}))
    with pytest.raises(CheckpointError, match=r"unsupported schema version 7 \(.* reads version 1\)"):
        checkpoint.verify(written.path)
    with pytest.raises(CheckpointError, match="checkpoint not found"):
        checkpoint.verify(written.path.with_name("step-00000099"))


def test_only_finished_ones_are_listed(written: checkpoint.Checkpoint) -> None:
    root = written.path.parent
    checkpoint.write(root, 12, tensors(), TRAINER)
    (root / "step-00000020" / "state").mkdir(parents=True)
    (root / "something else").mkdir()
    assert [one.step for one in checkpoint.listed(root)] == [3, 12]
    checkpoint.invalidate(root / "step-00000012")
    assert [one.step for one in checkpoint.listed(root)] == [3]


def test_state_that_does_not_fit_is_named(written: checkpoint.Checkpoint) -> None:
    """C2: a missing optimizer entry, one too many, another size or dtype."""
    for changed, sentence in (
            ({**tensors(), "optimizer/bias/exp_avg": torch.zeros(2)}, "optimizer/bias/exp_avg is missing"),
            ({name: tensor for name, tensor in tensors().items() if "step" not in name},
             "step is not part of this run"),
            ({**tensors(), "model/weight": torch.zeros(5, 8)}, r"model/weight is \[5, 7\] torch.float32 in the"),
            ({**tensors(), "model/weight": torch.zeros(5, 7).double()}, "torch.float64 in this run")):
        before = {name: tensor.clone() for name, tensor in changed.items()}
        with pytest.raises(CheckpointError, match=sentence):
            read_tensors(changed, written.state)
        assert all(torch.equal(before[name], tensor) for name, tensor in changed.items())


def test_every_write_that_fails_leaves_the_last_one_alone(written: checkpoint.Checkpoint,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """C2: a disk that is full at the first, second, ... call."""
    root = written.path.parent
    before = {name: (written.path / name).read_bytes() for name in files(written.path)}
    real = {"open": os.open, "fsync": os.fsync, "write_text": Path.write_text, "path_open": Path.open,
            "mkdir": Path.mkdir}
    left = 0

    def count_of(call: Any) -> Any:
        def wrapped(*args: Any, **keywords: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args, **keywords)
        return wrapped

    monkeypatch.setattr(os, "fsync", count_of(real["fsync"]))
    for name, call in (("write_text", real["write_text"]), ("open", real["path_open"]), ("mkdir", real["mkdir"])):
        monkeypatch.setattr(Path, name, count_of(call))
    failures = 0
    while True:
        left = failures + 1
        refusal = None
        try:
            checkpoint.write(root, 6, tensors(), TRAINER)
        except OutputError as error:
            refusal = str(error)
        if refusal is None:
            break
        assert "No space left on device" in refusal
        needed = re.search(r"About ([\d,]+) bytes are needed", refusal)
        assert needed is not None
        assert int(needed[1].replace(",", "")) >= sum(map(len, before.values()))  # metadata too
        failures += 1
        assert [one.step for one in checkpoint.listed(root)] == [3]
        assert not (root / "step-00000006").exists()
    left = -1  # from here on nothing fails
    assert failures > 10
    assert [one.step for one in checkpoint.listed(root)] == [3, 6]
    assert before == {name: (written.path / name).read_bytes() for name in files(written.path)}
    checkpoint.verify(root / "step-00000006")


class Killed(BaseException):
    """The process ends here."""


def test_a_checkpoint_of_the_same_step_counts_until_the_new_one_does(written: checkpoint.Checkpoint,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """C1, C2: killed, or refused by the disk, at the first, second, ... call: one that is whole is always there."""
    root, left, error = written.path.parent, 0, BaseException()

    def count_of(call: Any) -> Any:
        def wrapped(*args: Any, **keywords: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise error
            return call(*args, **keywords)
        return wrapped

    for owner, names in ((os, ("fsync",)), (shutil, ("rmtree",)),
                         (Path, ("write_text", "open", "mkdir", "unlink", "rename"))):
        for name in names:
            monkeypatch.setattr(owner, name, count_of(getattr(owner, name)))
    for error in (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), Killed()):
        rounds, before = 0, None
        while True:
            left = rounds + 1
            value = [type(error).__name__, rounds]
            try:
                checkpoint.write(root, 3, tensors(), {**TRAINER, "value": value})
            except (OutputError, RuntimeError, Killed):  # torch's writer makes a RuntimeError of it
                done = False
            else:
                done = True
            left = 0
            one, = checkpoint.listed(root)
            found = checkpoint.verify(one.path)["value"]
            assert found == value if done else found in (before, value) or before is None
            if done:
                break
            before, rounds = found, rounds + 1
        assert rounds > 15


def test_one_that_is_set_aside_does_not_come_back(written: checkpoint.Checkpoint) -> None:
    """C1: killed between the new one's COMPLETE and the old one's end, there are two of one step."""
    shutil.copytree(written.path, written.path.with_name("step-00000003.new"))
    assert checkpoint.listed(written.path.parent) == [written]
    checkpoint.invalidate(written.path)
    assert checkpoint.listed(written.path.parent) == []


@pytest.mark.parametrize(("retention", "best", "kept"), [
    (Retention(2), None, {30, 40}), (Retention(1, "loss"), 20, {20, 40}), (Retention(0), None, {10, 20, 30, 40}),
    (Retention(2, "loss"), 40, {30, 40}), (Retention(9), None, {10, 20, 30, 40}), (Retention(1, "loss"), 5, {40})])
def test_retention(retention: Retention, best: int | None, kept: set[int]) -> None:
    assert retention.kept([10, 20, 30, 40], best) == kept


def test_a_tied_weight_is_written_once_and_comes_back_tied() -> None:
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 4, bias=False), "b": torch.nn.Linear(3, 4, bias=False)})
    module["b"].weight = module["a"].weight
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    state = TrainingState.of(module, optimizer)
    assert state.tied == {"model/b.weight": "model/a.weight"}
    assert "model/b.weight" not in state.tensors
    copy = state.copied()
    state.tensors = {name: tensor + 1 for name, tensor in copy.items()}
    state.apply(module, optimizer)
    assert torch.equal(module["b"].weight, copy["model/a.weight"] + 1)
    assert module["a"].weight is module["b"].weight


def test_a_copy_does_not_follow_the_weights() -> None:
    module = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    copy = TrainingState.of(module, optimizer).copied()
    before = copy["model/weight"].clone()
    with torch.no_grad():
        module.weight.add_(1)
    assert torch.equal(copy["model/weight"], before)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_copy_takes_no_step(momentum: float, steps: int) -> None:
    """C1: hooks of an optimizer that was given see the training's steps alone; also state that is not there yet."""
    def made(count: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, list[int]]:
        module = torch.nn.Linear(3, 4)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum, dampening=0.5 * momentum)
        calls: list[int] = []
        for _ in range(count):
            module(torch.ones(3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        return module, optimizer, calls

    module, optimizer, calls = made(steps)
    state = TrainingState.of(module, optimizer)
    assert not calls
    assert state.groups[0]["params"] == ["weight", "bias"]
    begun = bool(optimizer.state)
    assert ("optimizer/weight/momentum_buffer" in state.tensors) == begun == (momentum > 0 and steps > 0)
    other, its, _ = made(0)
    expected = TrainingState.of(other, its, begun=begun)
    assert expected.tensors.keys() == state.tensors.keys()
    expected.tensors = state.copied()
    expected.apply(other, its)
    for net, optim in ((module, optimizer), (other, its)):
        net(torch.ones(3)).sum().backward()
        optim.step()
    assert torch.equal(module.weight, other.weight)
    assert torch.equal(module.bias, other.bias)


def test_random_states_come_back() -> None:
    import random

    import numpy as np

    def draw() -> tuple[Any, ...]:
        return torch.randn(2).tolist(), np.random.rand(2).tolist(), random.random(), random.gauss(0, 1)

    draw()
    kept = json.loads(json.dumps(random_state()))
    first = draw()
    set_random_state(kept)
    assert draw() == first


def test_what_json_cannot_hold_is_refused() -> None:
    check_plain({"a": [1, 2.5, None, "x", (True,)]}, "the scheduler")
    for value in (torch.ones(1), {1: 2}, {"a": {"b": object()}}):
        with pytest.raises(UsageError, match="the scheduler holds a"):
            check_plain(value, "the scheduler")
