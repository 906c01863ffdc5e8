"""Quantized base weights with several processes, each of which holds all of them."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from integration.conftest import distance
from integration.test_invariance import BOUNDS, one_rank, run_ranks
from tropism.config import METHODS
from tropism.distributed.world import World
from tropism.errors import UsageError
from tropism.runner import run
from tropism.train.options import ParallelOptions
from tropism.train.setup.parallel import parallelize

NEEDS = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs the package bitsandbytes")


@NEEDS
def test_two_processes_equal_one(tiny_model_dir: Path, pairs: Path, tmp_path: Path) -> None:
    """The adapter after five steps, relative to its size: its second factor starts at 0."""
    def settings(name: str) -> dict[str, Any]:
        return {"model": str(tiny_model_dir), "data": str(pairs), "output": str(tmp_path / name), "batch_size": 8,
                "store": str(tmp_path / "store"), "max_steps": 5, "learning_rate": 1e-2, "samples": 0,
                "lora": {"rank": 4, "quantize": "nf4"}}

    run(METHODS["dpo"](**settings("one")))
    assert run_ranks(2, one_rank, [("dpo", settings("two"))]) == [0, 0]
    one, two = (load_file(tmp_path / name / "model" / "adapter_model.safetensors") for name in ("one", "two"))
    learned = {name: weight.double() for name, weight in one.items() if "lora_B" in name}
    traveled = distance(learned, {name: weight * 0 for name, weight in learned.items()})
    gap = distance({name: two[name].double() for name in learned}, learned) / traveled
    print(f"{gap:.1e} of the distance traveled")
    assert gap < BOUNDS["fp32"][0]
    text = (tmp_path / "two" / "manifest.json").read_text()
    assert '"world_size": 2' in text


def test_shards_of_quantized_weights_are_a_usage_error() -> None:
    reason = "has no effect with --lora.quantize: each process holds the quantized weights."
    with pytest.raises(UsageError, match=r"--parallel\.shard has no effect with --lora\.quantize"):
        parallelize(World(0, 2, torch.device("cpu")), ParallelOptions(shard=2), reason)
