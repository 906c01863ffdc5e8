"""How many tokens the tree layout saves on a set of rows."""

from collections.abc import Sequence

import numpy as np

from tropism.data.audit.findings import Finding, percent
from tropism.data.batching.pack import build_trees
from tropism.data.row_facts import Integers, RowFacts, evenly_spaced, facts_of, first_of, groups
from tropism.data.rows import EncodedRow
from tropism.data.schedule import Schedule

_ALL = 50_000  # rows up to which all trees with possible shared beginnings are built; above, a sample
_SAMPLE = 20_000  # rows of the sample


def layout_savings(rows: Sequence[EncodedRow], batch_size: int, *, seed: int = 0, shuffle: bool = True) -> Finding:
    """Tokens of one epoch: flat, in the tree layout, and in the tree layout with `--group-prompts`."""
    facts = facts_of(rows)
    flat, prompts, whole = facts.flat_tokens, facts.prompt_numbers, facts.tree_numbers
    if cut := not np.array_equal(prompts, whole):  # else these trees do not depend on the steps
        whole = groups(_steps(prompts, batch_size, seed, shuffle, group_prompts=True), whole)
    grouped, guessed = _computed(rows, facts, whole)
    trees, about = grouped, guessed
    if facts.tree_numbers.max() + 1 < len(rows):
        planted = groups(_steps(prompts, batch_size, seed, shuffle), facts.tree_numbers)
        if cut or planted.max() > whole.max():
            trees, about = _computed(rows, facts, planted)
    text = (f"with {batch_size} rows per optimizer step, the tree layout computes {_tokens(trees, about)} of "
            f"{flat:,} tokens per epoch and saves {percent(1 - trees / flat)}. With --group-prompts it computes "
            f"{_tokens(grouped, guessed)} and saves {percent(1 - grouped / flat)}.")
    worth = trees - grouped > 0.1 * flat
    if worth:
        text += " Consider --group-prompts: it puts all completions of a prompt into one step."
    return Finding("layout", "notice" if worth else "info", text, (), {
        "batch_size": batch_size, "flat_tokens": flat, "tree_tokens": trees, "grouped_tokens": grouped})


def _tokens(count: int, about: bool) -> str:
    return f"about {count:,}" if about else f"{count:,}"


def _steps(prompts: Integers, batch_size: int, seed: int, shuffle: bool, group_prompts: bool = False) -> Integers:
    """`[n]` the step of the first epoch that trains each row."""
    plan = Schedule(tuple(prompts.tolist()), batch_size, seed, shuffle=shuffle, group_prompts=group_prompts)
    found = np.zeros(len(prompts), dtype=np.int64)
    for step in range(1, plan.total_steps + 1):
        found[plan.step(step)] = step
    return found


def _computed(rows: Sequence[EncodedRow], facts: RowFacts, trees: Integers) -> tuple[int, bool]:
    """Tokens that the tree layout computes, and whether that is an estimate.

    Counts are enough except for one thing: a completion that is the beginning of another of its tree costs nothing,
    and only the ids tell. Trees with several completions are therefore built. In large data a sample of them is
    built, and its saving is extrapolated.

    Args:
        trees: `[n]` the tree of each row, numbered as by `groups`.
    """
    row, side = np.nonzero(facts.tokens)
    distinct = first_of(groups(trees[row], facts.completion[row, side]))
    owner, tokens = trees[row][distinct], facts.tokens[row, side][distinct] - 1  # the last token predicts nothing
    prompt = facts.prompt_tokens[first_of(trees)]
    completions = np.bincount(owner, weights=tokens, minlength=len(prompt)).astype(np.int64)
    members = np.bincount(trees, minlength=len(prompt))
    several = np.flatnonzero(np.bincount(owner[tokens > 0], minlength=len(prompt)) > 1)
    built = several
    if members[several].sum() > _ALL:
        small = several[members[several] <= _SAMPLE]
        built = small[evenly_spaced(len(small), len(small) * _SAMPLE // max(int(members[small].sum()), 1))]
        built = built[np.cumsum(members[built]) <= _ALL]  # sizes differ, so these may be more rows than intended
    order, ends = np.argsort(trees, kind="stable"), np.cumsum(members)
    saved = 0
    for tree in built.tolist():
        some = [rows[i] for i in order[ends[tree] - members[tree] : ends[tree]].tolist()]
        saved += int(prompt[tree] + completions[tree]) - build_trees(some, range(len(some)))[0].tree.tokens
    about = len(built) < len(several)
    if about and len(built):
        saved = round(saved * int(completions[several].sum()) / int(completions[built].sum()))
    return int(prompt.sum() + completions.sum()) - saved, about
