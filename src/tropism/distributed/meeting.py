"""How the processes of one attempt find each other in a store that may remember earlier attempts.

torchrun keeps its store when it starts processes again, with the addresses of those that died. How often it has started
them it counts on each machine for itself, so that number tells them nothing. Each process therefore gives itself a name
that was never used before, and the main one answers names until all that are there have heard where to meet.
"""

import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from tropism.errors import TropismError

_PAUSE_S = 0.02


def meeting_place(store: Store, rank: int, size: int, patience: timedelta = timedelta(minutes=30)) -> PrefixStore:
    """A part of a store that only the processes of this attempt use. All of them call this.

    Args:
        store: that all of them see, and their predecessors saw.
        rank, size: of this process.
        patience: how long to wait for the others.

    Raises:
        TropismError: if some do not come.
    """
    end = time.monotonic() + patience.total_seconds()
    apart = PrefixStore("tropism", store)
    place = _invite(apart, size, end) if rank == 0 else _ask(apart, rank, end)
    return PrefixStore(place, apart)


def _invite(store: Store, size: int, end: float) -> str:
    """Choose a place, and tell it every name that stands for a rank until each rank has come."""
    place, answered, waiting = f"meeting {uuid.uuid4()}", set(), set(range(1, size))
    while waiting:
        for other in sorted(waiting):
            if store.check([f"{place}/here/{other}"]):
                waiting.discard(other)
            elif store.check([f"name/{other}"]):
                name = store.get(f"name/{other}").decode()
                if name not in answered:  # it may be that of a process that is gone
                    store.set(f"answer/{name}", place)
                    answered.add(name)
        if waiting:
            _pause(end, f"ranks {', '.join(map(str, sorted(waiting)))} have")
    return place


def _ask(store: Store, rank: int, end: float) -> str:
    """Say a name, and hear where to go."""
    name = str(uuid.uuid4())
    store.set(f"name/{rank}", name)
    while not store.check([f"answer/{name}"]):
        _pause(end, "rank 0 has")
    place = store.get(f"answer/{name}").decode()
    store.set(f"{place}/here/{rank}", "")
    return place


def _pause(end: float, who: str) -> None:
    if time.monotonic() > end:
        raise TropismError(f"{who} not come to the process group; the log of torchrun says why")
    time.sleep(_PAUSE_S)
