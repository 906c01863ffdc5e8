"""Learning rates, batch sizes and numbers of epochs that are known to work, by method and size of the model."""

from typing import NamedTuple


class Rate(NamedTuple):
    """A learning rate.

    Args:
        value: of AdamW, at the peak.
        why: in words.
    """

    value: float
    why: str


_BILLION, _TENTH, _LARGE = 10**9, 10**8, 3 * 10**9
_FULL = {"kto": (5e-6, 2e-5, 5e-5), "dpo": (1e-6, 5e-6, 2e-5), "sft": (2e-5, 5e-5, 2e-4), "kd": (2e-5, 5e-5, 2e-4)}
"""Of all weights: from a billion weights on, from a tenth of that on, and below."""
_ADAPTER = {"kto": (5e-5, 1e-4), "dpo": (2e-5, 5e-5), "sft": (2e-4, 2e-4), "kd": (2e-4, 2e-4)}
"""Of adapters: from three billion weights on, and below."""
_SOURCE = {"kto": "the KTO paper takes 5e-6 for 1B to 30B weights", "dpo": "published DPO runs take 5e-7 to 1e-6 at 7B",
           "sft": "usual for SFT", "kd": "usual for SFT"}
_ADAPTER_SOURCE = {"kto": "ten times the rate of full training, as adapters need",
                   "dpo": "ten times the rate of full training, as adapters need",
                   "sft": "the QLoRA paper takes 2e-4 up to 13B weights",
                   "kd": "the QLoRA paper takes 2e-4 up to 13B weights"}

_BATCHES = ((640, 32), (128, 16), (32, 8), (0, 4))
"""From so many training rows on, so many rows per optimizer step: 20 steps and more per pass, at most 32 rows."""
_STEPS = {"kto": 60, "dpo": 60, "sft": 150, "kd": 150}
_MOST_EPOCHS = 3


def rate(method: str, weights: int, adapter: bool) -> Rate:
    """The learning rate.

    Args:
        weights: of the model, in number.
        adapter: an adapter is trained, not all weights.
    """
    size = f"{weights / 1e9:.2g}B weights" if weights >= _TENTH else f"{weights / 1e6:.2g}M weights"
    if adapter:
        return Rate(_ADAPTER[method][weights < _LARGE], f"for an adapter on {size}: {_ADAPTER_SOURCE[method]}")
    place = 0 if weights >= _BILLION else 1 if weights >= _TENTH else 2
    more = ", and smaller models take more" if place else ""
    return Rate(_FULL[method][place], f"for {size}: {_SOURCE[method]}{more}")


def batch_size(rows: int) -> int:
    """Rows per optimizer step.

    Args:
        rows: of the training data.
    """
    return max(1, min(next(size for least, size in _BATCHES if rows >= least), rows))


def epochs(method: str, steps: int) -> int:
    """Passes over the data.

    Args:
        steps: of one pass.
    """
    return max(1, min(_MOST_EPOCHS, round(_STEPS[method] / max(steps, 1))))
