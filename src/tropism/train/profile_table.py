"""Where the time of profiled steps went, from a trace of torch's profiler (Chrome's trace event format)."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tropism.spans import PARTS, PREFIX, STEP

_NODE = "autograd::engine::evaluate_function: "
_COLLECTIVES = ("c10d::", "gloo:", "nccl:", "record_param_comms", "FSDP::", "ncclDevKernel", "ncclKernel")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Event = Mapping[str, Any]


@dataclass(frozen=True)
class StepTimes:
    """The time of the profiled steps.

    Args:
        steps: their number.
        seconds: their wall time. The parts sum to it.
        parts: seconds of each part. Of overlapping work on a GPU, computation counts before communication.
        operations: (name, seconds, calls), without the operations within, longest first.
    """

    steps: int
    seconds: float
    parts: dict[str, float]
    operations: tuple[tuple[str, float, int], ...]

    def rows(self) -> list[tuple[str, ...]]:
        """Part, seconds per step and share of each part, with their sum."""
        found = [*((part, self.parts[part]) for part in PARTS), ("step", self.seconds)]
        return [(name, f"{seconds / self.steps:.3f}", f"{seconds / self.seconds:.1%}") for name, seconds in found]

    def top(self, count: int) -> list[tuple[str, ...]]:
        """Name, calls and seconds per step, and share of the longest operations."""
        return [(name, f"{calls / self.steps:,.0f}", f"{seconds / self.steps:.3f}", f"{seconds / self.seconds:.1%}")
                for name, seconds, calls in self.operations[:count]]


def step_times(events: Iterable[Event], count: int) -> StepTimes:
    """Divide the time of the steps in a trace among their parts.

    On a CPU each moment belongs to the innermost part of the thread that trains. If there are operations on a GPU, it
    belongs to the part whose operation runs there, and to `host` or `data` while none runs.

    Args:
        events: of the trace.
        count: number of steps in it, at least 1. A span that follows them waited for a step that did not come.
    """
    timed = sorted((event for event in events if event.get("ph") == "X" and isinstance(event.get("dur"), int | float)),
                   key=lambda event: (event["ts"], -event["dur"]))
    steps = [event for event in timed if event["name"] == STEP and event["cat"] == "user_annotation"][:count]
    walks = _walks(timed, steps[0]["tid"])
    main = walks[steps[0]["tid"]]
    device = [event for event in timed if event["cat"] in _ON_DEVICE]
    if device:
        owners = {event["args"].get("External id"): part for walk in walks.values() for event, part, _, _ in walk}
        pieces = [(event["ts"], event["ts"] + event["dur"], _part_of_kernel(event, owners), event["name"])
                  for event in device]
        idle = [(start, end, "data" if part == "data" else "host", "") for _, part, start, end in main]
        moments = _moments(pieces, idle)
    else:
        moments = [(start, end, part, event["name"] if event["cat"] == "cpu_op" else "")
                   for event, part, start, end in main]
    return _summed(moments, [(step["ts"], step["ts"] + step["dur"]) for step in steps])


def _walks(timed: Sequence[Event], main: Any) -> dict[Any, list[tuple[Event, str, float, float]]]:
    """For each host thread: (event, part, start, end) of each stretch of time in which an event is the innermost."""
    by_thread = defaultdict(list)
    for event in timed:
        if event["cat"] in ("cpu_op", "user_annotation"):
            by_thread[event["tid"]].append(event)
    nodes: dict[int, str] = {}  # part of the forward operation that made each node of the graph, by sequence number
    threads = sorted(by_thread, key=lambda thread: thread != main)  # the main thread first: its forward makes the nodes
    return {thread: _walk(by_thread[thread], nodes, "host" if thread == main else "backward") for thread in threads}


def _walk(events: Sequence[Event], nodes: dict[int, str], outside: str) -> list[tuple[Event, str, float, float]]:
    found: list[tuple[Event, str, float, float]] = []
    open_events: list[tuple[Event, str, float]] = []  # with the end of each
    now = 0.0

    def until(moment: float) -> None:
        nonlocal now
        while open_events and open_events[-1][2] <= moment:
            event, part, end = open_events.pop()
            if end > now:
                found.append((event, part, now, end))
                now = end
        if open_events and moment > now:
            found.append((*open_events[-1][:2], now, moment))
        now = max(now, moment)

    for event in events:
        until(event["ts"])
        part = _part_of(event, open_events[-1][1] if open_events else outside, nodes)
        end = event["ts"] + event["dur"]
        open_events.append((event, part, min(end, open_events[-1][2]) if open_events else end))
    until(float("inf"))
    return found


def _part_of(event: Event, around: str, nodes: dict[int, str]) -> str:
    """The part of an event inside a part. Remembers which part made each node of the graph."""
    name, number = event["name"], event.get("args", {}).get("Sequence number")
    if event["cat"] == "user_annotation" and name.startswith(PREFIX):
        return "host" if name == STEP else str(name.removeprefix(PREFIX))
    if name.startswith(_COLLECTIVES):
        return "communication"
    if name.startswith(_NODE):
        made = nodes.get(number, around)
        return made if made in ("attention", "head") else around
    found = "attention" if "attention" in name.lower() and around in ("forward", "backward") else around
    if number is not None and around != "backward":
        nodes[number] = found
    return found


def _part_of_kernel(event: Event, owners: Mapping[Any, str]) -> str:
    if event["name"].startswith(_COLLECTIVES):
        return "communication"
    return owners.get(event.get("args", {}).get("External id"), "host")


def _moments(pieces: Sequence[tuple[float, float, str, str]],
             idle: Sequence[tuple[float, float, str, str]]) -> list[tuple[float, float, str, str]]:
    """Disjoint stretches of time: of computation on the device, then of communication, then of the host."""
    ordered = sorted(pieces, key=lambda piece: piece[2] == "communication")
    covered: list[tuple[float, float]] = []
    found = []
    for group in ([piece for piece in ordered if piece[2] != "communication"],
                  [piece for piece in ordered if piece[2] == "communication"], idle):
        free = [(*stretch, *piece[2:]) for piece in group for stretch in _left_of(piece[0], piece[1], covered)]
        taken, now = [], float("-inf")
        for start, end, part, name in sorted(free):
            if end > max(start, now):
                taken.append((max(start, now), end, part, name))
                now = end
        found += taken
        covered = _joined([*covered, *((start, end) for start, end, _, _ in taken)])
    return found


def _left_of(start: float, end: float, covered: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """What disjoint sorted stretches leave of another."""
    left = []
    place = max(0, bisect_right(covered, (start, float("inf"))) - 1)
    for taken_start, taken_end in covered[place:]:
        if taken_start >= end:
            break
        if taken_end <= start:
            continue
        if taken_start > start:
            left.append((start, taken_start))
        start = taken_end
    return [*left, (start, end)] if start < end else left


def _joined(stretches: list[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, end in sorted(stretches):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _summed(moments: Sequence[tuple[float, float, str, str]], steps: Sequence[tuple[float, float]]) -> StepTimes:
    """Sum stretches of time within steps. What no stretch covers counts as `host`."""
    parts: defaultdict[str, float] = defaultdict(float)
    operations: defaultdict[str, float] = defaultdict(float)
    calls = Counter[str]()
    total = sum(end - start for start, end in steps)
    seen: set[tuple[float, str]] = set()
    for start, end, part, name in moments:
        within = sum(max(0.0, min(end, last) - max(start, first)) for first, last in steps)
        if not within:
            continue
        parts[part] += within
        if name:
            operations[name] += within
            calls[name] += (start, name) not in seen
            seen.add((start, name))
    parts["host"] += total - sum(parts.values())
    return StepTimes(len(steps), total / 1e6, {part: parts[part] / 1e6 for part in PARTS},
                     tuple((name, microseconds / 1e6, calls[name])
                           for name, microseconds in sorted(operations.items(), key=lambda entry: -entry[1])))

