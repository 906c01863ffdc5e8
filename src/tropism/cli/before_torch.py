"""What is checked and said before torch is imported, which takes seconds: a wrong path is reported at once."""

import os
from pathlib import Path
from typing import Any

from tropism import __version__
from tropism.commands.chat.feedback import Feedback
from tropism.commands.files import check_export, check_run
from tropism.config import ChatOptions, InspectOptions, MethodOptions, ScoringOptions
from tropism.data.sources.resolve import check_source
from tropism.data.tokenization.chat_template import TemplateOptions, template_text
from tropism.errors import UsageError
from tropism.files import check_creatable
from tropism.model.names import find_adapter, find_model
from tropism.observe.console import Voice
from tropism.observe.rundir import RunDirectory
from tropism.observe.track import check_names


def start(voice: Voice, command: str, **named: Any) -> None:
    """Print the first line: version, command, and what it reads and writes. Only the main process speaks."""
    voice.preparing()
    if os.environ.get("RANK", "0") == "0":
        parts = ", ".join(f"{name} {value}" for name, value in named.items() if value is not None)
        voice.say(f"tropism {__version__} {command}: {parts}")


def check_training(options: MethodOptions) -> None:
    """Check the paths of a run.

    Raises:
        TropismError: a subclass that names the path.
    """
    output = Path(options.output).expanduser()
    checkpoint = RunDirectory(output).check_resume(options.resume)
    if checkpoint is not None and not (checkpoint.is_dir() or checkpoint.with_name(f"{checkpoint.name}.new").is_dir()):
        raise UsageError(f"{checkpoint}: cannot resume: directory not found")
    check_creatable(output)
    check_planning(options)
    if options.track:
        check_names(options.track.split(","))


def check_planning(options: MethodOptions) -> None:
    """Check the paths that a run reads.

    Raises:
        TropismError: a subclass that names the path.
    """
    find_model(options.model)
    for name in ("reference", "teacher"):
        value = getattr(options, name, None)
        if value is not None and (name, value) != ("reference", "live"):
            find_model(value)
    if options.lora.adapter is not None:
        find_adapter(options.lora.adapter)
    _check_data(options, options.data, options.eval_data)


def check_scoring(model: str, options: ScoringOptions) -> None:
    """Check the paths that `tropism evaluate` and `tropism score` read.

    Raises:
        TropismError: a subclass that names the path.
    """
    for name in (model, options.reference):
        if name is not None and not _is_of_run(Path(name).expanduser()):
            find_model(name)
    _check_data(options, options.data)


def check_inspection(data: str, options: InspectOptions) -> None:
    """Check the paths that `tropism inspect` reads.

    Raises:
        TropismError: a subclass that names the path.
    """
    find_model(options.model)
    _check_data(options, data, options.eval_data)


def check_chat(model: str, options: ChatOptions) -> Feedback | None:
    """Check the paths of `tropism chat`.

    Returns:
        The file for feedback, if there is one.

    Raises:
        TropismError: a subclass that names the path.
    """
    for name in (model, options.compare):
        if name is not None and not _is_of_run(Path(name).expanduser()):
            find_model(name)
    if options.chat_template is not None:
        template_text(options.chat_template)
    return None if options.feedback is None else Feedback.open(options.feedback, options.compare is not None)


def check_exporting(run: Path, to: Path, base: str | None, push: bool = False) -> None:
    """Check the paths of `tropism export`.

    Raises:
        TropismError: a subclass that names the path.
    """
    check_export(to.expanduser(), run.expanduser(), push)
    check_run(run.expanduser(), "export")
    if base is not None:
        find_model(base)
    check_creatable(to.expanduser(), "the model could not be written")


def _check_data(options: TemplateOptions, *sources: str | None) -> None:
    for source in sources:
        if source is not None:
            check_source(source)
    if options.chat_template is not None:
        template_text(options.chat_template)


def _is_of_run(path: Path) -> bool:
    """Whether a name is that of a run directory or a checkpoint, whose model is found by what the run says."""
    return (path / "manifest.json").is_file() or (path / "COMPLETE").is_file()
