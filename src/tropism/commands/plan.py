"""`tropism plan`: the memory and time of a run, before any weight is loaded.

Data are read and packed as the run would. The step that is counted is the run's own, on tensors without values.
"""

from collections.abc import Sequence

from tropism.config import MethodOptions
from tropism.model.options import LoraOptions
from tropism.observe.console import Voice
from tropism.train.planning.choose import describe, gib
from tropism.train.setup.run_plan import COMPONENTS, Plan, Prepared, duration

_RANK = 16


def plan(options: MethodOptions, device: str | None, voice: Voice) -> Plan:
    """Plan a run.

    Args:
        device: name of a device; None for this machine.

    Raises:
        TropismError: for options and data that training would refuse too.
    """
    prepared = Prepared.of(options, device, voice)
    found = prepared.plan()
    if not found.choice.fits:
        found.advice.extend(_alternatives(prepared, options, found.memory_bytes))
    return found


def _alternatives(prepared: Prepared, options: MethodOptions, limit: int) -> list[str]:
    """What would fit."""
    found = []
    for quantize in (None, "nf4"):
        policy = prepared.inputs.policy
        if policy.directory is not None or policy.held or (policy.adapts and quantize is None):
            continue
        lora = LoraOptions(**{**options.lora.model_dump(), "rank": options.lora.rank or _RANK, "quantize": quantize})
        other = prepared.under(options.model_copy(update={"lora": lora})).plan().choice
        if other.fits:
            how = f"LoRA {lora.rank}" + (f" + {quantize}" if quantize else "")
            found.append(f"{how} fits {gib(limit)} with {other.settings.microbatch_tokens:,} tokens: "
                         f"--lora.rank {lora.rank}" + (f" --lora.quantize {quantize}" if quantize else ""))
            break
    return found


def show(found: Plan, voice: Voice) -> None:
    """Print a plan."""
    components = found.choice.components
    rows = {name: components[name] for name in COMPONENTS if components.get(name)}
    voice.table("peak memory", ("component", "GiB"), [
        *((name, f"{size / 2**30:.2f}") for name, size in rows.items()),
        ("total", f"{sum(rows.values()) / 2**30:.2f}")])
    voice.say(f"device: {found.device}, {gib(found.memory_bytes)}",
              f"time: {found.seconds_per_step:.3g} s per step, {duration(found.seconds)} for {found.steps:,} steps",
              f"disk: {gib(found.checkpoint_bytes)} per checkpoint",
              f"settings: {describe(found.choice.settings)}")
    (voice.say if found.choice.fits else voice.warn)(found.choice.sentence)
    voice.say(*(["fits"] if found.choice.fits else ["does not fit", *found.advice]))


__all__: Sequence[str] = ("Plan", "plan", "show")
