"""Resuming a run: checks that it is still the same run, and loads a checkpoint into its engine."""

import importlib.metadata
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tropism.distributed.training_state import TrainingState, read_tensors
from tropism.errors import CheckpointError, OutputError, count_of, first_line
from tropism.model.adapters.parameters import adapter_weight_names
from tropism.observe.console import Voice
from tropism.observe.rundir import RunDirectory
from tropism.train.checkpoints import files as checkpoint
from tropism.train.checkpoints.content import group_fits
from tropism.train.checkpoints.find import Origin
from tropism.train.checkpoints.rng_state import set_random_state
from tropism.train.engine import Engine
from tropism.train.options import ParallelOptions
from tropism.train.preemption import Preemption

MAY_CHANGE = frozenset((
    # length of the run, intervals, and what is kept
    "max_steps", "epochs", "max_time", "eval_every", "log_every", "sample_every", "save_every", "eval_limit", "keep",
    "keep_best", "checkpoint_model", "on_nonfinite", "stop_metric", "stop_patience", "stop_delta",
    "evaluator", "track", "log_dir", "report", "export_dtype",
    # how it is computed: speed and memory, and results beyond their rounding never
    "microbatch_tokens", "checkpointing", "offload_checkpoints", "compile", "memory_limit", "profile",
    "workers", "prefetch", "store", "store_limit", "max_record_bytes", "max_expansion",
    *(f"parallel.{name}" for name in ParallelOptions.model_fields),
    # how this sitting starts
    "output", "resume", "fall_back", "strict", "allow_reference_mismatch", "trust_remote_code"))
"""Options that may differ when a run goes on; `docs/checkpoints.md` lists them. All others decide results."""

_GROUPS = ("parallel", "lora")

_BY_FINGERPRINT = frozenset(("model", "data", "eval_data", "chat_template", "reference", "teacher"))
"""Options that name files or models, which may have moved. Their content is compared, by its fingerprint."""

_CALLED = {"data": "the training data", "eval_data": "the evaluation data", "tokenizer": "the tokenizer",
           "template": "the chat template", "steps": "the rows of each step",
           "policy": "the initial weights of the model", "reference": "the reference", "teacher": "the teacher",
           "layout": "the layout"}


def is_over(origin: Origin, directory: RunDirectory, total: int, options: Mapping[str, Any],
            fingerprints: Mapping[str, str], voice: Voice) -> bool:
    """Whether nothing is left to do for a run; otherwise say how it goes on, if it may.

    Args:
        total: steps that are planned now.
        options: every option with its value now.
        fingerprints: of data, tokenizer and template now.

    Raises:
        CheckpointError: if it may not, naming each thing that is not as it was.
    """
    place, recorded = directory.path, origin.trainer or {}
    changed = check_options(recorded.get("options") or origin.options, options, place)
    _check_agreement(origin, place)
    check_same(origin.fingerprints, fingerprints, place)
    planned = origin.manifest.get("planned_steps", origin.manifest.get("steps", 0))
    early = origin.finished and origin.manifest.get("stopped_by") == "stop_metric"
    if origin.finished and total <= planned and not (early and _stops_otherwise(origin.options or recorded, options)):
        voice.concluding()
        voice.say(f"{place}: already finished after {count_of(origin.manifest['steps'], 'step')}. "
                  f"The model is in {directory.model}. " + _how_to_extend(origin, directory, planned, early))
        return True
    if origin.problem:
        raise CheckpointError(origin.problem)
    if origin.finished and origin.checkpoint is None:
        raise CheckpointError(f"{place}: finished. {_how_to_extend(origin, directory, planned, early=False)}")
    if total < origin.step:
        raise CheckpointError(f"{place}: {origin.step} steps are done, but only {total} are planned. "
                              "Raise --max-steps or --epochs.")
    for note in origin.notes:
        voice.warn(note)
    if origin.checkpoint is not None:
        voice.say(f"resume: {origin.checkpoint.path}, after step {origin.step} of {total}")
    for entry in changed:
        voice.say(f"  changed: {entry}")
    for entry in libraries_that_differ(origin.libraries):
        voice.warn(entry)
    return False


