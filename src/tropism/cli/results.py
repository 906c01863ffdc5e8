"""The commands that look at data and at results, and those that pass them on."""

import webbrowser
from typing import Annotated

from tropism.cli.before_torch import check_chat, check_exporting, check_inspection, check_scoring, start
from tropism.cli.parameters import DTypeName, File, Flat, GgufFormat, Name, Output, Size
from tropism.commands.files import check_reports, check_run, check_scores, voice_beside, write_json
from tropism.commands.sweep.plan import is_sweep, runs_of
from tropism.config import ChatOptions, InspectOptions, ScoringOptions
from tropism.errors import TropismError, UsageError, count_of
from tropism.observe.console import Voice, attended
from tropism.observe.rundir import REPORT

_SCORING = ScoringOptions()
_CHAT = ChatOptions()


def evaluate(model: Name, *models: Name, options: Annotated[ScoringOptions, Flat] = _SCORING,
             json: File | None = None) -> int:
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


def inspect(data: Name, /, *, options: Annotated[InspectOptions, Flat], html: File | None = None,
            json: File | None = None) -> int:
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


def chat(model: Name, /, *, options: Annotated[ChatOptions, Flat] = _CHAT) -> int:
    """Answer what the user types."""
    feedback = check_chat(model, options)
    notes = Voice(errors=not attended())  # a script gets the answers alone
    start(notes, "chat", model=model, compare=options.compare, feedback=options.feedback)
    from tropism.commands.chat.run import chat as talk

    talk(model, options, feedback, Voice(), notes)
    return 0


def report(run: File, /, *runs: File, html: File | None = None, figures: Output | None = None,
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


def score(model: Name, *, output: Output, options: Annotated[ScoringOptions, Flat] = _SCORING,
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


def verify(run: File, /, *, json: File | None = None, trust_remote_code: bool = False) -> int:
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


def export(run: File, /, *, to: Output, merge: bool = False, dtype: DTypeName | None = None,
           checkpoint: Name | None = None, max_shard_size: Size | None = None, base: Name | None = None,
           gguf: GgufFormat | None = None, llama_cpp: File | None = None, ollama: bool = False,
           trust_remote_code: bool = False, push: Name | None = None, private: bool = False) -> int:
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


RESULTS = (evaluate, inspect, chat, report, score, verify, export)
