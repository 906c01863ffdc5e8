"""The training loop: a generator of records. It reads like the algorithm; observers only read what it yields."""

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from tropism.errors import NonFiniteError
from tropism.losses.scored import Scored
from tropism.observe.metrics import means
from tropism.train.evaluate import point_record
from tropism.train.memory import peak_gib
from tropism.train.step import Engine, StepOutcome, train_step
from tropism.train.work import Planner, StepWork


@dataclass(frozen=True, slots=True)
class Record:
    """One line of `metrics.jsonl`."""

    step: int
    split: str
    metrics: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """The line as it is written."""
        return {"step": self.step, "split": self.split, **self.metrics}


@dataclass(frozen=True)
class Plan:
    """When to do what.

    Args:
        log_every: steps per train record.
        eval_every: steps between evaluations; 0 for start and end only.
        save_every: steps between saved models; 0 saves none on the way.
        workers: threads that prepare steps ahead.
    """

    log_every: int
    eval_every: int
    save_every: int = 0
    workers: int = 0


@dataclass
class _Window:
    """The steps since the last record."""

    outcomes: list[StepOutcome] = field(default_factory=list)
    tokens: int = 0
    began: float = field(default_factory=time.monotonic)


def train(engine: Engine, planner: Planner, evaluate: Callable[[Engine], dict[str, float]] | None,
          plan: Plan, save: Callable[[int], None] = lambda step: None) -> Iterator[Record]:
    """Run the whole schedule.

    Args:
        evaluate: gives the metrics of the policy as it is (an `Evaluator`); None if nothing is held out.
        save: keeps the policy as it is after a step.

    Raises:
        NonFiniteError: at the first record after a step whose loss or gradient was not finite; that step changed
            nothing. The rows are named.
    """
    schedule = planner.schedule
    totals = {"examples": 0, "tokens": 0, "tokens/computed": 0}
    if evaluate is not None:
        yield Record(0, "eval", evaluate(engine))
    window = _Window()
    for work in _prepared(planner, plan.workers):
        window.outcomes.append(train_step(engine, work))
        window.tokens += work.flat_tokens
        totals["examples"] += work.units
        totals["tokens"] += work.flat_tokens
        totals["tokens/computed"] += work.computed_tokens
        last = work.step == schedule.total_steps
        if last or work.step % plan.log_every == 0:
            metrics = _read(engine, window, planner.rows)
            metrics |= {"learning_rate": window.outcomes[-1].learning_rate,
                        "epoch": schedule.epochs_after(work.step), **totals}
            yield Record(work.step, "train", metrics)
            window = _Window()
        if evaluate is not None and (last or (plan.eval_every and work.step % plan.eval_every == 0)):
            paused = time.monotonic()
            yield Record(work.step, "eval", evaluate(engine))
            window.began += time.monotonic() - paused  # an evaluation is no part of a step's time
        if plan.save_every and work.step % plan.save_every == 0 and not last:
            paused = time.monotonic()
            save(work.step)
            window.began += time.monotonic() - paused


def _prepared(planner: Planner, workers: int) -> Iterator[StepWork]:
    """Each step's work in order; with workers, some steps ahead."""
    steps = range(1, planner.schedule.total_steps + 1)
    if not workers:
        yield from map(planner.work, steps)
        return
    with ThreadPoolExecutor(workers) as pool:
        ahead = [pool.submit(planner.work, step) for step in steps[: workers + 1]]
        for step in steps:
            if step + workers + 1 <= len(steps):
                ahead.append(pool.submit(planner.work, step + workers + 1))
            yield ahead.pop(0).result()


def _read(engine: Engine, window: _Window, rows: Any) -> dict[str, float]:
    """The window's metrics: the one place where the host waits for the device."""
    world, device = engine.world, engine.model.device
    keys = engine.method.metric_keys
    sums = torch.stack([outcome.tally.stacked(keys, device) for outcome in window.outcomes]).sum(0)
    totals = world.sum(sums)
    finite = torch.stack([outcome.finite for outcome in window.outcomes])
    if not bool(finite.all()):
        raise _non_finite(engine, window, rows)
    metrics = engine.method.combine(means(keys, totals.cpu()))
    outcome = window.outcomes[-1]
    if outcome.point is not None:
        metrics |= point_record(outcome.point)
    seconds = max(time.monotonic() - window.began, 1e-9)
    metrics["grad_norm"] = float(outcome.grad_norm)
    metrics["step_time"] = seconds / len(window.outcomes)
    metrics["tokens_per_second"] = window.tokens / seconds
    metrics["memory/peak_gib"] = peak_gib(device)
    return metrics


def _non_finite(engine: Engine, window: _Window, rows: Any) -> NonFiniteError:
    """The error of the first step that was not finite, with the rows whose loss was not."""
    outcome = next(outcome for outcome in window.outcomes if not bool(outcome.finite))
    bad = [(math.isfinite(own), index) for values, indices in outcome.losses
           for loss, own, index in zip(*values.tolist(), indices, strict=True) if not math.isfinite(loss)]
    found = [entry for part in engine.world.gather(bad) for entry in part]
    # What comes from the whole step carries one row's NaN into the losses of others, which are not to blame.
    named = [rows[index] for innocent, index in found if not innocent] or [rows[index] for _, index in found]
    if named:
        listed = ", ".join(f"{row.id} ({row.place})" if row.id != row.place else row.id for row in named[:10])
        what = f"the loss of {len(named)} rows is not finite: {listed}"
    else:
        what = f"all losses are finite, but the gradient is not (norm {float(outcome.grad_norm)})"
    return NonFiniteError(f"step {outcome.step}: {what}. The step changed nothing. A lower learning rate or "
                          "--max-grad-norm, or fp32 instead of bf16, may help; look at these rows first")


def check_first_step(engine: Engine, planner: Planner) -> tuple[bool, str]:
    """Before step 1 policy and reference must agree: every margin is 0 and the loss has its known value.

    Returns:
        Whether they agree within rounding, and the sentence that says what was found.
    """
    model, beta, reference = engine.model, engine.method.beta, engine.reference
    assert reference is not None
    found = (False, 0.0, 0)
    with torch.no_grad():
        for pack in planner.work(1).packs:
            batch = pack.batch.to(model.device)
            scored = Scored(model.logps(batch), reference.score(pack.trees, batch), batch.lengths)
            gaps = scored.logratios.abs()
            differs = not bool((beta * gaps <= engine.noise(scored)).all())  # NaN differs too
            found = (found[0] or differs, found[1] + float(gaps.sum()), found[2] + len(gaps))
    everywhere = engine.world.gather(found)
    if any(differs for differs, _, _ in everywhere):
        mean = sum(total for _, total, _ in everywhere) / sum(count for _, _, count in everywhere)
        return False, (f"policy and reference differ before training: mean |log-ratio| {mean:.3g}. Is the reference "
                       "another model, is dropout on, or do the two passes differ in mask, dtype or layout?")
    known = engine.method.at_start([planner.rows[index].desirable for index in planner.schedule.step(1)])
    return True, "policy and reference agree before training" + (
        f"; the first loss will be {known:.6f}" if known is not None else "")

