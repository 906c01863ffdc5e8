"""The commands and their parameters, as cyclopts parses them. Each is one call; `table` has their help.

What imports torch is imported in a command, after its paths were checked and its first line was printed.
"""

from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Literal, get_args

from cyclopts import App, CycloptsError

from tropism.cli.arguments import device_of, names_of, note, of_another, planned, spelled_out
from tropism.cli.before_torch import check_planning, check_training, start
from tropism.cli.initialize import initial, initialize
from tropism.cli.other_names import translate
from tropism.cli.parameters import DeviceName, File, Flat, Name, Output, Word
from tropism.cli.results import RESULTS
from tropism.cli.sweeping import names_a_sweep, sweep_runs
from tropism.cli.table import COMMANDS
from tropism.cli.usage_errors import explain_error, known_options
from tropism.commands.files import check_new, check_reports, voice_beside, write_json
from tropism.config import ConvertOptions, DPOOptions, KDOptions, KTOOptions, MethodOptions, SFTOptions
from tropism.errors import UsageError, did_you_mean
from tropism.files import check_creatable
from tropism.observe.console import Voice
from tropism.observe.rundir import RunDirectory, free_name
from tropism.options import check_file_name

app = App(name="tropism", result_action="return_value", help_flags=(), version_flags=(),
          suppress_keyboard_interrupt=False)
store = App(name="store", result_action="return_value", help_flags=(), version_flags=())
app.command(store)
for one in RESULTS:
    app.command(one)

_began: ContextVar[float | None] = ContextVar("began", default=None)
"""Monotonic time at which the command line was called: `--max-time` counts from it."""

_planning: ContextVar[dict[str, str] | None] = ContextVar("planning", default=None)
"""Options of `tropism plan`, if the run is planned instead of started."""

_initial: ContextVar[tuple[dict[str, str], set[str]] | None] = ContextVar("initial", default=None)
"""Options of `tropism init` and names of those of the run, if a file is written instead."""

def call(tokens: list[str], began: float) -> int:
    """Run the command that the tokens name, and return its exit code.

    Args:
        began: monotonic time at which the command line was called.

    Raises:
        UsageError: for an unknown command or option, a missing one, or an invalid value.
        TropismError: from the command.
    """
    if tokens[0].startswith("-"):
        hint = did_you_mean(tokens[0].lstrip("-"), ("help", "version", "install-completion", "show-completion"), "--{}")
        raise UsageError(f"unknown option {tokens[0]}. {hint}")
    if not {tokens[0], " ".join(tokens[:2])} & COMMANDS.keys():
        inside = any(name.startswith(f"{tokens[0]} ") for name in COMMANDS)
        typed = " ".join(tokens[:2]) if inside else tokens[0]
        raise UsageError(f"unknown command {typed}. {did_you_mean(typed, COMMANDS)}")
    _began.set(began)
    _planning.set(None)
    _initial.set(None)
    initials: dict[str, str] | None = None
    if tokens[0] == "init":
        tokens, initials = initial(tokens[1:])
    if tokens[0] == "plan":
        tokens, own = planned(tokens[1:])
        _planning.set(own)
    if names_a_sweep(tokens):
        return sweep_runs(translate(tokens, known_options(tokens), note), _parsed)
    if tokens[0] == "migrate":
        tokens = of_another(tokens)
    else:
        tokens = spelled_out(translate(tokens, known_options(tokens), note))
    if initials is not None:
        _initial.set((initials, names_of(tokens)))
    try:
        return int(app(tokens, exit_on_error=False, print_error=False) or 0)
    except CycloptsError as error:
        raise UsageError(explain_error(error, tokens)) from None


def _parsed(tokens: list[str]) -> MethodOptions:
    """The options of a training command that is not run now."""
    try:
        options = app.parse_args(tokens, exit_on_error=False, print_error=False)[1].arguments["options"]
    except CycloptsError as error:
        raise UsageError(explain_error(error, tokens)) from None
    assert isinstance(options, MethodOptions)
    return options


def _run(options: MethodOptions) -> int:
    if (own := _planning.get()) is not None:
        return _plan(options, own)
    if (wanted := _initial.get()) is not None:
        return initialize(options, *wanted, get_args(DeviceName))
    check_training(options)
    start(Voice(), options.method, model=options.model, teacher=getattr(options, "teacher", None), data=options.data,
          output=options.output)
    from tropism.runner import run

    run(options, began=_began.get())
    return 0


