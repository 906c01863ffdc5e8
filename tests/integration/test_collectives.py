"""How often the processes of a sharded model exchange weights and gradients in a step, and that no result depends on
it."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from integration.conftest import distance
from processes import run_ranks

LAYERS = 2
GATHERS, SUMS, REDUCES = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allreduce_"


class Collectives(TorchDispatchMode):
    """Counts collective operations by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.found[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def _steps(rank: int, size: int, port: int, folder: str, jobs: Sequence[tuple[str, str, dict[str, Any]]]) -> None:
    """Two steps of each run, by packs: collectives of the second one, and the weights and log-probs after it."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    from tropism.config import METHODS
    from tropism.data.batching.collate import collate
    from tropism.distributed import connect
    from tropism.distributed.shard import gathered
    from tropism.observe.console import Voice
    from tropism.runner import Run
    from tropism.train.retry import attempt
    from tropism.train.setup.checks import probe_trees
    from tropism.train.step import train_step

    with connect() as world:
        for name, method, settings in jobs:
            run = Run(METHODS[method](**settings), world, Voice(loud=False))
            engine = run.build()
            assert engine.model.gather_once == (size > 1)  # the tiny model fits
            engine = replace(engine, model=replace(engine.model, gather_once="once" in name, sum_once="once" in name))
            batch = collate(probe_trees(run.inputs.data.train, 512), engine.model.layout)
            with torch.no_grad():
                before = engine.model.logps(batch)
            attempt(engine, run.planner.packs_of(1), train_step)
            packs = run.planner.packs_of(2)
            with Collectives() as calls:
                attempt(engine, packs, train_step)
            with torch.no_grad():
                after = engine.model.logps(batch)
            module = engine.model.module
            assert not size > 1 or sum(hasattr(weight, "to_local") for weight in module.parameters()) > LAYERS
            state = gathered(dict(module.named_parameters()), torch.float64, True)
            if rank == 0:
                torch.save([state, before, after], Path(folder) / f"{name}-{size}.pt")
                found = {"packs": len(packs.packs), "mismatched": len(packs.mismatched), **calls.found}
                (Path(folder) / f"{name}-{size}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, feedback: Path, pairs: Path) -> Path:
    """Runs in float64 with the tied head of the tiny model, and in bfloat16 with a head of its own."""
    folder = tmp_path_factory.mktemp("collectives")
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model_dir, tie_word_embeddings=False)
                                     ).save_pretrained(folder / "apart")
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(folder / "apart")
    common = {"model": str(tiny_model_dir), "batch_size": 8, "max_steps": 4, "samples": 0, "output": str(folder / "no"),
              "store": str(folder / "store"), "parallel": {"shard": "on"}, "learning_rate": 1e-2}
    jobs = [(f"{method}-{precision}-{way}", method, {
        **common, "data": str(data), "precision": precision, "microbatch_tokens": 100,
        **({"model": str(folder / "apart")} if precision == "bf16" else {})})
        for method, data in (("kto", feedback), ("dpo", pairs)) for precision in ("fp64", "bf16")
        for way in ("once", "pass") if (method, precision) != ("kto", "bf16")]
    jobs += [("leaves-fp64-once", "kto", {**common, "data": str(feedback), "precision": "fp64",
                                          "microbatch_tokens": 4096})]
    assert run_ranks(2, _steps, str(folder), jobs) == [0, 0]
    assert run_ranks(1, _steps, str(folder), [job for job in jobs if "once" in job[0]]) == [0]
    return folder


def test_exchanges_of_a_step(done: Path) -> None:
    """A unit per layer, and one for the rest; in bfloat16 one for the embedding, and one for the head. Norms and other
    vectors are summed once per step, and not gathered."""
    for file in done.glob("*-2.json"):
        found, name = json.loads(file.read_text()), file.stem
        outside = 2 if "bf16" in name else 1
        units = LAYERS + outside
        packs, alone = found["packs"], found["mismatched"]
        assert packs > 2 or "leaves" in name
        if "once" in name:
            assert (found[GATHERS], found[SUMS]) == (units, units), name
        else:  # layers once for the forward and once for the backward pass
            gathers = packs * (2 * LAYERS + outside) + alone * units
            assert (found[GATHERS], found[SUMS]) == (gathers, packs * units), name
        assert found[REDUCES] <= 4, name


def test_no_result_depends_on_it(done: Path) -> None:
    """Nothing stale is left: not in the weights, nor in what they compute after the update."""
    for name, bound in (("kto-fp64", 1e-8), ("dpo-fp64", 1e-8), ("dpo-bf16", 0.1), ("leaves-fp64", 1e-8)):
        expected, start, end = torch.load(done / f"{name}-once-1.pt")
        for way in ("once", "pass"):
            if (done / f"{name}-{way}-2.pt").exists():
                weights, before, after = torch.load(done / f"{name}-{way}-2.pt")
                size = distance(weights, {key: value * 0 for key, value in weights.items()})
                assert distance(weights, expected) < bound * 1e-2 * size, (name, way)
                assert torch.allclose(before, start, rtol=1e-12), (name, way)  # in bfloat16 too
                assert torch.allclose(after, end, rtol=bound), (name, way)
