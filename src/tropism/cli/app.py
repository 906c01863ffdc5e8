"""The command line: parse, one call, exit code. It imports torch only when a command needs it."""

import sys
import time
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Literal

import cyclopts
from cyclopts import App, CycloptsError, Parameter
from rich.console import Console

from tropism.cli.arguments import spelled_out
from tropism.config import (
    METHODS,
    ConvertOptions,
    DPOOptions,
    InspectOptions,
    KDOptions,
    KTOOptions,
    MethodOptions,
    ScoringOptions,
    SFTOptions,
    explain,
    nearest,
    place_of,
)
from tropism.errors import StoppedEarly, TropismError, UsageError
from tropism.observe.attempt import follows_stop, note_stop, say_once

app = App(name="tropism", help="Align and distill language models offline: exact, fast, kind.",
          result_action="return_value", help_format="plaintext", suppress_keyboard_interrupt=False)
store = App(name="store", help="Reference scores and rendered rows that are kept between runs.",
            result_action="return_value")
app.command(store)

_began: ContextVar[float | None] = ContextVar("began", default=None)
"""When the command line was called, of the monotonic clock: from there on --max-time counts."""

_Flat = Parameter(name="*")
_DType = Literal["fp32", "bf16", "fp16", "fp64", "float32", "bfloat16", "float16", "float64"]


def _run(options: MethodOptions) -> int:
    from tropism.runner import run  # imports torch: not for --help

    run(options, began=_began.get())
    return 0


@app.command
def kto(*, options: Annotated[KTOOptions, _Flat]) -> int:
    """Train on single completions, each labeled desirable or undesirable. --config FILE reads options from YAML."""
    return _run(options)


@app.command
def dpo(*, options: Annotated[DPOOptions, _Flat]) -> int:
    """Train on pairs of a chosen and a rejected completion. --config FILE reads options from YAML."""
    return _run(options)


@app.command
def sft(*, options: Annotated[SFTOptions, _Flat]) -> int:
    """Train to imitate completions. --config FILE reads options from YAML."""
    return _run(options)


@app.command
def kd(*, options: Annotated[KDOptions, _Flat]) -> int:
    """Train a student to say what a teacher says. --config FILE reads options from YAML."""
    return _run(options)


@app.command
def evaluate(model: str, *, options: Annotated[ScoringOptions, _Flat], json: Path | None = None) -> int:
    """Say what a model thinks of held-out rows: accuracies or AUC, margins, log-probs, perplexity, KL.

    Parameters
    ----------
    model
        A Hugging Face directory, a hub id, a GGUF file, an adapter, or a run directory.
    json
        Also write the figures to this file.
    """
    from tropism.commands.files import check_writable, write_json
    from tropism.commands.scoring import figures, score
    from tropism.observe.console import Voice

    if json is not None:
        check_writable(json)
    scores = score(model, options)
    if not scores.is_main:
        return 0
    found = figures(scores, options.beta)
    Voice().figures(f"{len(scores.rows)} rows", found)
    if json is not None:
        write_json(json, {"model": model, **options.dump(), "rows": len(scores.rows), "metrics": found})
    return 0


@app.command
def inspect(data: str, /, *, options: Annotated[InspectOptions, _Flat], html: Path | None = None,
            json: Path | None = None) -> int:
    """Look at data as training would see them: what is kept and cut, what is odd, and rows token by token.

    Parameters
    ----------
    data
        Rows: files, a directory of them, or the name of a dataset on the hub; several with commas.
    html
        Also write a page to this file.
    json
        Also write everything to this file.
    """
    from tropism.commands import inspect as inspecting  # imports torch: not for --help
    from tropism.observe.console import Voice

    voice = Voice()
    found = inspecting.inspect(data, options, voice)
    inspecting.show(found, voice)
    if html is not None:
        inspecting.write_html(found, html)
    if json is not None:
        inspecting.write_json(found, json)
    if options.strict:
        found.check()
    return 0


@app.command
def convert(data: str, /, *, options: Annotated[ConvertOptions, _Flat], json: Path | None = None) -> int:
    """Write data of any known format as pairs, labeled completions, completions or chats; say what that leaves out.

    Parameters
    ----------
    data
        Rows: files, a directory of them, or the name of a dataset on the hub; several with commas.
    json
        Also write the account to this file.
    """
    from tropism.commands import convert as converting
    from tropism.observe.console import Voice

    voice = Voice()
    account = converting.convert(data, options, voice)
    converting.show(account, Path(options.output), voice)
    if json is not None:
        converting.write_report(account, json)
    return 0


@app.command
def score(model: str, *, output: Path, options: Annotated[ScoringOptions, _Flat], keep_columns: bool = False) -> int:
    """Write the log-probs of every row under a model, and under a reference, as JSONL or Parquet.

    Parameters
    ----------
    model
        A Hugging Face directory, a hub id, a GGUF file, an adapter, or a run directory.
    output
        A file that does not exist yet, .jsonl or .parquet.
    keep_columns
        Carry the fields of the rows along.
    """
    from tropism.commands import scoring

    scoring.check_target(output)
    found = scoring.score(model, options)
    if not found.is_main:
        return 0
    columns = scoring.original_columns(options.data) if keep_columns else None
    scoring.write(scoring.records(found, options.beta, columns), output)
    print(f"{output}: {len(found.rows)} rows")
    return 0


