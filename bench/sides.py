"""The two sides of `against_trl.py`: how each is set up in its process, and how it takes one step."""

import argparse
import ctypes
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tropism.config import METHODS, MethodOptions
from tropism.data.rows import EncodedRow
from tropism.data.tree import score_key
from tropism.distributed import connect
from tropism.model import load
from tropism.model.source import ModelSource
from tropism.observe.console import Voice
from tropism.runner import Run
from tropism.train.memory import keep_freed_memory
from tropism.train.step import train_step

LEARNING_RATE, MAX_GRAD_NORM = 1e-6, 1.0
TrlBatch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Job:
    """The work that all sides do.

    Args:
        options: of the run.
        steps: the rows of each step, in order.
        known_loss: what the loss of step 1 must be.
        micro_batch: rows of a micro-batch of tuned TRL; None to try several.
        threads: of each side.
    """

    options: MethodOptions
    steps: list[list[EncodedRow]]
    known_loss: float
    micro_batch: int | None
    threads: int

    @property
    def numbers(self) -> range:
        """Step numbers, from 1."""
        return range(1, len(self.steps) + 1)

    def step(self, number: int) -> list[EncodedRow]:
        """Rows of a step, from 1, in order."""
        return self.steps[number - 1]


def make_job(args: argparse.Namespace) -> Job:
    """Read the data and plan the steps."""
    with connect() as world, tempfile.TemporaryDirectory() as store:
        options = METHODS[args.method](
            model=args.model, data=args.data, output=str(Path(store) / "unused"), store=store,
            batch_size=args.batch_size, max_steps=args.steps, max_length=args.max_length,
            group_prompts=args.group_prompts, microbatch_tokens=args.microbatch_tokens, precision=args.precision,
            learning_rate=LEARNING_RATE, schedule="constant", warmup_ratio=0.0, max_grad_norm=MAX_GRAD_NORM)
        run = Run(options, world, Voice(loud=False))
        steps = [[run.inputs.data.train[index] for index in run.inputs.schedule.step(number)]
                 for number in range(1, run.inputs.schedule.total_steps + 1)]
        known = run.inputs.method.loss_at_start([row.desirable for row in steps[0]])
    assert known is not None, "the first loss of KTO and DPO is known"
    return Job(options, steps, known, args.micro_batch, args.threads or torch.get_num_threads())


@dataclass(frozen=True)
class Taken:
    """What one optimizer step took, and its results."""

    wall_s: float
    cpu_s: float
    loss: float
    grad_norm: float


