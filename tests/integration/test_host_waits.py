"""A step never reads a value from the device: each such read makes the host wait for all queued work on a GPU."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tropism.config import METHODS
from tropism.distributed import World
from tropism.observe.console import Voice
from tropism.runner import Run
from tropism.train.step import train_step

_READS = {getattr(torch.Tensor, name) for name in (
    "item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__contains__")}
_DISPATCHED = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")


class _Calls(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _READS:
            self.found.append(_place(str(function)))
        return function(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function).split(".")[1].startswith(_DISPATCHED):
            self.found.append(_place(str(function)))
        return function(*args, **(kwargs or {}))


def _place(what: str) -> str:
    calls = [frame for frame in traceback.extract_stack()
             if "/tropism/" in frame.filename or "/transformers/" in frame.filename]
    return f"{what} in {calls[-1].filename}:{calls[-1].lineno}" if calls else what


@pytest.fixture
def opened(tiny_model_dir: Path, data_of: dict[str, Path], tmp_path: Path) -> Callable[..., Run]:
    def go(method: str, **changes: Any) -> Run:
        of_pairs = method in ("sft", "kd")
        settings = {"model": str(tiny_model_dir), "data": str(data_of["dpo" if of_pairs else method]),
                    "output": str(tmp_path / "none"), "store": str(tmp_path / "store"), "batch_size": 8, "max_steps": 3,
                    **({"columns": "completion=chosen"} if of_pairs else {}), **changes}
        if "teacher" in settings:
            settings["teacher"] = str(tiny_model_dir)
        return Run(METHODS[method](**settings), World(0, 1, torch.device("cpu")), Voice(loud=False))

    return go


@pytest.mark.parametrize(("method", "changes"), [
    ("kto", {"precision": "bf16"}), ("kto", {"microbatch_tokens": 64, "loss": "kto"}), ("kto", {"loss": "bco"}),
    ("kto", {"loss": "kto,bco", "microbatch_tokens": 64, "checkpointing": "full"}),
    ("dpo", {"loss": "aot,aot_unpaired"}), ("dpo", {"loss": "aot", "microbatch_tokens": 64}),
    ("dpo", {"wpo": True, "lora": {"rank": 2}}), ("kd", {"teacher": "self"}), ("kd", {"teacher": "self", "top_k": 4})])
def test_a_step_reads_nothing(opened: Callable[..., Run], method: str, changes: dict[str, Any]) -> None:
    run = opened(method, **changes)
    engine = run.build()
    train_step(engine, run.planner.packs_of(1))
    packs = run.planner.packs_of(2)
    found: list[str] = []
    with _Calls(found), _Operations(found):
        outcome = train_step(engine, packs)
    assert not found
    with _Calls(found):
        float(outcome.grad_norm)
    assert found  # the counter counts


def test_copies_to_a_gpu_come_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy of a batch, its units and its reference scores is one that the host does not wait for."""
    from tropism.data.batching.transfer import sent

    seen: list[tuple[str, Any]] = []
    host = torch.zeros(3)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: seen.append(("pin", self)) or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *a, **k: seen.append(("to", k)) or self)
    sent(host, torch.device("cuda"))
    assert [name for name, _ in seen] == ["pin", "to"]
    assert seen[1][1] == {"non_blocking": True}
