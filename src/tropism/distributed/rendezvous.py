"""How the processes of one attempt find each other in a store that may contain entries of earlier attempts.

torchrun keeps its store when it restarts processes, with the addresses of those that died. Each machine counts restarts
separately, so the count does not identify an attempt. Each process therefore publishes a new random name, and the main
process answers every name with the meeting place until all processes have arrived there.
"""

import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from tropism.errors import TropismError

_PAUSE_S = 0.02


def meeting_place(store: Store, rank: int, size: int, patience: timedelta = timedelta(minutes=30)) -> PrefixStore:
    """The part of a store that only the processes of this attempt use. All processes call this.

    Args:
        store: shared by all processes, and by those of earlier attempts.
        rank, size: of this process.
        patience: maximum time to wait for the others.

    Raises:
        TropismError: if a process does not arrive in time.
    """
    end = time.monotonic() + patience.total_seconds()
    apart = PrefixStore("tropism", store)
    place = _invite(apart, size, end) if rank == 0 else _ask(apart, rank, end)
    return PrefixStore(place, apart)


def _invite(store: Store, size: int, end: float) -> str:
    """Choose a place, and answer every name with it until each process has arrived."""
    place, answered, waiting = f"meeting {uuid.uuid4()}", set(), set(range(1, size))
    while waiting:
        for other in sorted(waiting):
            if store.check([f"{place}/here/{other}"]):
                waiting.discard(other)
            elif store.check([f"name/{other}"]):
                name = store.get(f"name/{other}").decode()
                if name not in answered:  # it may belong to a process of an earlier attempt
                    store.set(f"answer/{name}", place)
                    answered.add(name)
        if waiting:
            many = len(waiting) > 1
            _pause(end, f"process{'es' * many} {', '.join(map(str, sorted(waiting)))} {'have' if many else 'has'}")
    return place


def _ask(store: Store, rank: int, end: float) -> str:
    """Publish a name, and wait for the meeting place."""
    name = str(uuid.uuid4())
    store.set(f"name/{rank}", name)
    while not store.check([f"answer/{name}"]):
        _pause(end, "process 0 has")
    place = store.get(f"answer/{name}").decode()
    store.set(f"{place}/here/{rank}", "")
    return place


def _pause(end: float, who: str) -> None:
    if time.monotonic() > end:
        raise TropismError(f"{who} not joined the process group in time. See the log of torchrun for the reason.")
    time.sleep(_PAUSE_S)
