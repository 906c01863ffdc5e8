"""Quantized base weights with several processes: shared among them, or a copy for each."""

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from integration.conftest import distance, records
from integration.test_invariance import BOUNDS, Left
from processes import one_rank, run_ranks
from tropism.config import METHODS
from tropism.distributed.world import World
from tropism.errors import UsageError
from tropism.runner import run
from tropism.train.options import ParallelOptions
from tropism.train.setup.parallel import parallelize

NEEDS = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs the package bitsandbytes")
CASES = {"nf4": ({"rank": 4, "quantize": "nf4"}, {}), "int8": ({"rank": 4, "quantize": "int8"}, {"precision": "bf16"}),
         "nf4, bf16": ({"rank": 4, "quantize": "nf4", "modules_to_save": "lm_head"}, {"precision": "bf16"})}


@NEEDS
def test_two_processes_equal_one(tiny_model_dir: Path, pairs: Path, tmp_path: Path) -> None:
    """The adapter after five steps, relative to its size: its second factor starts at 0. Quantized codes are divided,
    and scores of the reference may come from the store that one process filled. A checkpoint of both is resumed by
    one."""
    def settings(name: str, lora: dict[str, Any], **changes: Any) -> dict[str, Any]:
        return {"model": str(tiny_model_dir), "data": str(pairs), "output": str(tmp_path / name), "batch_size": 8,
                "store": str(tmp_path / "store"), "max_steps": 5, "learning_rate": 1e-2, "samples": 1, "log_every": 1,
                "lora": lora, "save_every": 4, "microbatch_tokens": 300, **changes}

    jobs = []
    for name, (lora, changes) in CASES.items():
        run(METHODS["dpo"](**settings(f"{name} one", lora, **changes)))
        ways = ("on", "off") if name == "nf4" else ("on",)
        jobs += [("dpo", settings(f"{name} {way}", lora, **changes, parallel={"shard": way})) for way in ways]
    assert run_ranks(2, one_rank, jobs) == [0, 0]
    for _, given in jobs:
        found, name = Path(given["output"]), Path(given["output"]).name
        base = tmp_path / f"{name.rpartition(' ')[0]} one"
        near(base, found, BOUNDS["fp32"][0] if "bf16" not in given.get("precision", "") else 0.1)
        facts = [json.loads((place / "manifest.json").read_text()) for place in (base, found)]
        assert facts[1]["world_size"] == 2
        assert facts[0]["policy"] == facts[1]["policy"]
        first = [records(Left(place))[0] for place in (base, found)]
        assert first[0]["loss"] == pytest.approx(first[1]["loss"], rel=1e-12) == math.log(2)
        assert first[0]["logps/chosen"] == pytest.approx(first[1]["logps/chosen"], rel=1e-9)
    run(METHODS["dpo"](**{**settings("nf4 on", CASES["nf4"][0]), "resume": str(
        tmp_path / "nf4 on" / "checkpoints" / "step-00000004")}))
    near(tmp_path / "nf4 one", tmp_path / "nf4 on", BOUNDS["fp32"][0])


def near(base: Path, found: Path, bound: float) -> None:
    one, two = (load_file(place / "model" / "adapter_model.safetensors") for place in (base, found))
    learned = {name: weight.double() for name, weight in one.items() if "lora_B" in name}
    traveled = distance(learned, {name: weight * 0 for name, weight in learned.items()})
    gap = distance({name: two[name].double() for name in learned}, learned) / traveled
    print(f"{found.name}: {gap:.1e} of the distance traveled")
    assert gap < bound


def _held(rank: int, size: int, port: int, settings: dict[str, Any], folder: str) -> None:
    """Bytes of quantized codes on each process."""
    import os

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from tropism.distributed import connect
    from tropism.distributed.shard import part_of
    from tropism.observe.console import Voice
    from tropism.runner import Run

    with connect() as world:
        module = Run(METHODS["dpo"](**settings), world, Voice(loud=False)).build().model.module
        codes = [part_of(weight).nbytes for weight in module.parameters() if weight.dtype == torch.uint8]
        (Path(folder) / f"{rank}.json").write_text(json.dumps([len(codes), sum(codes)]))


@NEEDS
def test_codes_are_divided(tiny_model_dir: Path, pairs: Path, tmp_path: Path) -> None:
    found = {}
    for way in ("on", "off"):
        settings = {"model": str(tiny_model_dir), "data": str(pairs), "output": str(tmp_path / way), "batch_size": 8,
                    "store": str(tmp_path / "store"), "max_steps": 1, "lora": {"rank": 4, "quantize": "nf4"},
                    "parallel": {"shard": way}}
        assert run_ranks(2, _held, settings, str(tmp_path)) == [0, 0]
        found[way] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found["off"][0] == found["off"][1]
    assert found["on"][0][0] == found["off"][0][0] > 0
    assert found["on"][0][1] + found["on"][1][1] == found["off"][0][1]


@pytest.mark.parametrize(("options", "sentence"), [
    ({"shard": "on"}, r"--parallel\.shard does not support DoRA"), ({"shard": 2}, r"--parallel\.shard does not"),
    ({"offload": True}, "--parallel.offload does not support DoRA")])
def test_dora_on_quantized_weights_is_not_sharded(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        parallelize(World(0, 2, torch.device("cpu")), ParallelOptions(**options), "does not support DoRA")
