"""Chooses how a run computes: what `auto` stands for, from what packs need and what memory there is."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from tropism.data.batching.pack import stretched_budget
from tropism.errors import clause, first_line
from tropism.model.checkpointing import Checkpointing
from tropism.options import size_bytes
from tropism.train.planning.memory import Needs
from tropism.train.settings import Settings

MeasureNeeds = Callable[[Settings], Needs]
"""What packs need under settings, as far as these name checkpointing and whether forward passes come first."""

TOKENS = {"cpu": 2048, "cuda": 32768}
"""Tokens of a pack that `auto` takes at most: more are not faster."""
_FAST = {"cpu": 512, "cuda": 8192}
"""Tokens of a pack below which recomputing activations costs less than smaller packs."""
_FEWEST = 128
_LEVELS: list[Checkpointing] = ["none", "selective", "full"]
_LIMITED, _USED = 0.88, 0.95
"""Share of `--memory-limit`, and of the memory that is there, that a prediction may take. Runs were seen to need up to
7% more than predicted, and a limit is not exceeded."""
_GROWTH = 100 * 2**20
"""Bytes that a program grows by while it runs: threads, buffers, modules that are imported late."""
_EASY = {"cpu": 0.95, "cuda": 0.75}
"""The same before recomputation or small packs were tried. A GPU's allocator leaves gaps, and others may use it too."""


@dataclass(frozen=True)
class Choice:
    """Settings with their reason.

    Args:
        settings: of the run.
        sentence: for the log.
        facts: for the manifest.
        fits: the prediction does not exceed the limit; True without one.
        components: predicted bytes by component; empty if nothing was predicted.
        forwards_first_tokens: of a step whose forward passes may all come before its backward passes.
    """

    settings: Settings
    sentence: str
    facts: dict[str, Any] = field(default_factory=dict)
    fits: bool = True
    components: dict[str, float] = field(default_factory=dict)
    forwards_first_tokens: int = 0

    def with_forwards_first(self, tokens: int) -> "Choice":
        """This choice with all forward passes first in steps of so many tokens."""
        if not tokens:
            return self
        return replace(self, settings=replace(self.settings, forwards_first_tokens=tokens),
                       sentence=f"{self.sentence}; all forward passes of a step come before its backward passes")

    def at(self, tried: list[Settings], number: int) -> "Choice":
        """This choice with the settings of a number, which several processes have agreed on."""
        if tried[number] == self.settings:
            return self
        return replace(self, settings=tried[number],
                       sentence=f"memory: {describe(tried[number])}, as another process needs it")


def limit_of(options: Any, there: int) -> int:
    """Bytes that a process may use: `--memory-limit`, else what is there."""
    return there if options.memory_limit is None else size_bytes(options.memory_limit)


def candidates(options: Any, kind: str, kept: Settings | None, worth: bool = False) -> list[Settings]:
    """Settings to try, fastest first. What the options name, or a resumed run has kept, is the same in all.

    Args:
        kind: type of the device.
        worth: layers are worth compiling.
    """
    auto = kept or Settings(TOKENS[kind], compiled=worth)
    compiled = auto.compiled if options.compile == "auto" else options.compile == "on"
    offload = options.offload_checkpoints
    tokens = [options.microbatch_tokens]
    # A step ran out of memory with what is still asked for: the run keeps what it went on with.
    if kept and options.microbatch_tokens in ("auto", kept.asked_tokens):
        tokens = [kept.microbatch_tokens]
    elif options.microbatch_tokens == "auto":
        tokens = list(_halved(TOKENS[kind], _FEWEST))
    levels: list[Checkpointing] = [options.checkpointing]
    if kept and options.checkpointing in ("auto", kept.asked_checkpointing):
        levels = [kept.checkpointing]
    elif options.checkpointing == "auto":
        levels = ["full"] if offload else _LEVELS
    fast = [size for size in tokens if size >= _FAST[kind]] or tokens[:1]
    order = [(size, level) for level in levels for size in fast]
    order += [(size, levels[-1]) for size in tokens if size not in fast]
    return [replace(auto, microbatch_tokens=size, checkpointing=level, offload=offload and level == "full",
                    compiled=compiled, forwards_first_tokens=auto.forwards_first_tokens * (level == "full"))
            for size, level in order]


def slowness(settings: Settings, kind: str) -> tuple[int, int]:
    """What settings cost in speed, for comparison: recomputation first, then packs that are too small for a device."""
    return _LEVELS.index(settings.checkpointing), -min(settings.microbatch_tokens, _FAST[kind])


def _halved(size: int, least: int) -> Iterable[int]:
    while size >= least:
        yield size
        size //= 2