def _plan(options: MethodOptions, own: dict[str, str]) -> int:
    device, json = device_of(own, get_args(DeviceName)), None
    if "--json" in own:
        try:
            json = Path(check_file_name(own["--json"]))
        except ValueError as error:
            raise UsageError(f"--json: {error}") from None
    check_reports(json, inputs=",".join(filter(None, (options.data, options.eval_data, options.model))))
    check_planning(options)
    voice = voice_beside(json)
    start(voice, "plan", method=options.method, model=options.model, teacher=getattr(options, "teacher", None),
          data=options.data, device=device)
    from tropism.commands import plan as planning

    found = planning.plan(options, device, voice)
    voice.concluding()
    planning.show(found, voice)
    if json is not None:
        write_json(json, found.to_json())
    return 0


@app.command
def kto(*, options: Annotated[KTOOptions, Flat]) -> int:
    """Train with KTO options."""
    return _run(options)


@app.command
def dpo(*, options: Annotated[DPOOptions, Flat]) -> int:
    """Train with DPO options."""
    return _run(options)


@app.command
def sft(*, options: Annotated[SFTOptions, Flat]) -> int:
    """Train with SFT options."""
    return _run(options)


@app.command
def kd(*, options: Annotated[KDOptions, Flat]) -> int:
    """Train with KD options."""
    return _run(options)


@app.command
def convert(data: Name, /, *, options: Annotated[ConvertOptions, Flat], json: File | None = None) -> int:
    """Write rows in another shape, and print the account."""
    from tropism.commands import convert as converting

    check_reports(json, inputs=data, beside=Path(options.output))
    voice = voice_beside(Path(options.output), json)
    report = converting.convert(data, options, voice)
    converting.show(report, Path(options.output), voice)
    if json is not None:
        converting.write_report(report, json)
    return 0


@app.command
def train(config: Path, /) -> int:
    """Never called: `spelled_out` replaces it by the method of the file."""
    raise NotImplementedError(config)


@app.command
def resume(run: Path, /) -> int:
    """Never called: `spelled_out` replaces it by the method of the run."""
    raise NotImplementedError(run)


@app.command
def sweep(config: Path, /, *, output: Path | None = None, trust_remote_code: bool = False) -> int:
    """Never called: `sweep_runs` reads its arguments."""
    raise NotImplementedError(config, output, trust_remote_code)


@app.command
def plan(config: Path, /, *, device: DeviceName | None = None, json: File | None = None) -> int:
    """Never called: `planned` replaces it by the method of the run."""
    raise NotImplementedError(config, device, json)


@app.command
def init(method: Word = "auto", /, *, to: File | None = None, device: DeviceName | None = None) -> int:
    """Never called: `initial` replaces it by the method."""
    raise NotImplementedError(method, to, device)


@app.command
def schema(method: Literal["kto", "dpo", "sft", "kd"] | None = None, /) -> int:
    """Print the JSON schema of YAML files."""
    from tropism.commands import schema as describing

    write_json(Path("/dev/stdout"), describing.schema(method))
    return 0


@app.command
def migrate(trainer: Word, /, *command: Word, yaml: File | None = None) -> int:
    """Print our command for one of another trainer, and write its options to a file."""
    from tropism.commands import migrate as migrating

    if yaml is not None:
        check_new(yaml)
    found = migrating.migrate(trainer, command)
    if yaml is not None:
        migrating.write_yaml(found, yaml)
    migrating.show(found, voice_beside(yaml), yaml)
    return 0


@app.command
def demo(*, output: Output | None = None) -> int:
    """Run the demonstration."""
    output = output or free_name(Path("demo-run"))
    RunDirectory(output.expanduser()).check_resume("never")
    check_creatable(output.expanduser())
    start(Voice(), "demo", output=output)
    from tropism.commands.demo.run import main as run_demo

    run_demo(output)
    return 0


@app.command
def doctor(*, json: File | None = None, store: File | None = None) -> int:
    """Print what is installed, what the machine has and what is broken; exit code 1 if a run would fail."""
    check_reports(json)
    from tropism.commands import doctor as examining

    found = examining.examine(store)
    examining.show(found, voice_beside(json))
    if json is not None:
        write_json(json, found.to_json())
    return int(bool(found.faults))


@store.command(name="list")
def store_list(*, store: File | None = None) -> int:
    """Print the entries of the cache."""
    from tropism.commands import store as storing  # slow to import

    storing.show(store, Voice())
    return 0


@store.command(name="clean")
def store_clean(fingerprint: Name | None = None, *, store: File | None = None) -> int:
    """Delete entries of the cache."""
    from tropism.commands import store as storing

    storing.clean(store, fingerprint, Voice())
    return 0


__all__ = ["app", "call"]
