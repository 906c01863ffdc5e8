"""Checks of policy and reference before step 1."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from tropism.data.batching.collate import Batch
from tropism.data.batching.pack import build_trees
from tropism.data.row_facts import facts_of
from tropism.data.rows import EncodedRow
from tropism.data.tree import PromptTree
from tropism.errors import ReferenceMismatchError, count_of
from tropism.observe.console import Voice
from tropism.train.engine import Engine
from tropism.train.out_of_memory import place_of
from tropism.train.score_packs import Fitting
from tropism.train.step_packs import StepPlanner


def check_reference(engine: Engine, planner: StepPlanner, named: str | None, forgive: bool, voice: Voice) -> None:
    """Compare policy and reference before step 1, and log how they differ.

    Args:
        named: a reference that may differ; None for the policy itself.
        forgive: train even if the policy differs from itself.

    Raises:
        ReferenceMismatchError: if it does.
    """
    if named is not None:
        _, total, count = _compare(engine, planner)
        voice.say(f"reference: {named}; mean |log-ratio| before training {total / max(count, 1):.3g} nats, over the "
                  f"{count_of(count, 'completion')} of step 1")
        return
    agree, sentence = check_first_step(engine, planner)
    if not agree and not forgive:
        raise ReferenceMismatchError(f"{sentence} To train anyway, pass --allow-reference-mismatch")
    (voice.say if agree else voice.warn)(sentence)


def check_first_step(engine: Engine, planner: StepPlanner) -> tuple[bool, str]:
    """Check that policy and reference agree before step 1: every margin is 0 and the loss has its known value.

    Returns:
        Whether they agree within rounding, and the sentence for the log.
    """
    differs, total, count = _compare(engine, planner)
    if differs:
        return False, (f"policy and reference differ before step 1: mean |log-ratio| {total / count:.3g} nats. "
                       "Possible causes are another reference model, changed scores in the store, active dropout, and "
                       "a different mask, dtype or layout.")
    first = [planner.rows[index] for index in planner.schedule.step(1)]
    known = engine.method.loss_at_start([row.desirable for row in first], engine.method.weights(first))
    return True, "policy and reference agree before step 1" + (
        f"; the first loss will be {known:.6f}" if known is not None else "")


def _compare(engine: Engine, planner: StepPlanner) -> tuple[bool, float, int]:
    """Whether a log-ratio of step 1 exceeds rounding, the sum of their absolute values, and their number."""
    beta, found = engine.method.beta, (False, 0.0, 0)
    rows = [planner.rows[index] for index in planner.schedule.step(1)]
    compare = Fitting(engine.model, partial(_gaps, engine), engine.world, partial(place_of, rows))
    packs = planner.packs_of(1).packs
    for gap, most in engine.world.computed(lambda: [entry for pack in packs for entry in compare(pack.trees)]):
        differs = not beta * gap <= most  # NaN differs too
        found = (found[0] or differs, found[1] + gap, found[2] + 1)
    everywhere = engine.world.of_parts(found)
    return (any(differs for differs, _, _ in everywhere), sum(total for _, total, _ in everywhere),
            sum(count for _, _, count in everywhere))


def _gaps(engine: Engine, trees: Sequence[PromptTree], batch: Batch) -> list[tuple[float, float]]:
    """|log-ratio| of each completion, and the largest reward that rounding can cause."""
    scored = engine.score(trees, batch, distill=False)
    return list(zip(scored.logratios.abs().tolist(), engine.noise(scored).tolist(), strict=True))


def probe_trees(rows: Sequence[EncodedRow], microbatch_tokens: int) -> list[PromptTree]:
    """Up to three short trees for the start-up comparison. More than one, so that leaks between them show."""
    facts = facts_of(rows)
    lengths = facts.prompt_tokens * facts.sides + facts.tokens.sum(1)
    by_length = np.argsort(lengths, kind="stable").tolist()
    quarter = len(by_length) // 4
    chosen: dict[bytes, int] = {}
    for i in by_length[quarter:] + by_length[:quarter]:
        chosen.setdefault(rows[i].tree_key, i)
        if len(chosen) == 3 or sum(rows[j].flat_tokens for j in chosen.values()) > microbatch_tokens:
            break
    return [planted.tree for planted in build_trees(rows, list(chosen.values()))]
