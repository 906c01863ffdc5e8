"""Check that weights are numbers before anything is computed with them."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tropism.distributed.shard import part_of
from tropism.errors import ModelError


def check_finite(weights: Iterable[tuple[str, Tensor]], place: str) -> None:
    """Check that no weight is NaN or infinite. Buffers may be infinite, as masks are.

    Args:
        weights: by name. Of a sharded weight, the part of this process is checked.
        place: the model, adapter or file.

    Raises:
        ModelError: with the first such weight and the number of such values in it.
    """
    for name, weight in weights:
        part = part_of(weight.detach())
        # A sum is finite only if each of its terms is, and costs a tenth of looking at each.
        if not part.is_floating_point() or part.is_meta:
            continue
        part = part.float() if part.itemsize == 1 else part  # 8-bit floats have no sum
        if torch.isfinite(part.sum()):
            continue
        if bad := int((~torch.isfinite(part)).sum()):
            raise ModelError(f"{place}: the weights are corrupted: {bad:,} of the {part.numel():,} values of {name} "
                             f"{'is' if bad == 1 else 'are'} NaN or infinite. Use an intact copy.")
