"""A step that runs out of memory leaves nothing behind and is repeated in smaller packs, by all processes together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tropism.borders import is_out_of_memory
from tropism.data.batching.pack import tokens_in_layout
from tropism.data.tree import PromptTree
from tropism.distributed.world import World
from tropism.errors import first_line
from tropism.train.engine import Engine
from tropism.train.out_of_memory import PackOutOfMemory, place_of, release, too_large
from tropism.train.settings import Settings
from tropism.train.step_log import StepOutcome
from tropism.train.step_packs import StepPacks, StepPlanner

TrainStep = Callable[[Engine, StepPacks], StepOutcome]
_NONE = 2**62


@dataclass(frozen=True)
class Shortage:
    """A step that ran out of memory on some process.

    Args:
        here: it did on this process.
        trees: of this process's pack that did; empty if it was not in a pack.
        reason: what the allocator says.
    """

    here: bool
    trees: tuple[PromptTree, ...] = ()
    reason: str = ""


class _ElsewhereError(Exception):
    """Another process has run out of memory."""


def attempt(engine: Engine, step: StepPacks, train_step: TrainStep) -> StepOutcome | Shortage:
    """Do a step on all processes, or on none of them if memory runs out before the update.

    Before each exchange of the step the processes agree that none of them has run out of memory, so that no one waits
    in an exchange that another one never reaches. With a sharded model a process cannot leave a pass alone: there
    the error is raised.
    """
    world = engine.world
    if world.mesh is not None:
        engine.model.begin_step()
        return train_step(engine, step)
    agreeing = replace(engine, world=replace(world, before_exchange=partial(_agree, world)))
    try:
        return train_step(agreeing, step)
    except _ElsewhereError:
        found = Shortage(here=False)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        world.max([1])  # the others are told where they ask next
        found = Shortage(True, error.trees if isinstance(error, PackOutOfMemory) else (), first_line(error))
    for weight in (*engine.updater.owned.weights, *engine.updater.owned.parts):
        weight.grad = None
    engine.shift.forget()
    release(engine.model.device)
    return found


def _agree(world: World) -> None:
    if world.max([0]) != [0]:
        raise _ElsewhereError


def less_memory(found: Shortage, engine: Engine, planner: StepPlanner, step: StepPacks,
                settings: Settings) -> tuple[Settings, str]:
    """The settings with which a step that ran out of memory is repeated, and the sentence for the log.

    If all forward passes came first, they no longer do. Otherwise, the budget becomes half of the pack that did not
    fit. If that pack is a single tree, the step is repeated with full checkpointing, unless no decoder layers are
    known. All processes call this together.

    Raises:
        TropismError: if nothing is left to try. It names the row.
    """
    world, before = engine.world, planner.microbatch_tokens
    if step.forwards_first and len(step.packs) > 1:
        return replace(settings, forwards_first_tokens=0), (
            f"step {step.step}: out of memory with all forward passes before the backward passes, so it is repeated "
            "pack by pack, as is the rest of the run (results do not change)")
    size = partial(_tokens, layout=planner.layout)
    packs = [pack.trees for pack in step.packs] + [pack.trees for pack in step.mismatched]
    suspects = ([found.trees] if found.trees else packs) if found.here else []
    divisible = [size(trees) for trees in suspects if len(trees) > 1]
    budget = max(1, min(before, max(divisible)) // 2) if divisible else _NONE
    budget = -world.max([-budget])[0]
    if budget != _NONE:
        return settings.lowered(budget, settings.checkpointing, before), (
            f"step {step.step}: out of memory with packs of up to {before:,} tokens, so it is repeated with packs of "
            f"up to {budget:,}, which the run keeps (results do not change)")
    trees = max(suspects, key=size, default=())
    tokens, = world.max([size(trees)])
    if settings.checkpointing != "full" and engine.model.layers:
        return settings.lowered(before, "full", before), (
            f"step {step.step}: out of memory in a pack of one prompt with its completions ({tokens:,} tokens), so it "
            "is repeated with --checkpointing full, which the run keeps (results do not change)")
    rows = [planner.rows[index] for index in planner.schedule.step(step.step)]
    errors = world.gather(None if not trees else too_large(
        place_of(rows, trees[0]), size(trees), found.reason,
        f"in a pack of their own{' with full checkpointing' if settings.checkpointing == 'full' else ''}"))
    raise next(filter(None, errors))


def _tokens(trees: Sequence[PromptTree], layout: str) -> int:
    return sum(tokens_in_layout(tree, layout) for tree in trees)
