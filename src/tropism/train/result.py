"""The result of a run: the exported model, and metrics from its first and its last record."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tropism.distributed.shard import axes_of, gathered
from tropism.distributed.world import World
from tropism.errors import DataError, OutputError, clause, count_of
from tropism.model import save
from tropism.model.adapters.files import GGUF_BASE
from tropism.model.adapters.parameters import adapter_weight_names
from tropism.observe.checksums import Files, checksum, checksums, file_hash
from tropism.observe.console import Voice
from tropism.observe.lock import check_owned
from tropism.observe.log_files import read_log
from tropism.observe.manifest import Manifest
from tropism.observe.metrics import BOOKKEEPING
from tropism.observe.rundir import EVAL_ROWS, MOVED, SCORES, RunDirectory
from tropism.observe.verdict import NO_ROWS, Verdict
from tropism.train.engine import Engine
from tropism.train.evaluation.evaluator import Evaluator
from tropism.train.evaluation.improvement import verdict_on
from tropism.train.evaluation.moved import moved_lines
from tropism.train.evaluation.row_files import HeldOutScores, eval_lines, write_scores
from tropism.train.evaluation.samples import start_of
from tropism.train.frozen.reference import StoredReference
from tropism.train.run_state import RunState
from tropism.train.setup.build import RunInputs

_SHOWN = 200  # characters of a sample


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Args:
        directory: the run directory.
        model: the trained model's directory.
        steps: optimizer steps done.
        seconds: wall time.
        before, after: the evaluation records at step 0 and at the end. Without held-out rows, the first and the last
            train record.
        samples: prompts with the completions sampled before and after training.
    """

    directory: Path
    model: Path
    steps: int
    seconds: float
    before: dict[str, float]
    after: dict[str, float]
    samples: list[dict[str, Any]] = field(default_factory=list)


def first_and_last(directory: RunDirectory) -> tuple[dict[str, float], dict[str, float]]:
    """The first and the last evaluation of a run, or its first and last train record if it has no evaluations."""
    records = directory.records()
    shown = [record for record in records if record["split"] == "eval"] or records
    found = [{key: float("nan") if value is None else value for key, value in record.items()
              if key not in ("step", "split")} for record in (shown[0], shown[-1])] if shown else [{}, {}]
    return found[0], found[1]


def _measured(directory: RunDirectory, voice: Voice) -> tuple[dict[str, float], dict[str, float]]:
    """As `first_and_last`, or nothing if the file was damaged during the run, which is no reason to fail after it."""
    try:
        return first_and_last(directory)
    except DataError as error:
        voice.warn(f"{clause(error)}. The run is complete, but its metrics cannot be shown.")
        return {}, {}


def result_of(directory: RunDirectory, manifest: dict[str, Any]) -> RunResult:
    """The result of a finished run.

    Raises:
        OutputError: if its files cannot be read.
    """
    try:
        before, after = first_and_last(directory)
        samples = [sample for _, sample in read_log(directory.path / "samples.jsonl")]
    except DataError as error:
        raise OutputError(f"{clause(error)}. Correct or delete that line.") from error
    return RunResult(directory.path, directory.model, int(manifest["steps"]), float(manifest["seconds"]), before, after,
                     samples)


def export_result(engine: Engine, tokenizer: Any, path: Path, dtype_name: str, stop_ids: Sequence[int],
                  initial: dict[str, torch.Tensor] | None, voice: Voice) -> None:
    """Write the model or adapter directory. All processes call this together.

    Args:
        dtype_name: of the weights, as torch calls it.
        initial: weights before step 1, to report the share of changed weights that rounding keeps; None to skip it.

    Raises:
        OutputError: if it cannot be written.
    """
    dtype, world, module = getattr(torch, dtype_name), engine.world, engine.model.module
    weights = None
    if world.mesh is not None:
        learning = adapter_weight_names(module)
        weights = gathered({name: weight for name, weight in module.state_dict().items()
                            if learning is None or name in learning}, dtype, world.is_main)
    world.on_main(lambda: check_owned(path.parent, path))
    world.on_main(lambda: save.export(module, tokenizer, path, dtype, stop_ids, weights))
    if initial is not None:
        if not world.is_main:  # which counts what all hold
            initial = {name: before for name, before in initial.items() if axes_of(module.get_parameter(name))}
        own = save.count_changed_weights(module, initial, dtype)
        changed, kept = map(sum, zip(*(world.gather(own) if world.mesh else [own]), strict=True))
        share = kept / changed if changed else 1.0
        voice.say(f"export in {dtype_name}: rounding keeps {share:.1%} of the changed weights")