def choose(tried: list[Settings], limit: int, limited: bool, needs: MeasureNeeds, largest: int, step: int,
           kind: str = "cpu", saves: bool = False) -> Choice:
    """The first settings that fit into the limit; the last ones if none do.

    Args:
        tried: of `candidates`.
        limited: the user set the limit.
        needs: measures the memory of packs.
        largest: tokens of the largest tree, which no pack divides.
        step: tokens of a step of one process.
        kind: type of the device.
        saves: steps of several packs need fewer passes if all forward passes come first. With full checkpointing they
            do, in steps of as many tokens as fit.
    """
    most = min(_LIMITED, 1 - _GROWTH / limit) if limited else _USED
    measured: dict[Checkpointing, Needs] = {}
    found: dict[str, float] = {}
    shares = sorted({min(_EASY[kind], most), most})
    fast = min(_FAST[kind], tried[0].microbatch_tokens)
    for share, settings in [(share, settings) for share in shares for settings in tried
                            if share == most or settings.microbatch_tokens >= fast]:  # before small packs are tried
        level = settings.checkpointing
        if level not in measured:
            measured[level] = needs(settings)
        tokens = min(max(settings.microbatch_tokens, largest), max(step, largest))
        waiting = max(0, min(settings.forwards_first_tokens, step) - tokens)
        found = measured[level].components(tokens, stretched_budget(settings.microbatch_tokens) < step, waiting)
        if sum(found.values()) <= share * limit:
            tokens_first = 0
            if saves and level == "full" and stretched_budget(settings.microbatch_tokens) < step:
                tokens_first, found = _forwards_first(needs(replace(settings, forwards_first_tokens=step)), found,
                                                      tokens, step, share * limit)
            return replace(_chosen(settings, found, limit, limited, True), forwards_first_tokens=tokens_first)
    return _chosen(tried[-1], found, limit, limited, False, measured[tried[-1].checkpointing].least)


def _forwards_first(needs: Needs, apart: dict[str, float], tokens: int, step: int,
                    room: float) -> tuple[int, dict[str, float]]:
    """Tokens of a step whose forward passes may all come first; 0 if that does not fit. And the bytes by component.

    Args:
        apart: bytes by component if they do not.
        tokens: of the largest pack.
        step: tokens of a step. Later ones may be larger.
        room: bytes that may be used.
    """
    left = int((room - needs.peak(tokens)) / max(needs.kept_per_token, 1.0))
    if left <= 0:
        return 0, apart
    most = min(tokens + left, step * 5 // 4)
    return most, max(needs.components(tokens, waiting=most - tokens), apart, key=lambda parts: sum(parts.values()))


def _chosen(settings: Settings, found: dict[str, float], limit: int, limited: bool, fits: bool,
            least: float = 0.0) -> Choice:
    peak = sum(found.values())
    whose = "the limit of " if limited else ""
    sentence = (f"memory: {gib(peak)} predicted of {whose}{gib(limit)}; {describe(settings)}")
    if not fits:
        sentence += ". This is more than there is. " + (
            "Weights and optimizer state alone need "
            f"{gib(least)}. Use --lora.rank 16, or a smaller model." if least > limit else
            "If memory runs out, use a lower --max-length or --lora.rank 16.")
    facts = {"predicted_peak_bytes": round(peak), "memory_limit_bytes": limit,
             "predicted_components_bytes": {name: round(size) for name, size in found.items()}}
    return Choice(settings, sentence, facts, fits, found)


def unpredicted(tried: list[Settings], why: Exception | None, forwards_first_tokens: int = 0) -> Choice:
    """The fastest settings, if nothing was or can be predicted.

    Args:
        why: the prediction failed; None if the model is so small that none is needed.
        forwards_first_tokens: of a step whose forward passes may all come first, with full checkpointing.
    """
    reason = ("the model needs little memory" if why is None else
              f"memory cannot be predicted ({type(why).__name__}: {clause(first_line(why))})")
    return Choice(tried[0], f"memory: {describe(tried[0])}; {reason}",
                  forwards_first_tokens=forwards_first_tokens * (tried[0].checkpointing == "full"))


def describe(settings: Settings) -> str:
    """The settings in words."""
    kept = {"none": "no checkpointing", "selective": "selective checkpointing", "full": "full checkpointing"}
    return (f"packs of {settings.microbatch_tokens:,} tokens, {kept[settings.checkpointing]}"
            + (", compiled layers" if settings.compiled else "")
            + (", weights gathered once per step" if settings.gather_once else ""))


def gib(size: float) -> str:
    """A size in GiB."""
    return f"{size / 2**30:,.1f} GiB"
