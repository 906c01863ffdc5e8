"""The commands and their parameters, as cyclopts parses them. Each is one call; `table` has their help.

What imports torch is imported in a command, after its paths were checked and its first line was printed.
"""

import webbrowser
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Literal, get_args

from cyclopts import App, CycloptsError, Parameter

from tropism.cli.arguments import device_of, names_of, note, of_another, planned, spelled_out
from tropism.cli.before_torch import (
    check_chat,
    check_exporting,
    check_inspection,
    check_planning,
    check_scoring,
    check_training,
    start,
)
from tropism.cli.initialize import initial, initialize
from tropism.cli.other_names import translate
from tropism.cli.sweeping import names_a_sweep, sweep_runs
from tropism.cli.table import COMMANDS
from tropism.cli.usage_errors import explain_error, known_options
from tropism.commands.files import check_new, check_reports, check_run, check_scores, voice_beside, write_json
from tropism.commands.sweep.plan import is_sweep, runs_of
from tropism.config import (
    ChatOptions,
    ConvertOptions,
    DPOOptions,
    InspectOptions,
    KDOptions,
    KTOOptions,
    MethodOptions,
    ScoringOptions,
    SFTOptions,
)
from tropism.errors import TropismError, UsageError, count_of, did_you_mean
from tropism.files import check_creatable
from tropism.observe.console import Voice, attended
from tropism.observe.rundir import REPORT, RunDirectory, free_name
from tropism.options import check_file_name, check_size

app = App(name="tropism", result_action="return_value", help_flags=(), version_flags=(),
          suppress_keyboard_interrupt=False)
store = App(name="store", result_action="return_value", help_flags=(), version_flags=())
app.command(store)

_began: ContextVar[float | None] = ContextVar("began", default=None)
"""Monotonic time at which the command line was called: `--max-time` counts from it."""

_planning: ContextVar[dict[str, str] | None] = ContextVar("planning", default=None)
"""Options of `tropism plan`, if the run is planned instead of started."""

_initial: ContextVar[tuple[dict[str, str], set[str]] | None] = ContextVar("initial", default=None)
"""Options of `tropism init` and names of those of the run, if a file is written instead."""

_Flat = Parameter(name="*")
_SCORING = ScoringOptions()
_CHAT = ChatOptions()
_Name = Annotated[str, Parameter(converter=lambda _, tokens: check_file_name(tokens[0].value))]
_Word = Annotated[str, Parameter(converter=lambda _, tokens: tokens[0].value)]
_File = Annotated[Path, Parameter(converter=lambda _, tokens: Path(check_file_name(tokens[0].value)))]
_Output = Annotated[Path, Parameter(
    converter=lambda _, tokens: Path(check_file_name(tokens[0].value, for_models=True)))]
_Size = Annotated[str, Parameter(converter=lambda _, tokens: check_size(tokens[0].value))]
_Device = Literal["h100-80gb", "h200", "a100-80gb", "rtx4090", "cpu"]
_DType = Literal["fp32", "bf16", "fp16", "fp64", "float32", "bfloat16", "float16", "float64"]
_Format = Literal["f32", "bf16", "f16", "q8_0", "q4_k_m"]


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
        return initialize(options, *wanted, get_args(_Device))
    check_training(options)
    start(Voice(), options.method, model=options.model, teacher=getattr(options, "teacher", None), data=options.data,
          output=options.output)
    from tropism.runner import run

    run(options, began=_began.get())
    return 0


def _plan(options: MethodOptions, own: dict[str, str]) -> int:
    device, json = device_of(own, get_args(_Device)), None
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
def kto(*, options: Annotated[KTOOptions, _Flat]) -> int:
    """Train with KTO options."""
    return _run(options)


@app.command
def dpo(*, options: Annotated[DPOOptions, _Flat]) -> int:
    """Train with DPO options."""
    return _run(options)


@app.command
def sft(*, options: Annotated[SFTOptions, _Flat]) -> int:
    """Train with SFT options."""
    return _run(options)


@app.command
def kd(*, options: Annotated[KDOptions, _Flat]) -> int:
    """Train with KD options."""
    return _run(options)