def begin_files(directory: RunDirectory, inputs: RunInputs, facts: dict[str, Any], earlier: dict[str, Any] | None,
                step: int) -> Manifest:
    """Write `audit.json`, `eval_rows.jsonl` and the manifest, beside a `config.yaml` that is written already. Removes
    what an earlier attempt wrote at its end.

    Args:
        facts: about the model and the inputs.
        earlier: manifest of the run that is resumed, after `step`; None for a new run.

    Raises:
        OutputError: if the disk refuses.
    """
    options, world = inputs.options, inputs.world
    directory.write_json("audit.json", inputs.data.to_json())
    found = {"seed": options.seed, "world_size": world.size, "device": str(world.device),
             "precision": inputs.numerics.precision, **facts, **_begin_row_files(directory, inputs)}
    if world.device.type == "cuda":
        found["device_name"] = torch.cuda.get_device_name(world.device)
    manifest = Manifest(directory, found, earlier, step)
    prints = {**manifest.facts["fingerprints"], "config": file_hash(directory.path / "config.yaml")}
    manifest.add(fingerprints=prints)  # options that may change may have changed since the run began
    return manifest


def _begin_row_files(directory: RunDirectory, inputs: RunInputs) -> dict[str, Any]:
    """Write `eval_rows.jsonl`, and return the facts for the manifest."""
    for name in (SCORES, MOVED):
        directory.remove(name)
    weights = [inputs.options.model_dump().get(name) for name in ("desirable_weight", "undesirable_weight")]
    term = inputs.method.preference
    facts: dict[str, Any] = {}
    if "auto" in weights and term is not None:
        facts["class_weights"] = [term.options["desirable_weight"], term.options["undesirable_weight"]]
    if inputs.method.divisor:
        facts["weighted_rows"] = True
    if not inputs.data.evaluation:
        directory.remove(EVAL_ROWS)
        return facts
    directory.write_lines(EVAL_ROWS, eval_lines(inputs.data.evaluation))
    facts["held_out_prompts"] = len({row.prompt_key for row in inputs.held_out})
    return {**facts, "files": {EVAL_ROWS: checksum(directory.path / EVAL_ROWS)}}


def export_scores(directory: RunDirectory, inputs: RunInputs, engine: Engine, evaluator: Evaluator | None,
                  voice: Voice) -> tuple[Files, HeldOutScores | None]:
    """Write `scores.parquet` and `moved.jsonl`. If that fails the run ends without them: its model is complete.

    Args:
        evaluator: has evaluated the initial and the trained policy; None without held-out rows.

    Returns:
        Their checksums, and the scores of the held-out rows; None without any.
    """
    held_out, own = None, inputs.method.needs_reference and inputs.reference is None
    if evaluator is not None and evaluator.last is not None:
        # With the default reference, whose scores are stored, a resumed run knows the same values as a straight one.
        after = evaluator.last
        before = replace(after, logps=after.reference_logps) if own else evaluator.first or after
        held_out = HeldOutScores(evaluator.rows, before, after, inputs.method)
    path, reference = directory.path / SCORES, engine.reference
    check_owned(directory.path, path)
    files: Files = {}
    try:
        write_scores(path, inputs.data.train, held_out,
                     reference.scores if isinstance(reference, StoredReference) else {})
        files[SCORES] = checksum(path)
        if held_out is not None:
            directory.write_lines(MOVED, moved_lines(held_out, inputs.tokenizer))
            files[MOVED] = checksum(directory.path / MOVED)
    except (OSError, OutputError) as error:
        voice.warn(f"{clause(error)}. The run is complete without this file.")
    return files, held_out


