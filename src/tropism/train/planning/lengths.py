"""Counts models that loop over the tokens of a line in Python, as recurrences without kernels do.

Such a loop makes a count as slow as the lines are long. Its work is a polynomial of the length: linear for a
recurrence, quadratic with attention beside it. So lines of three short lengths give that of long ones. Memory is
linear in all but masks, whose part is small, and which moment of a phase needs most may depend on the length, which a
quadratic formula would blow up: the two longer ones give it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tropism.data.batching.collate import Batch
from tropism.train.planning.count import Count
from tropism.train.step_packs import StepPacks

_UNIT = 8
"""Shortest length that is counted; the others are its multiples."""
_LONG = 16 * _UNIT
"""Lines below this are counted as they are."""

CountSteps = Callable[[Sequence[StepPacks]], Count]


def over_lengths(count: CountSteps, steps: Sequence[StepPacks]) -> Count:
    """What steps in the padded layout take, with short lines if the model loops over them.

    Args:
        count: counts steps.
        steps: the lengths of their packs are rounded to an eighth of the longest one if lines are short.
    """
    longest = max(batch.input_ids.shape[1] for step in steps for batch in _batches(step))
    if longest < _LONG:
        return count(steps)

    def of(times: int) -> Count:
        return count([_shortened(step, times, longest) for step in steps])

    first, second = of(1), of(2)
    if second.total().launches < first.total().launches + _UNIT:
        return count(steps)
    third, size = of(3), longest / _UNIT
    work = first.along((second, -(size - 1) * (size - 3)), (third, (size - 1) * (size - 2) / 2))  # Lagrange's formula
    return replace(work, peaks=second.along((third, size - 2)).peaks)


def _batches(step: StepPacks) -> Iterator[Batch]:
    yield from (pack.batch for pack in step.packs)
    yield from (pack.batch for pack in step.mismatched)


def _shortened(step: StepPacks, times: int, longest: int) -> StepPacks:
    """A step whose longest line has `times` units, and other packs in proportion, with all supervised tokens."""
    def cut(pack: Any) -> Any:
        batch: Batch = pack.batch
        width = times * max(1, round(_UNIT * batch.input_ids.shape[1] / longest))
        lines = {name: getattr(batch, name)[:, :width].contiguous()
                 for name in ("input_ids", "position_ids", "attention_mask")}
        most = lines["input_ids"].numel() - 1
        return replace(pack, batch=replace(batch, **lines, predict_index=batch.predict_index.clamp(max=most)))

    return replace(step, packs=tuple(map(cut, step.packs)), mismatched=tuple(map(cut, step.mismatched)))
