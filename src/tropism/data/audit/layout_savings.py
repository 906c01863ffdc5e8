"""What the tree layout saves on a set of rows, before anything is trained."""

from collections.abc import Sequence

import numpy as np

from tropism.data.audit.findings import Finding, percent
from tropism.data.batching.pack import build_trees
from tropism.data.row_facts import Integers, RowFacts, evenly_spaced, facts_of, first_of, groups
from tropism.data.rows import EncodedRow
from tropism.data.schedule import Schedule

_ALL = 50_000  # rows that are looked at where completions may begin one another; of more, a sample
_SAMPLE = 20_000  # rows of it


def layout_savings(rows: Sequence[EncodedRow], batch_size: int, *, seed: int = 0, shuffle: bool = True) -> Finding:
    """What one epoch computes: every completion with its own prompt, as trees, and as trees of whole prompts."""
    facts = facts_of(rows)
    flat, prompts = facts.flat_tokens, facts.prompt_numbers
    grouped, guessed = _computed(rows, facts, prompts)  # whole prompts are the same trees, whatever the steps are
    trees, about = grouped, guessed
    if prompts.max() + 1 < len(rows):
        planted = groups(_steps(prompts, batch_size, seed, shuffle), prompts)
        if planted.max() > prompts.max():
            trees, about = _computed(rows, facts, planted)
    text = (f"with steps of {batch_size} rows the tree layout computes {_tokens(trees, about)} of {flat:,} tokens an "
            f"epoch ({percent(1 - trees / flat)} saved); with --group-prompts {_tokens(grouped, guessed)} "
            f"({percent(1 - grouped / flat)} saved)")
    worth = trees - grouped > 0.1 * flat
    if worth:
        text += ". --group-prompts is worth it here, if seeing all answers of a prompt in one step is fine for you"
    return Finding("layout", "notice" if worth else "info", text, (), {
        "batch_size": batch_size, "flat_tokens": flat, "tree_tokens": trees, "grouped_tokens": grouped})


def _tokens(count: int, about: bool) -> str:
    return f"about {count:,}" if about else f"{count:,}"


def _steps(prompts: Integers, batch_size: int, seed: int, shuffle: bool) -> Integers:
    """`[n]` the step of the first epoch that takes each row."""
    plan = Schedule(tuple(prompts.tolist()), batch_size, seed, shuffle=shuffle)
    found = np.zeros(len(prompts), dtype=np.int64)
    for step in range(1, plan.total_steps + 1):
        found[plan.step(step)] = step
    return found


def _computed(rows: Sequence[EncodedRow], facts: RowFacts, trees: Integers) -> tuple[int, bool]:
    """Tokens that the tree layout computes, and whether that is a guess.

    All but one thing follows from counts: a completion that begins another of its tree costs nothing, and which do
    only the ids know. Trees where it could be so are looked at; what they save in a sample is taken for the others.

    Args:
        trees: `[n]` the tree of each row, numbered as `groups` does.
    """
    row, side = np.nonzero(facts.tokens)
    distinct = first_of(groups(trees[row], facts.completion[row, side]))
    owner, tokens = trees[row][distinct], facts.tokens[row, side][distinct] - 1  # the last one predicts nothing
    prompt = facts.prompt_tokens[first_of(trees)]
    answers = np.bincount(owner, weights=tokens, minlength=len(prompt)).astype(np.int64)
    members = np.bincount(trees, minlength=len(prompt))
    several = np.flatnonzero(np.bincount(owner[tokens > 0], minlength=len(prompt)) > 1)
    looked = several
    if members[several].sum() > _ALL:
        small = several[members[several] <= _SAMPLE]
        looked = small[evenly_spaced(len(small), len(small) * _SAMPLE // max(int(members[small].sum()), 1))]
        looked = looked[np.cumsum(members[looked]) <= _ALL]  # sizes differ, so they may be more than meant
    order, ends = np.argsort(trees, kind="stable"), np.cumsum(members)
    saved = 0
    for tree in looked.tolist():
        some = [rows[i] for i in order[ends[tree] - members[tree] : ends[tree]].tolist()]
        saved += int(prompt[tree] + answers[tree]) - build_trees(some, range(len(some)))[0].tree.tokens
    about = len(looked) < len(several)
    if about and len(looked):
        saved = round(saved * int(answers[several].sum()) / int(answers[looked].sum()))
    return int(prompt.sum() + answers.sum()) - saved, about