@app.command
def evaluate(model: _Name, *models: _Name, options: Annotated[ScoringOptions, _Flat] = _SCORING,
             json: _File | None = None) -> int:
    """Print figures of models, and write them to a file."""
    check_reports(json, inputs=",".join([options.data or "", model, *models]))
    for name in (model, *models):
        check_scoring(name, options)
    voice = voice_beside(json)
    start(voice, "evaluate", model=", ".join([model, *models]), reference=options.reference, data=options.data)
    from tropism.commands.scoring import compare, figures, score, show

    if models:
        compared = compare([model, *models], options, voice)
        if compared is not None:
            voice.concluding()
            show(compared, voice)
            if json is not None:
                check_reports(json, inputs=compared.scores[0].source)
                write_json(json, compared.to_json())
        return 0
    scores = score(model, options, voice)
    if not scores.is_main:
        return 0
    found = figures(scores)
    voice.concluding()
    voice.figures(count_of(len(scores.rows), "row"), found)
    if json is not None:
        check_reports(json, inputs=scores.source)
        write_json(json, {"model": model, **scores.options.dump(), "data": scores.source,
                          "rows": len(scores.rows), "metrics": found})
    return 0


@app.command
def inspect(data: _Name, /, *, options: Annotated[InspectOptions, _Flat], html: _File | None = None,
            json: _File | None = None) -> int:
    """Print findings and rows, and write them to files."""
    check_reports(html, json, inputs=data)
    check_inspection(data, options)
    voice = voice_beside(html, json)
    if voice.console.is_terminal:  # elsewhere the report is all
        start(voice, "inspect", model=options.model, data=data)
    from tropism.commands import inspect as inspecting

    found = inspecting.inspect(data, options, voice)
    voice.concluding()
    inspecting.show(found, voice)
    if html is not None:
        inspecting.write_html(found, html)
    if json is not None:
        inspecting.write_json(found, json)
    if options.strict:
        found.check()
    return 0


@app.command
def chat(model: _Name, /, *, options: Annotated[ChatOptions, _Flat] = _CHAT) -> int:
    """Answer what the user types."""
    feedback = check_chat(model, options)
    notes = Voice(errors=not attended())  # a script gets the answers alone
    start(notes, "chat", model=model, compare=options.compare, feedback=options.feedback)
    from tropism.commands.chat.run import chat as talk

    talk(model, options, feedback, Voice(), notes)
    return 0


@app.command
def report(run: _File, /, *runs: _File, html: _File | None = None, figures: _Output | None = None,
           open: bool = False) -> int:
    """Write a page about runs: curves, rankings, rows, samples, options."""
    every = runs_of((run, *runs)) or [run]
    for one in every:
        check_run(one, "report")
    page = (run if is_sweep(run) else every[0]).expanduser() / REPORT if html is None else html
    check_reports(page, runs=every)
    if figures is not None and figures.expanduser().exists() and not figures.expanduser().is_dir():
        raise UsageError(f"--figures {figures} is not a directory. Choose another name.")
    from tropism import report as reporting

    found = reporting.report(every)
    reporting.write_page(found, page)
    voice = voice_beside(html)
    for read in found.runs:
        named = f"{read.name}: " if len(found.runs) > 1 else ""
        voice.say(f"{named}{read.verdict or 'no verdict yet: it needs the evaluations before and after training'}")
    voice.say(f"page: {page}")
    if figures is not None:
        paths = reporting.write_figures(found, figures.expanduser())
        voice.say(f"figures: {count_of(len(paths), 'file')} in {figures}")
    if open and not webbrowser.open(page.resolve().as_uri()):
        voice.warn(f"no browser was found. Open {page}")
    return 0


