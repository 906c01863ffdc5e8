"""`tropism sweep`, and `tropism resume` of a sweep."""

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tropism.cli.arguments import decides_code, file_named, join_booleans, note, of_file, value_of
from tropism.cli.before_torch import check_planning, start
from tropism.commands.sweep.plan import OWN, Plan, Run, check_empty, is_sweep, read_plan
from tropism.commands.sweep.processes import train_all
from tropism.commands.sweep.values import Values, read_values, typed
from tropism.config import METHODS, MethodOptions
from tropism.config_file import CODE, read_yaml
from tropism.errors import StoppedEarly, TropismError, UsageError, count_of
from tropism.files import check_creatable
from tropism.observe.console import Voice
from tropism.observe.lock import Ownership
from tropism.options import check_file_name


def names_a_sweep(tokens: Sequence[str]) -> bool:
    """Whether a command starts or resumes a sweep."""
    return tokens[0] == "sweep" or (tokens[0] == "resume" and len(tokens) > 1 and not tokens[1].startswith("-")
                                    and is_sweep(Path(file_named("RUN", tokens[1])).expanduser()))


def sweep_runs(tokens: Sequence[str], parse: Callable[[list[str]], MethodOptions]) -> int:
    """Train the runs of a sweep, and compare them.

    Args:
        tokens: of the command.
        parse: gives the options of a training command, or an error for users.

    Raises:
        UsageError: if a combination is invalid, before the first run starts, or the sweep in the directory is another.
        StoppedEarly: if a run was stopped; the sweep can be resumed.
        TropismError: if a run failed, after the others.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("tropism sweep starts a process for each run. Start it without torchrun.")
    tokens = join_booleans(list(tokens))
    plan, directory, code = (_resumed if tokens[0] == "resume" else _new)(tokens[1:])
    directory = _among(plan, directory)
    said: set[str] = set()

    def command(method: str, options: dict[str, Any], given: Sequence[str]) -> tuple[list[str], MethodOptions]:
        words = join_booleans(of_file(method, options, given, plan.base, said.add))
        found = parse([*words, *code])
        check_planning(found)
        return words, found

    if is_sweep(directory):
        plan = plan.grown(read_plan(directory, decides_code(code)), directory)
    else:
        check_empty(directory)
    if unknown := [name for name in plan.values if name.replace("-", "_") not in METHODS[plan.method].flat_fields()]:
        command(plan.method, plan.options, [f"--{unknown[0]}={plan.values[unknown[0]][0]}", f"--output={directory}"])
    runs = plan.runs(directory, command)
    check_creatable(directory)
    voice = Voice()
    start(voice, "sweep", base=plan.base, output=directory)
    voice.say(f"{count_of(len(runs), 'run')}: {typed(plan.values)}")
    for text in sorted(said):
        note(text)
    if not all(run.options.eval_fraction or run.options.eval_data for run in runs):
        voice.warn("not all runs hold out rows, so they cannot be compared. Add --eval-fraction 0.1 or --eval-data "
                   "FILE.")
    with Ownership(directory, voice.warn) as ownership:
        ownership.take()
        plan.write(directory)
        return _train(plan, runs, directory, code, voice)


def _train(plan: Plan, runs: list[Run], directory: Path, code: list[str], voice: Voice) -> int:
    outcomes = train_all(runs, directory, code, voice)
    from tropism.commands.sweep.table import show, table_of, write  # imports torch

    found = table_of(runs, outcomes, plan.swept)
    write(found, directory)
    show(found, directory, voice)
    again = f"tropism resume {shlex.quote(str(directory))}"
    for status in ("failed", "stopped"):
        named = [name for name, outcome in outcomes.items() if outcome.status == status]
        if named:
            text = f"{len(named)} of {len(runs)} runs {status}: {', '.join(named)}."
            if status == "stopped":
                raise StoppedEarly(f"{text} To resume: {again}")
            raise TropismError(f"{text} The others are not affected. To try again: {again}")
    return 0


def _new(tokens: list[str]) -> tuple[Plan, Path, list[str]]:
    """The plan of a command, the directory of its runs, and the options of code that may run in each."""
    if not tokens or tokens[0].startswith("-"):
        raise UsageError("CONFIG is required. Example: tropism sweep base.yaml --learning-rate 1e-6,5e-6 --seed 0,1")
    path = file_named("CONFIG", tokens[0])
    method, options = read_yaml(path, decided=decides_code(tokens), say=note)
    if method is None:
        raise UsageError(f"{path}: `method:` is missing. Add one of {', '.join(METHODS)}")
    values = read_values(tokens[1:], METHODS[method])
    directory = _output(values, path)
    code = _code(values)
    if own := [f"--{name}" for name in values if name.replace("-", "_") in OWN]:
        raise UsageError(f"{' and '.join(own)}: a sweep decides this for each run. Remove it.")
    options = {name: value for name, value in options.items() if name not in OWN and value is not None}
    return Plan(os.path.abspath(Path(path).expanduser()), os.getcwd(), method, {**options, **_asked_for(code)},
                values), directory, code


def _asked_for(code: list[str]) -> dict[str, str]:
    """What the record of a sweep has of the options of code, so that resuming asks for it again."""
    named = value_of("evaluator", code)
    return {} if named is None else {"evaluator": named}


def _code(values: Values) -> list[str]:
    """Takes the options that decide which code may run out of those of a command."""
    found = []
    for name in sorted(CODE):
        own = values.pop(name.replace("_", "-"), [])
        if len(own) > 1 and name != "evaluator":
            raise UsageError(f"--{name.replace('_', '-')}: a sweep has one value for all runs")
        found += [f"--{name.replace('_', '-')}={','.join(own)}"] if own else []
    return found


def _output(values: Values, base: str) -> Path:
    given = values.pop("output", [f"{Path(base).stem}-sweep"])
    if len(given) > 1:
        raise UsageError("--output names one directory, in which each run gets its own")
    try:
        return Path(check_file_name(given[0], for_models=True)).expanduser()
    except ValueError as error:
        raise UsageError(f"--output: {error}") from None


def _resumed(tokens: list[str]) -> tuple[Plan, Path, list[str]]:
    directory = Path(tokens[0]).expanduser()
    values = read_values(tokens[1:], METHODS["kto"])  # of these options every method has the same
    code = _code(values)
    if values:
        raise UsageError(f"--{next(iter(values))}: a sweep keeps its options. Remove it, or start another sweep with "
                         "tropism sweep CONFIG --output NEW")
    plan = read_plan(directory, decides_code(code))
    return replace(plan, options={**plan.options, **_asked_for(code)}), directory, code


def _among(plan: Plan, directory: Path) -> Path:
    """The directory of the runs, seen from the one that relative paths refer to, which becomes the current one."""
    if plan.started_in == os.getcwd():
        return directory
    directory = directory.absolute()
    try:
        os.chdir(plan.started_in)
    except OSError as error:
        raise UsageError(f"{directory}: cannot resume: {plan.started_in}, where the sweep was started and which "
                         f"relative paths refer to: {error.strerror}. If only its place changed, correct `started_in:` "
                         "in sweep.yaml.") from None
    return directory
