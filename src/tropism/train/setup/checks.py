"""Checks of policy and reference before step 1."""

from collections.abc import Sequence

import numpy as np
import torch

from tropism.data.batching.pack import build_trees
from tropism.data.row_facts import facts_of
from tropism.data.rows import EncodedRow
from tropism.data.tree import PromptTree
from tropism.train.engine import Engine
from tropism.train.step_packs import StepPlanner


def check_first_step(engine: Engine, planner: StepPlanner) -> tuple[bool, str]:
    """Check that policy and reference agree before step 1: every margin is 0 and the loss has its known value.

    Returns:
        Whether they agree within rounding, and the sentence for the log.
    """
    beta, found = engine.method.beta, (False, 0.0, 0)
    with torch.no_grad():
        for pack in planner.packs_of(1).packs:
            scored = engine.score(pack.trees, pack.batch.to(engine.model.device), distill=False)
            gaps = scored.logratios.abs()
            differs = not bool((beta * gaps <= engine.noise(scored)).all())  # NaN differs too
            found = (found[0] or differs, found[1] + float(gaps.sum()), found[2] + len(gaps))
    everywhere = engine.world.of_parts(found)
    if any(differs for differs, _, _ in everywhere):
        mean = sum(total for _, total, _ in everywhere) / sum(count for _, _, count in everywhere)
        return False, (f"policy and reference differ before step 1: mean |log-ratio| {mean:.3g} nats. Possible causes "
                       "are another reference model, active dropout, and a different mask, dtype or layout.")
    known = engine.method.loss_at_start([planner.rows[index].desirable for index in planner.schedule.step(1)])
    return True, "policy and reference agree before step 1" + (
        f"; the first loss will be {known:.6f}" if known is not None else "")


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