@app.command
def convert(data: _Name, /, *, options: Annotated[ConvertOptions, _Flat], json: _File | None = None) -> int:
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
def score(model: _Name, *, output: _Output, options: Annotated[ScoringOptions, _Flat] = _SCORING,
          keep_columns: bool = False) -> int:
    """Write one record per row."""
    check_scores(output)
    check_scoring(model, options)
    voice = voice_beside(output)
    start(voice, "score", model=model, reference=options.reference, data=options.data, output=output)
    from tropism.commands import scoring

    found = scoring.score(model, options, voice)
    if not found.is_main:
        return 0
    columns = scoring.original_columns(found.source, found.split) if keep_columns else None
    scoring.write(scoring.records(found, columns=columns), output)
    voice.concluding()
    voice.say(f"{output}: {count_of(len(found.rows), 'row')}")
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
def plan(config: Path, /, *, device: _Device | None = None, json: _File | None = None) -> int:
    """Never called: `planned` replaces it by the method of the run."""
    raise NotImplementedError(config, device, json)


@app.command
def init(method: _Word = "auto", /, *, to: _File | None = None, device: _Device | None = None) -> int:
    """Never called: `initial` replaces it by the method."""
    raise NotImplementedError(method, to, device)


@app.command
def schema(method: Literal["kto", "dpo", "sft", "kd"] | None = None, /) -> int:
    """Print the JSON schema of YAML files."""
    from tropism.commands import schema as describing

    write_json(Path("/dev/stdout"), describing.schema(method))
    return 0


@app.command
def migrate(trainer: _Word, /, *command: _Word, yaml: _File | None = None) -> int:
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
def demo(*, output: _Output | None = None) -> int:
    """Run the demonstration."""
    output = output or free_name(Path("demo-run"))
    RunDirectory(output.expanduser()).check_resume("never")
    check_creatable(output.expanduser())
    start(Voice(), "demo", output=output)
    from tropism.commands.demo.run import main as run_demo

    run_demo(output)
    return 0


@app.command
def verify(run: _File, /, *, json: _File | None = None, trust_remote_code: bool = False) -> int:
    """Print what was checked; exit code 1 if something differs."""
    check_reports(json, inputs=str(run))
    check_run(run, "verify")
    voice = voice_beside(json)
    start(voice, "verify", run=run)
    from tropism.commands import verify as verifying

    verdict = verifying.verify(run, trust_remote_code)
    verifying.show(verdict, voice)
    if json is not None:
        verifying.write(verdict, json)
    return 0 if verdict.intact and verdict.repeatable else 1


@app.command
def export(run: _File, /, *, to: _Output, merge: bool = False, dtype: _DType | None = None,
           checkpoint: _Name | None = None, max_shard_size: _Size | None = None, base: _Name | None = None,
           gguf: _Format | None = None, llama_cpp: _File | None = None, ollama: bool = False,
           trust_remote_code: bool = False, push: _Name | None = None, private: bool = False) -> int:
    """Write a model directory."""
    check_exporting(run, to, base, push is not None)
    start(Voice(), "export", run=run, to=to, push=push)
    from tropism.commands import export as exporting

    try:
        exporting.export(run, to, merge=merge, dtype=dtype, checkpoint=checkpoint, max_shard_size=max_shard_size,
                         base=base, gguf=gguf, llama_cpp=llama_cpp, ollama=ollama,
                         trust_remote_code=trust_remote_code, push=push, private=private)
    except KeyboardInterrupt:
        complete = (to / "export.json").is_file()
        again = ". To upload it, run the same command again." if complete and push is not None else ""
        raise TropismError(f"interrupted. {to} is " + ("complete" if complete else "unchanged") + again) from None
    return 0


@app.command
def doctor(*, json: _File | None = None, store: _File | None = None) -> int:
    """Print what is installed, what the machine has and what is broken; exit code 1 if a run would fail."""
    check_reports(json)
    from tropism.commands import doctor as examining

    found = examining.examine(store)
    examining.show(found, voice_beside(json))
    if json is not None:
        write_json(json, found.to_json())
    return int(bool(found.faults))


@store.command(name="list")
def store_list(*, store: _File | None = None) -> int:
    """Print the entries of the cache."""
    from tropism.commands import store as storing  # slow to import

    storing.show(store, Voice())
    return 0


@store.command(name="clean")
def store_clean(fingerprint: _Name | None = None, *, store: _File | None = None) -> int:
    """Delete entries of the cache."""
    from tropism.commands import store as storing

    storing.clean(store, fingerprint, Voice())
    return 0


__all__ = ["app", "call"]
