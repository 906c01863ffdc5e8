"""What the log says before step 1: data, plan, processes."""

from collections.abc import Sequence
from typing import Any

from tropism.data.rows import EncodedRow
from tropism.data.schedule import Steps
from tropism.distributed.shard import shard_sizes
from tropism.distributed.world import World
from tropism.methods import Method
from tropism.methods.build import describe_method
from tropism.observe.console import Voice
from tropism.train.options import RunOptions
from tropism.train.setup.data import PreparedData, labels_of
from tropism.train.setup.python_objects import PythonObjects


def announce_data(data: PreparedData, method: Method, voice: Voice) -> None:
    """Say what was read, and what is minimized."""
    for audit, name in ((data.audit, "data"), (data.eval_audit, "eval data")):
        if audit is not None:
            voice.say(f"{name}: {audit.source}: {audit.summary()}")
            if audit.format:
                voice.say(f"  {audit.format}")
            for drop in audit.dropped[:3]:
                voice.say(f"  left out: {drop.place}: {drop.reason}: {drop.detail}")
            for notice in audit.notices():
                voice.warn(notice)
    for finding in data.of_template:
        if finding.severity != "info":
            voice.warn(finding.text)
    voice.say(f"method: {describe_method(method)}")
    if seen := data.prompts_on_both_sides():
        voice.warn(f"{seen} evaluation prompts are also trained on: figures on them are not held out")
    if method.view == "unpaired":
        voice.say(f"labels: {describe_weights(method, data.train)}")


def describe_weights(method: Method, rows: Sequence[EncodedRow]) -> str:
    """Class counts, weights, and how their ratio stands to what the KTO paper advises."""
    desirable = sum(map(bool, labels_of(rows)))
    counts = f"{desirable} desirable, {len(rows) - desirable} undesirable"
    options = next((term.options for term in method.terms if "desirable_weight" in term.options), None)
    if options is None:
        return counts
    weights = options["desirable_weight"], options["undesirable_weight"]
    ratio = weights[0] * desirable / (weights[1] * (len(rows) - desirable))
    text = (f"{counts}; weights {weights[0]:g} and {weights[1]:g}: "
            f"weighted ratio {ratio:.2f} (the KTO paper advises 1 to 1.5)")
    if not 1 - 1e-9 <= ratio <= 1.5 + 1e-9:
        text += ". `--desirable-weight auto --undesirable-weight auto` balances the classes"
    return text


def describe_processes(world: World) -> str:
    """`2 x cpu`, with how they are arranged where a model is spread over them."""
    text = f"{world.size} x {world.device.type}"
    if world.mesh is not None:
        sizes = {axis: world.mesh.size(axis) for axis in ("replicate", "shard", "tensor")}
        text += " (" + ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) + ")"
    return text


def announce_plan(options: RunOptions, data: PreparedData, schedule: Steps, evaluated: int, precision: str,
                  world: World, objects: PythonObjects, voice: Voice) -> None:
    """What is about to be done, where, and how it is spread."""
    held_out = f", {len(data.evaluation)} rows held out" if data.evaluation else ""
    if evaluated < len(data.evaluation):
        held_out += f" ({evaluated} of them evaluated, the same every time)"
    size = "a dataloader's batches" if objects.steps is not None else str(options.batch_size)
    own = objects.optimizer is None
    rate = f"{options.learning_rate:g}" if own else "the optimizer's own"
    voice.say(f"plan: {len(data.train)} rows{held_out}; {schedule.total_steps} steps of {size}, learning rate {rate}, "
              f"max_length {data.max_length}, {precision}, {describe_processes(world)}")
    if options.learning_rate == 0 and own:
        voice.warn("learning_rate is 0: nothing will change")


def sharding_lines(models: dict[str, Any], world: World) -> list[str]:
    """A line for each model: how many of its weights are divided, and what that leaves to a process."""
    lines = []
    for name, module in models.items():
        divided, tensors, here, total, size = shard_sizes(module)
        most, largest = world.max([here, size])
        lines.append(f"sharding: {name}: {divided} of {tensors} weights divided; a process holds at most "
                     f"{most:,} of {total:,} elements ({most / total:.0%}), in {largest / 2**20:.2f} MiB")
    return lines