def serve(pipe: Connection, note: str, logps: Sequence[float], weights: Sequence[torch.Tensor],
          step: Callable[[int], tuple[float, float]]) -> None:
    """Take the steps whose numbers come through the pipe and send back what each took; None ends the loop."""
    watched = weights[len(weights) // 2]
    before = watched.detach().clone()
    restart_peak()
    pipe.send((note, list(logps)))
    while (number := pipe.recv()) is not None:
        wall, cpu = time.perf_counter(), time.process_time()
        loss, norm = step(number)
        pipe.send(Taken(time.perf_counter() - wall, time.process_time() - cpu, loss, norm))
    pipe.send((peak_gib(), float((watched.detach() - before).abs().max())))


def restart_peak() -> None:
    """Return unused memory to the system and reset the peak, so that setup does not count (Linux)."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peak_gib() -> float:
    """Largest resident memory of this process since `restart_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 2**20
    raise OSError("no VmHWM in /proc/self/status")


def ours(pipe: Connection, job: Job) -> None:
    """Tropism as `tropism` runs it, except that the steps are driven from outside."""
    torch.set_num_threads(job.threads)
    with connect() as world, tempfile.TemporaryDirectory() as store:
        run = Run(job.options.model_copy(update={"store": store}), world, Voice(loud=False))
        engine = run.build()
        planned = {number: run.planner.packs_of(number) for number in job.numbers}
        # At step 0 the reference is the policy: its stored scores are the policy's log-probs.
        assert engine.reference is not None
        logps = [engine.reference.scores[score_key(row.prompt_ids, completion)]  # type: ignore[attr-defined]
                 for row in job.step(1) for completion in row.completions]

        def step(number: int) -> tuple[float, float]:
            outcome = train_step(engine, planned[number])
            total, count = outcome.tally.stacked(["loss"], world.device)[0].tolist()
            return total / count, float(outcome.grad_norm)

        flat, computed = (sum(getattr(packs, name) for packs in planned.values())
                          for name in ("flat_tokens", "computed_tokens"))
        note = (f"{engine.model.layout} layout, packs of {run.planner.microbatch_tokens} tokens, "
                f"{len(planned[1].packs)} in step 1; {computed} tokens computed for {flat} flat ones")
        serve(pipe, note, logps, list(engine.model.module.parameters()), step)


def trl(pipe: Connection, job: Job, tuned: bool, malloc: str) -> None:
    """TRL's trainer, driven step by step: `training_step` of each micro-batch, clip, optimizer."""
    if malloc == "ours":
        keep_freed_memory()
    torch.set_num_threads(job.threads)
    rival = Rival(job, tuned)
    largest = max(len(job.step(number)) for number in job.numbers)
    tried = ""
    if tuned and job.micro_batch is None:
        smallest = 2 if job.options.method == "kto" else 1  # KTO takes its mismatched completions from within
        sizes = [largest] + [2**n for n in range(8, -1, -1) if smallest <= 2**n < largest]
        times = rival.try_sizes(sizes)
        micro = min(times, key=times.__getitem__)
        tried = "; tried " + ", ".join(f"{size}: {seconds:.1f} s" for size, seconds in times.items())
    else:
        micro = (job.micro_batch if tuned else None) or largest
    batches = {number: rival.batches(number, micro) for number in job.numbers}
    padded = sum(batch[name].numel() for parts in batches.values() for batch, _ in parts
                 for name in ("input_ids", "KL_input_ids") if name in batch)
    note = (f"micro-batch {micro}{tried}; reference {'precomputed' if tuned else 'live'}, checkpointing "
            f"{'off' if tuned else 'on'}, {malloc} malloc; {padded} padded tokens, mismatched included")
    serve(pipe, note, rival.logps([batch for batch, _ in batches[1]]), list(rival.model.parameters()),
          lambda number: rival.step(batches[number]))


class Rival:
    """A TRL trainer on our token ids.

    Args:
        job: rows and order.
        tuned: reference log-probs precomputed and no gradient checkpointing; else TRL's defaults for both.
    """

    def __init__(self, job: Job, tuned: bool) -> None:
        import datasets
        import trl as library

        self.job, self.tuned, self.kto = job, tuned, job.options.method == "kto"
        config, trainer = ((library.KTOConfig, library.KTOTrainer) if self.kto
                           else (library.DPOConfig, library.DPOTrainer))

        class Given(trainer):  # type: ignore[misc, valid-type]
            """Takes rows that are ids already."""

            def _prepare_dataset(self, dataset: Any, *rest: Any) -> Any:
                return dataset

        rows = job.step(1)
        settings: dict[str, Any] = {
            "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": len(rows), "report_to": "none",
            "learning_rate": LEARNING_RATE, "weight_decay": 0.0, "max_grad_norm": MAX_GRAD_NORM,
            "max_length": job.options.max_length, "bf16": job.options.precision == "bf16", "use_cpu": True, "beta": 0.1,
            "model_init_kwargs": {"dtype": "float32"}}
        if tuned:
            settings |= {"precompute_ref_log_probs": True, "gradient_checkpointing": False}
        data = datasets.Dataset.from_list(self._examples(rows[:2]))  # the trainer wants one; batches are made below
        self.trainer = Given(model=job.options.model, args=config(**settings), train_dataset=data,
                             processing_class=load.load_tokenizer(ModelSource.of(job.options.model)))
        if self.trainer.args.gradient_checkpointing:
            self.trainer.model.gradient_checkpointing_enable(self.trainer.args.gradient_checkpointing_kwargs)
        self.model, self.trainer.optimizer = self.trainer.accelerator.prepare(
            self.trainer.model, self.trainer.create_optimizer())

    def _examples(self, rows: Sequence[EncodedRow]) -> list[dict[str, Any]]:
        """TRL's processed columns of some rows, from our ids."""
        ids = [[completion.ids.tolist() for completion in row.completions] for row in rows]
        if not self.kto:
            return [{"prompt_ids": row.prompt_ids.tolist(), "chosen_ids": chosen, "rejected_ids": rejected}
                    for row, (chosen, rejected) in zip(rows, ids, strict=True)]
        return [{"prompt_ids": row.prompt_ids.tolist(), "completion_ids": ids[i][0],
                 "KL_completion_ids": ids[i - 1][0], "label": row.desirable} for i, row in enumerate(rows)]

    def batches(self, number: int, micro: int) -> list[tuple[TrlBatch, float]]:
        """Collated micro-batches of a step, each with its share of the step's rows."""
        rows = self.job.step(number)
        made = []
        for start in range(0, len(rows), micro):
            part = rows[start : start + micro]
            batch = self.trainer.data_collator(self._examples(part))
            if self.tuned:
                names = ("ref_logps", "ref_KL_logps") if self.kto else ("ref_chosen_logps", "ref_rejected_logps")
                batch |= zip(names, self.trainer.compute_ref_log_probs(self.model, batch), strict=True)
            made.append((batch, len(part) / len(rows)))
        return made

    def logps(self, batches: Sequence[TrlBatch]) -> list[float]:
        """The policy's log-probs of the batches' completions, row by row."""
        both = [self.trainer.compute_ref_log_probs(self.model, batch) for batch in batches]
        return [value for sides in both
                for values in zip(*(side.tolist() for side in sides[: 1 if self.kto else 2]), strict=True)
                for value in values]

    def backward(self, batches: Sequence[tuple[TrlBatch, float]]) -> float:
        """Gradients of a step; returns its loss."""
        loss = 0.0
        for batch, share in batches:
            self.trainer.current_gradient_accumulation_steps = 1 / share
            loss += float(self.trainer.training_step(self.model, dict(batch)))
        return loss

    def step(self, batches: Sequence[tuple[TrlBatch, float]]) -> tuple[float, float]:
        """Loss and gradient norm of one optimizer step."""
        loss = self.backward(batches)
        norm = self.trainer.accelerator.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.trainer.optimizer.step()
        self.model.zero_grad()
        return loss, float(norm)

    def try_sizes(self, sizes: Sequence[int]) -> dict[int, float]:
        """Seconds of the first step's gradients by micro-batch, after one that is thrown away."""
        times = {}
        for size in (sizes[-1], *sizes):
            batches = self.batches(1, size)
            began = time.perf_counter()
            self.backward(batches)
            times[size] = time.perf_counter() - began
            self.model.zero_grad()
        return times
