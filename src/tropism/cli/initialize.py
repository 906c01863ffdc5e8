"""`tropism init`: from its command line to the file."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from tropism.cli.arguments import device_of, names_of, own_options, value_of
from tropism.cli.before_torch import check_planning, start
from tropism.commands.files import check_new, voice_beside, write_text
from tropism.config import METHODS, MethodOptions, explain
from tropism.data.formats.options import FormatOptions
from tropism.errors import UsageError, did_you_mean
from tropism.options import check_file_name

_CHOSEN = "chosen by init"
"""Stands for a run directory that was not given."""


def initial(tokens: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command that `init` prepares, and the values of its own options.

    Args:
        tokens: behind `init`: a method, `auto` or none of them, and options. `auto` is the method by the kind of data.

    Raises:
        UsageError: if an option has no value, or the method is unknown.
        DataError: for data that cannot be read, if it decides.
    """
    own, rest = own_options(tokens, ("--device", "--to"))
    method = "auto" if not rest or rest[0].startswith("-") else rest.pop(0)
    if method != "auto" and method not in METHODS:
        raise UsageError(f"unknown method {method}. {did_you_mean(method, (*METHODS, 'auto'))}")
    if method == "auto":
        method = _method_for(rest)
    return [method, *rest, *(() if "output" in names_of(rest) else (f"--output={_CHOSEN}",))], own


def _method_for(given: Sequence[str]) -> str:
    """The method for data that the command line names."""
    data = value_of("data", given) or value_of("train-data", given)
    if data is None:
        raise UsageError("--data is required. Example: tropism init --model MODEL --data DATA")
    from tropism.data.read_rows import view_of_source  # numpy and pyarrow: not for a wrong option

    named = {name: value for name in FormatOptions.model_fields
             if (value := value_of(name.replace("_", "-"), given)) is not None}
    if "pair-by-prompt" in names_of(given) and "pair_by_prompt" not in named:
        named["pair_by_prompt"] = "true"
    try:
        view = view_of_source(data, FormatOptions.model_validate(named))
    except ValidationError as error:
        problem = error.errors()[0]
        raise UsageError(f"--{str(problem['loc'][0]).replace('_', '-')}: {explain(problem)}") from None
    return {"paired": "dpo", "unpaired": "kto"}.get(view, "kd" if "teacher" in names_of(given) else "sft")


def initialize(options: MethodOptions, own: Mapping[str, str], given: Collection[str], devices: Sequence[str]) -> int:
    """Write the file.

    Args:
        options: of the run, those that were given and defaults.
        own: options of `init`.
        given: names of the options of the run on the command line, with dashes.
        devices: names that `--device` takes.

    Raises:
        TropismError: if the file exists, or the run could not start.
    """
    device = device_of(own, devices)
    try:
        to = Path("/dev/stdout" if own.get("--to") == "-" else check_file_name(own.get("--to", "run.yaml")))
    except ValueError as error:
        raise UsageError(f"--to: {error}") from None
    check_new(to)
    check_planning(options)
    voice = voice_beside(to)
    start(voice, "init", method=options.method, model=options.model, data=options.data, device=device)
    from tropism.commands import init as beginning

    named = {name for name in options.flat_fields() if name.replace("_", "-") in given}
    found = beginning.init(options, named - ({"output"} if options.output == _CHOSEN else set()), device, voice)
    write_text(to, beginning.page(found, str(to)))
    voice.say(*found.about)
    for finding in found.findings:
        voice.warn(finding.text, finding.word)
    if not found.fits:
        voice.warn("the run is not predicted to fit into memory. Use a smaller model, or another --device.")
    voice.say(*([] if own.get("--to") == "-" else [f"next: tropism train {shlex.quote(str(to))}"]))
    return 0
