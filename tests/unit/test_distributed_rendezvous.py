"""Processes of one attempt meet where none of an earlier one has left anything."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from tropism.distributed.rendezvous import meeting_place
from tropism.errors import TropismError


def meet(store: HashStore, ranks: list[int], size: int, patience: float = 30) -> list[bytes]:
    """Every rank leaves its number in the place, in a thread of its own; what the others then read."""
    gate = threading.Barrier(len(ranks))

    def one(rank: int) -> bytes:
        gate.wait()
        place = meeting_place(store, rank, size, timedelta(seconds=patience))
        assert not place.check([f"rank {rank}"])
        place.set(f"rank {rank}", str(rank))
        return b" ".join(place.get(f"rank {other}") for other in range(size))

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


@pytest.mark.parametrize("size", [2, 5])
def test_attempts_do_not_see_each_other(size: int) -> None:
    """X1: whatever processes that are gone have left in the store."""
    store = HashStore()
    for _ in range(3):
        assert meet(store, list(range(size)), size) == [b" ".join(str(rank).encode() for rank in range(size))] * size


def test_one_that_died_before_the_others_came() -> None:
    """X1: its name is answered, and so is that of the one that takes its place."""
    store = HashStore()
    with pytest.raises(TropismError, match="process 0 has not joined"):
        meeting_place(store, 1, 2, timedelta(seconds=0.05))
    with pytest.raises(TropismError, match="process 1 has not joined"):
        meeting_place(store, 0, 2, timedelta(seconds=0.05))
    assert meet(store, [0, 1], 2) == [b"0 1"] * 2


def test_another_number_of_processes() -> None:
    """C2: machines may come and go between attempts."""
    store = HashStore()
    for size in (3, 2, 4):
        assert len(meet(store, list(range(size)), size)) == size
