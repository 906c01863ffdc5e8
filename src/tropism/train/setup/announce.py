"""The log lines before step 1: data, method, plan and processes."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tropism import store
from tropism.data.rows import EncodedRow
from tropism.data.schedule import GivenSchedule, MicroBatchRule, Steps
from tropism.distributed.shard import shard_sizes
from tropism.distributed.world import World
from tropism.errors import count_of
from tropism.methods import Method
from tropism.methods.build import describe_method
from tropism.observe.console import Voice
from tropism.train.options import RunOptions, StoreOptions
from tropism.train.settings import AutoShard
from tropism.train.setup.data import PreparedData, labels_of
from tropism.train.setup.python_objects import PythonObjects

_HIGH_RATE = 1e-2  # of AdamW


def announce_data(data: PreparedData, method: Method, rule: MicroBatchRule, voice: Voice) -> None:
    """Log what was read, and the method."""
    warned = set()
    for audit, name in ((data.audit, "data"), (data.eval_audit, "eval data")):
        if audit is not None:
            voice.say(f"{name}: {audit.source}: {audit.summary()}")
            for line in audit.reading:
                voice.say(f"  {line}")
            for drop in audit.dropped[:3]:
                voice.say(f"  dropped: {drop.place}: {drop.reason}: {drop.detail}")
            for finding in audit.notable():
                if finding.text not in warned:
                    voice.warn(finding.text, finding.word)
                warned.add(finding.text)
    for finding in data.of_template:
        if finding.severity != "info":
            voice.warn(finding.text, finding.word)
    voice.say(f"method: {describe_method(method, rule)}")
    if seen := data.prompts_on_both_sides():
        remedy = ("of the files, or use --eval-fraction instead of --eval-data" if data.divisible else "of the two")
        voice.warn(f"the training data contains {count_of(seen, 'evaluation prompt')}, so the evaluation is not fully "
                   f"held out. Remove them from one {remedy}.")
    if method.view == "unpaired":
        voice.say(f"labels: {describe_weights(method, data.train)}")


def describe_weights(method: Method, rows: Sequence[EncodedRow]) -> str:
    """Class counts and weights, and their ratio with the range that the KTO paper recommends."""
    desirable = sum(map(bool, labels_of(rows)))
    counts = f"{desirable} desirable, {len(rows) - desirable} undesirable"
    options = next((term.options for term in method.terms if "desirable_weight" in term.options), None)
    if options is None or desirable in (0, len(rows)):
        return counts
    weights = options["desirable_weight"], options["undesirable_weight"]
    ratio = weights[0] * desirable / (weights[1] * (len(rows) - desirable))
    text = (f"{counts}; weights {weights[0]:g} and {weights[1]:g}; "
            f"weighted ratio {ratio:.2f} (recommended by the KTO paper: 1 to 1.5)")
    if not 1 - 1e-9 <= ratio <= 1.5 + 1e-9:
        text += ". To balance the classes, pass --desirable-weight auto --undesirable-weight auto."
    return text


def describe_processes(world: World, shard: AutoShard = "") -> str:
    """`2 x cpu`, with the mesh axes if a model is sharded over the processes, and what `--parallel.shard auto` chose.

    Args:
        shard: that choice.
    """
    axes = [] if world.mesh is None else [
        f"{axis} {size}" for axis in ("replicate", "shard", "tensor") if (size := world.mesh.size(axis)) > 1]
    axes += {"on": ["since full copies would not fit with packs as fast"], "off": ["a full copy in each, which fits"],
             "": []}[shard]
    return f"{world.size} x {world.device.type}" + (f" ({', '.join(axes)})" if axes else "")


def announce_plan(options: RunOptions, data: PreparedData, schedule: Steps, evaluated: int, precision: str,
                  world: World, objects: PythonObjects, root: Path, voice: Voice, shard: AutoShard = "") -> None:
    """Log the plan: rows, optimizer steps, learning rate, length limit, precision and processes. Log first whether
    other users can change the store."""
    if note := store.exposure(root):
        voice.warn(note)
    held_out = f", {count_of(len(data.evaluation), 'held-out row')}" if data.evaluation else ""
    if evaluated < len(data.evaluation):
        held_out += f" ({evaluated:,} evaluated, always the same)"
    size = "dataloader batches" if objects.steps is not None else count_of(options.batch_size, "row")
    own = objects.optimizer is None
    rate = f"{options.learning_rate:g}" if own else "set by the optimizer"
    voice.say(f"plan: {count_of(len(data.train), 'training row')}{_passes(schedule)}{held_out}; "
              f"{count_of(schedule.total_steps, 'optimizer step')} of {size}, learning rate {rate}, max length "
              f"{data.max_length:,} tokens, {precision}, {describe_processes(world, shard)}")
    for note in doubtful(options, len(data.train), objects):
        voice.warn(note)
    if precision == "fp32" and world.device.type == "cuda":
        voice.warn("--precision fp32 is about 10 times slower on a GPU than bf16, whose weights and optimizer state "
                   "are float32 too. Use it only to compare results.")


def _passes(schedule: Steps) -> str:
    """How often a dataloader was read, if more than once: its rows are counted in each pass."""
    if not isinstance(schedule, GivenSchedule):
        return ""
    passes = math.ceil(round(schedule.epochs_after(schedule.total_steps), 6))
    return f" in {passes} passes" if passes > 1 else ""


def doubtful(options: RunOptions, rows: int, objects: PythonObjects) -> list[str]:
    """Notes on values that are valid and seldom meant.

    Args:
        rows: number of training rows.
        objects: that replace options.
    """
    notes = []
    if objects.steps is None and options.batch_size > rows:
        notes.append(f"--batch-size {options.batch_size} exceeds the {count_of(rows, 'training row')}, so each epoch "
                     f"is one optimizer step of {count_of(rows, 'row')}. For more steps, use a lower --batch-size.")
    if objects.optimizer is None and options.learning_rate == 0:
        notes.append("--learning-rate is 0, so training changes nothing")
    if objects.optimizer is None and options.optimizer != "sgd" and options.learning_rate > _HIGH_RATE:
        notes.append(f"--learning-rate {options.learning_rate:g} is very high for AdamW, which moves each weight by "
                     "about the learning rate in a step. Usual values are 1e-6 to 1e-3.")
    return notes


def sharding_lines(models: dict[str, Any], world: World, gather_once: bool, sum_once: bool) -> list[str]:
    """A line for each model: how many of its weights are sharded, and how much of them a process holds; and when the
    policy's are exchanged.

    Args:
        gather_once, sum_once: weights and gradients are exchanged once per step, not for each pack.
    """
    when = {True: "once per step", False: "for each pack"}
    lines = [f"sharding: weights are gathered {when[gather_once]}, and gradients summed {when[sum_once]}"]
    for name, module in models.items():
        divided, tensors, here, total, size = shard_sizes(module)
        most, largest = world.max([here, size])
        lines.append(f"sharding: {name}: {divided} of {count_of(tensors, 'weight tensor')} sharded; each process holds "
                     f"at most {most:,} of {total:,} weights ({most / total:.0%}), {largest / 2**20:.2f} MiB")
    return lines


def tidy_store(options: StoreOptions, say: Callable[[str], None]) -> None:
    """Remove incomplete files from the store, and what was used least recently if it exceeds its limit."""
    tidied = store.tidy(options.store_root, options.store_bytes)
    limit = f"--store-limit {options.store_limit}"
    if tidied.files:
        say(f"store: removed {count_of(tidied.files, 'file')} used least recently "
            f"({store.size_text(tidied.size_bytes)}), because {options.store_root} exceeded {limit}")
    if options.store_bytes is not None and tidied.left_bytes > options.store_bytes:
        say(f"store: {options.store_root} holds {store.size_text(tidied.left_bytes)}, which exceeds {limit}, because "
            "all of it is in use")