@app.command
def train(config: Path) -> int:
    """Train as a configuration file says; RUN/config.yaml repeats a run. --KEY VALUE changes an option of it.

    Parameters
    ----------
    config
        A YAML file with `method:` and options by their names.
    """
    raise UsageError(f"{config}: `tropism train` is resolved before it is called")


@app.command
def resume(run: Path) -> int:
    """Go on with a run that was stopped, from its last checkpoint. --KEY VALUE changes an option that may change.

    Parameters
    ----------
    run
        A run directory, or one of its checkpoints.
    """
    raise UsageError(f"{run}: `tropism resume` is resolved before it is called")


@app.command
def demo(*, output: Path | None = None) -> int:
    """Train a small model on feedback that comes with the package, and show what changed.

    Parameters
    ----------
    output
        The run directory; by default demo-run, or the next free name like it.
    """
    from tropism.commands.demo.run import main as run_demo
    from tropism.observe.rundir import free_name

    run_demo(output or free_name(Path("demo-run")))
    return 0


@app.command
def verify(run: Path, /, *, json: Path | None = None) -> int:
    """Say whether a run directory is as it was written, and whether the run could be repeated here: exit code 0 or 1.

    Parameters
    ----------
    run
        A run directory.
    json
        Also write the findings to this file.
    """
    from tropism.commands import verify as verifying  # imports torch: not for --help
    from tropism.observe.console import Voice

    verdict = verifying.verify(run)
    verifying.show(verdict, Voice())
    if json is not None:
        verifying.write(verdict, json)
    return 0 if verdict.intact and verdict.repeatable else 1


@app.command
def export(run: Path, /, *, to: Path, merge: bool = False, dtype: _DType | None = None, checkpoint: str | None = None,
           max_shard_size: str | None = None, base: str | None = None) -> int:
    """Write the result of a run, or one of its checkpoints, as a model directory with a card. The run is not changed.

    Parameters
    ----------
    run
        A run directory.
    to
        Where to write: a directory that is empty or not there.
    merge
        Merge the adapter into its base, for a run that trained one.
    dtype
        Of the weights; by default that of the run's result.
    checkpoint
        In place of the result: `best`, `last`, a step (step-00000100), or the path of a checkpoint.
    max_shard_size
        Of a file of weights at most, by default 50GB; beyond it there are several, with an index.
    base
        Where the base of an adapter lies now, if not where the run found it.
    """
    from tropism.commands import export as exporting  # imports torch: not for --help

    try:
        exporting.export(run, to, merge=merge, dtype=dtype, checkpoint=checkpoint, max_shard_size=max_shard_size,
                         base=base)
    except KeyboardInterrupt:
        whole = (to / "export.json").is_file()
        raise TropismError(f"interrupted; {to} " + ("is whole" if whole else "is as it was, nothing was written"),
                           ) from None
    return 0


@store.command(name="list")
def store_list(*, store: Path | None = None) -> int:
    """Show what the store holds.

    Parameters
    ----------
    store
        Its directory; by default TROPISM_STORE, else ~/.cache/tropism/store.
    """
    from tropism.commands import store as storing  # imports torch: not for --help
    from tropism.observe.console import Voice

    storing.show(store, Voice())
    return 0


@store.command(name="clean")
def store_clean(fingerprint: str | None = None, *, store: Path | None = None) -> int:
    """Remove stored scores and rendered rows; they are computed again when a run needs them.

    Parameters
    ----------
    fingerprint
        Beginning of the fingerprint of the scores to remove; by default all.
    store
        Its directory; by default TROPISM_STORE, else ~/.cache/tropism/store.
    """
    from tropism.commands import store as storing
    from tropism.observe.console import Voice

    storing.clean(store, fingerprint, Voice())
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0 when done, 1 when failed, 2 for a usage or data error, 75 when stopped and resumable.

    An error that several processes share is said once.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    _began.set(time.monotonic())
    try:
        if follows_stop():
            raise StoppedEarly("stopped before, and started again by torchrun, for which a stop is a failure "
                               "(--max-restarts). Nothing is done: to go on, call torchrun anew")
        result = app(spelled_out(tokens), exit_on_error=False, print_error=False)
        return int(result or 0)
    except CycloptsError as error:
        _complain(_explain(error))
        return 2
    except TropismError as error:
        if isinstance(error, StoppedEarly):
            note_stop()
        _complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _complain("interrupted; what was written so far is readable")
        return 1


def _complain(text: str) -> None:
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    say_once(f"tropism: {text}", lambda said: errors.print(said, markup=False))


def _explain(error: CycloptsError) -> str:
    """One sentence with the option's name and the value."""
    if isinstance(error, cyclopts.ValidationError) and error.argument is not None and error.__cause__ is not None:
        problems: list[Any] = getattr(error.__cause__, "errors", list)()
        if problems:
            problem = problems[0]
            fields = {name: None for known in METHODS.values() for name in known.flat_fields()}
            return f"--{place_of(problem, fields).replace('_', '-')}: {explain(problem)}"
    if isinstance(error, cyclopts.UnknownOptionError) and error.token is not None:
        options = METHODS.get((error.command_chain or ("",))[0])
        name = str(error.token.keyword or error.token.value).split("=")[0].lstrip("-")
        if options is not None:
            return f"--{name}: unknown{nearest(name, options.flat_fields())}"
    return " ".join(str(error).split())


__all__ = ["app", "main"]
