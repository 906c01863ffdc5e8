"""Tropism's side of a comparison."""

import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from harness.flops import Size, measured_peak, necessary
from harness.serving import Ready, serve, state_bytes
from harness.work import Job
from tropism.data.tree import score_key
from tropism.distributed import connect
from tropism.observe.console import Voice
from tropism.observe.metrics import means
from tropism.runner import Run
from tropism.train.engine import Engine
from tropism.train.step import train_step
from tropism.train.step_packs import StepPacks


def product(pipe: Connection, job: Job) -> None:
    """Tropism as `tropism` runs it, except that the steps are driven from outside."""
    torch.set_num_threads(job.cell.threads)
    with connect() as world, tempfile.TemporaryDirectory() as store:
        run = Run(job.cell.options(store), world, Voice(loud=False))
        engine = run.build()
        planned = {number: run.planner.packs_of(number) for number in job.numbers}

        def step(number: int) -> tuple[float, float]:
            outcome = train_step(engine, planned[number])
            return loss_of(engine, outcome), float(outcome.grad_norm)

        flat, computed = (sum(getattr(packs, name) for packs in planned.values())
                          for name in ("flat_tokens", "computed_tokens"))
        dtype = torch.bfloat16 if job.cell.precision == "bf16" else torch.float32
        facts = {"packs": [len(packs.packs) for packs in planned.values()], "computed_tokens": computed,
                 "flat_tokens": flat, "necessary_flops": [step_flops(engine, packs) for packs in planned.values()],
                 "peak_flops": measured_peak(job.device, dtype)}
        note = (f"{engine.model.layout} layout, packs of {run.planner.microbatch_tokens} tokens, "
                f"{len(planned[1].packs)} in step 1; {computed} tokens computed for {flat} flat ones")
        frozen = [module for role, module in engine.modules.items() if role != "policy"]
        serve(pipe, Ready(note, logps_of(engine, planned[1]), state_bytes(engine.model.module, *frozen), facts),
              list(engine.model.module.parameters()), job.device, step)


def loss_of(engine: Engine, outcome: Any) -> float:
    """The loss of a step."""
    keys = engine.metric_keys
    return engine.method.combine(means(keys, outcome.tally.stacked(keys, engine.model.device)))["loss"]


def logps_of(engine: Engine, packs: StepPacks) -> dict[bytes, float]:
    """Log-probs of a step's completions, by their keys."""
    found = {}
    for pack in packs.packs:
        with torch.no_grad():
            scored = engine.score(pack.trees, pack.batch.to(engine.model.device), distill=False)
        keys = [score_key(tree.prompt_ids, completion) for tree in pack.trees for completion in tree.completions]
        found |= dict(zip(keys, scored.logps.tolist(), strict=True))
    return found


def step_flops(engine: Engine, packs: StepPacks) -> float:
    """Necessary FLOPs of a step. Mismatched completions continue the step's prompts, even where packs prevent it."""
    apart: Sequence[Any] = packs.leaves or packs.mismatched
    teacher = engine.modules.get("teacher")
    return necessary(Size.of(engine.model.module), [tree for pack in packs.packs for tree in pack.trees],
                     [tree for pack in apart for tree in pack.trees], Size.of(teacher) if teacher is not None else None)
