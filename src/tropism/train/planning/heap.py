"""Gaps that freed tensors leave in the heap of the C library during a forward pass on a CPU.

torch aligns tensors by `posix_memalign`, which takes up to 96 bytes more than they have and gives the rest back to
small objects. So what a freed tensor leaves is too small for another one of its size, and small objects keep neighbors
from merging: only smaller tensors fit. With adapters, whose layers free as much as they keep, gaps are as large as the
activations. A backward pass frees whole regions, which merge.
"""

from bisect import bisect_left, insort

_ALIGNMENT = 96


class Gaps:
    """The gaps of one forward pass.

    Attributes:
        total: their bytes.
    """

    def __init__(self) -> None:
        self.total = 0
        self._sizes: list[int] = []

    def allocate(self, size: int) -> None:
        """A tensor takes the smallest gap that it fits into, if any."""
        place = bisect_left(self._sizes, size + _ALIGNMENT)
        if place < len(self._sizes):
            rest = self._sizes.pop(place) - size
            self.total -= size
            insort(self._sizes, rest)

    def free(self, size: int) -> None:
        """A tensor leaves a gap."""
        self.total += size
        insort(self._sizes, size)