def _how_to_extend(origin: Origin, directory: RunDirectory, planned: int, early: bool) -> str:
    """What trains a finished run further; only what will work."""
    reason = f"It stopped early: {origin.manifest.get('reason')}. " if early else ""
    if origin.problem:
        return f"{reason}It cannot be extended: {origin.problem}"
    if origin.checkpoint is None:
        return (f"{reason}It kept no checkpoint, so it cannot be extended. Start a new run from that model with "
                f"`--model {shlex.quote(str(directory.model))} --output NEW`, and add `--save-every N` to keep "
                "checkpoints.")
    resume = f"tropism resume {shlex.quote(str(directory.path))}"
    if early:
        return (f"{reason}To train further, change --stop-patience, --stop-delta or --stop-metric: "
                f"`{resume} --stop-patience N`")
    return f"To train further: `{resume} --max-steps N`, with N above {planned}"


def _stops_otherwise(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the rule of early stopping has changed."""
    return any(recorded.get(name) != now.get(name) for name in ("stop_metric", "stop_patience", "stop_delta"))


def check_options(recorded: Mapping[str, Any], now: Mapping[str, Any], place: Path) -> list[str]:
    """Compare the options with those of the run so far.

    Returns:
        Permitted changes, in words.

    Raises:
        CheckpointError: naming every changed option that must not change, with both values.
    """
    wrong, changed = [], {}
    recorded, now = _filled(flat(recorded)), _filled(flat(now))
    for name in sorted(recorded.keys() & now.keys()):
        before, value = recorded[name], now[name]
        if before == value or name in ("output", "resume", "fall_back"):
            continue
        by_name = name in _BY_FINGERPRINT and None not in (before, value) and "live" not in (before, value)
        if name in MAY_CHANGE:
            changed[name] = _change(name, before, value)
        elif not by_name:
            wrong.append(_change(name, before, value))
    if wrong:
        raise CheckpointError(f"{place}: cannot resume: these options changed: {', '.join(wrong)}. "
                              "Use --output NEW to start a new run.")
    notes = list(changed.values())
    if {"max_steps", "epochs"} & changed.keys():
        notes.append("the learning rate schedule now spans the new number of steps")
    return notes


def flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with those of groups by their names on the command line, such as `lora.rank`."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name in _GROUPS and isinstance(value, Mapping):
            found |= {f"{name}.{inner}": entry for inner, entry in value.items()}
        else:
            found[name] = value
    return found


def _filled(options: dict[str, Any]) -> dict[str, Any]:
    """Options, with defaults that depend on other options filled in."""
    rank = options.get("lora.rank")
    if not isinstance(rank, int | float) or options.get("lora.alpha") is not None:
        return options
    return {**options, "lora.alpha": 2.0 * rank}


def _change(name: str, before: Any, now: Any) -> str:
    return f"--{name.replace('_', '-')} (was {_spell(before)}, now {_spell(now)})"


def _spell(value: Any) -> str:
    return "the default" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def check_same(recorded: Mapping[str, Any], now: Mapping[str, Any], place: Path, reasons: str = "") -> None:
    """Compare fingerprints, or other facts, with those of the run so far.

    Args:
        reasons: other differences, as possible reasons.

    Raises:
        CheckpointError: naming everything that differs.
    """
    if wrong := _differences(recorded, now):
        raise CheckpointError(f"{place}: cannot resume: {wrong} changed since the run started{reasons}. Use --output "
                              "NEW to start a new run.")


def _differences(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs, in words; empty if nothing does."""
    wrong = [called for name, called in _CALLED.items()
             if name in recorded and name in now and recorded[name] != now[name]]
    return " and ".join(filter(None, (", ".join(wrong[:-1]), *wrong[-1:])))


def _check_agreement(origin: Origin, place: Path) -> None:
    """Check that manifest and checkpoint are of the same run.

    Raises:
        CheckpointError: naming what they disagree about.
    """
    wrong = _differences(origin.in_manifest, origin.in_checkpoint)
    if wrong and origin.checkpoint is not None:
        raise CheckpointError(f"{place}: cannot resume: manifest.json and {origin.checkpoint.path.name} disagree about "
                              f"{wrong}, so one of them was edited or is from another run. If the checkpoint is right, "
                              "delete manifest.json and resume again.")


def libraries_that_differ(recorded: Mapping[str, str]) -> list[str]:
    """`torch 2.11 when the run started, 2.13 now` for each library whose version changed."""
    differ = []
    for name, version in recorded.items():
        try:
            now = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            now = "missing"
        if now != version:
            differ.append(f"{name} {version} when the run started, {now} now")
    return differ


def possible_reasons(origin: Origin, device: str) -> str:
    """Changes that can change a fingerprint: versions of libraries, and the kind of device."""
    differ = libraries_that_differ(origin.libraries)
    before = str(origin.manifest.get("device", device)).partition(":")[0]
    differ += [f"device {before} when the run started, {device} now"] if before != device else []
    return "".join(f"; {entry}" for entry in differ)


def load(engine: Engine, origin: Origin, preemption: Preemption) -> None:
    """Load a checkpoint into an engine that was built from the initial weights. All processes call this together.

    Raises:
        StoppedEarly: if `preemption` requests it.
        CheckpointError: if something is missing or does not fit. Nothing is changed then.
    """
    one, trainer = origin.checkpoint, origin.trainer
    assert one is not None
    assert trainer is not None
    with preemption.at_once():
        _load(engine, trainer, one.state)


def _load(engine: Engine, trainer: dict[str, Any], path: Path) -> None:
    updater, module = engine.updater, engine.model.module
    kept = trainer["optimizer"]
    state = TrainingState.of(module, updater.optimizer, updater.owned, kept.get("begun", True),
                             adapter_weight_names(module))
    if engine.world.mesh is not None:
        engine.world.together(lambda: read_tensors(state.tensors, path))
    else:
        engine.world.on_main(lambda: read_tensors(state.tensors, path))
        engine.world.broadcast_into(state.tensors.values())
    try:
        state.groups = [_group(mine, theirs, path) for mine, theirs in _paired(state.groups, kept["groups"], path)]
        state.values = kept["values"]
        state.apply(module, updater.optimizer, updater.owned)
        updater.restore(trainer["updater"])
        engine.shift.restore(trainer["shift"], engine.model.device)
        if torch.cuda.is_available() or "cuda" not in trainer["random"]:
            set_random_state(trainer["random"])
    except (RuntimeError, KeyError, ValueError, TypeError, AttributeError, OverflowError, IndexError) as error:
        raise CheckpointError(f"{path}: does not match this run: {first_line(error)}") from error


def _paired(ours: list[Any], theirs: list[Any], path: Path) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
    if len(ours) != len(theirs):
        raise CheckpointError(f"{path}: the checkpoint's optimizer has {len(theirs)} parameter groups, but this run's "
                              f"has {len(ours)}")
    return zip(ours, theirs, strict=True)


def _group(mine: dict[str, Any], theirs: dict[str, Any], path: Path) -> dict[str, Any]:
    """Options of a saved group, with tuples restored, which JSON does not have."""
    if sorted(mine["params"]) != sorted(theirs["params"]):
        differ = sorted(set(mine["params"]) ^ set(theirs["params"]))
        raise CheckpointError(f"{path}: the checkpoint's optimizer holds other weights than this run's: "
                              f"{', '.join(differ[:3])}")
    if not group_fits(mine, theirs):
        raise CheckpointError(f"{path}: the options of the checkpoint's optimizer do not fit this run's optimizer")
    return mine | {name: tuple(value) if isinstance(mine.get(name), tuple) else value for name, value in theirs.items()}


def begin_again(directory: RunDirectory, origin: Origin) -> None:
    """Reset the run directory to its origin: remove later records and incomplete checkpoints, and invalidate later
    checkpoints.

    Raises:
        OutputError: if a file cannot be changed.
    """
    directory.check_owned()
    try:
        checkpoint.tidy(directory.checkpoints)
    except OSError as error:
        raise OutputError.because(directory.checkpoints, error, what="cannot be tidied") from error
    for path in origin.aside:
        checkpoint.invalidate(path)
    directory.truncate(origin.trainer["offsets"] if origin.trainer else {})