def finish(directory: RunDirectory, manifest: Manifest | None, state: RunState, samples: list[dict[str, Any]],
           total_steps: int, held_out: HeldOutScores | None, stop_ids: Sequence[int], world: World, voice: Voice,
           **facts: Any) -> RunResult:
    """Complete the manifest and report the result. All processes call this together.

    Args:
        manifest: on the main process.
        samples: lines of `samples.jsonl`.
        total_steps: that were planned.
        held_out: the rows that were evaluated; None without any.
        stop_ids: ids that end a completion.
        facts: others for the manifest.
    """
    seconds, steps = state.elapsed_s, state.step
    before, after = world.broadcast(_measured(directory, voice) if world.is_main else ({}, {}))
    if manifest is not None:
        verdict = Verdict("none", NO_ROWS) if held_out is None else verdict_on(held_out, before, after)
        reason = {"reason": state.ending, "stopped_by": "stop_metric"} if state.ending else {}
        manifest.end("done", steps=steps, planned_steps=total_steps, seconds=round(seconds, 3),
                     model_files=checksums(directory.model), stop_ids=list(stop_ids), verdict=verdict.to_json(),
                     **reason, **facts)
        effort = f"{count_of(steps, 'step')}, {seconds:.0f} s"
        _show(directory, verdict, samples, before, after, held_out, effort, _started_from(manifest.facts), voice)
    return RunResult(directory.path, directory.model, steps, seconds, before, after, samples)


def _show(directory: RunDirectory, verdict: Verdict, samples: Sequence[dict[str, Any]], before: dict[str, float],
          after: dict[str, float], held_out: HeldOutScores | None, effort: str, started: str, voice: Voice) -> None:
    """Print the metrics, the verdict, a sample, and what can be done next.

    Args:
        effort: steps and seconds.
        started: model that the run started from; empty if it has no name.
    """
    voice.concluding()
    what = (f"{count_of(len(held_out.rows), 'held-out row')}, before and after training (95% intervals in brackets)"
            if held_out else "first and last training record")
    voice.before_after(what, before, after, leave_out=BOOKKEEPING)
    voice.say(f"model: {directory.model}  ({effort})", str(verdict))
    if samples:
        sample = samples[0]
        voice.say(f"sample of {'a held-out' if sample['held_out'] else 'a training'} prompt:",
                  f"  prompt: {_end(sample['prompt'])}", f"  before: {start_of(sample['before'])}",
                  f"  after:  {start_of(sample['after'])}")
    run = shlex.quote(str(directory.path))
    adapter = directory.model / "adapter_config.json"
    base = _named_base(adapter)
    merged = " --merge" if base else ""
    voice.say("next:", f"  tropism report {run}")
    if merged or not adapter.exists():
        voice.say(f"  tropism chat {run}" + (f" --compare {shlex.quote(started)}" if started else ""))
    voice.say(f"  tropism export {run} --to DIR{merged}")
    if merged:
        voice.say("  The model is an adapter; --merge adds it to its base.")
    if base.lower().endswith(".gguf"):
        voice.warn(f"{GGUF_BASE}.")
    if held_out is not None:
        voice.say(f"  tropism evaluate {run}")


def _started_from(facts: Mapping[str, Any]) -> str:
    """The model that the run started from, by its name; empty for a module from Python."""
    name = str(facts.get("model") or "")
    return "" if "given in Python" in name else name


def _end(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"...{text[3 - _SHOWN:]}"


def _named_base(config: Path) -> str:
    """The base of an adapter that can be merged. Empty for another model; a module from Python has no name."""
    return str(json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path") or "") if (
        config.exists()) else ""
