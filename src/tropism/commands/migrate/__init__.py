"""`tropism migrate`: a command or configuration of another trainer as one of ours."""

from collections.abc import Callable, Sequence

from tropism.commands.migrate import aligner, axolotl, openrlhf, transformers_based
from tropism.commands.migrate.command_line import Given, read_command
from tropism.commands.migrate.report import show, write_yaml
from tropism.commands.migrate.translation import Translation
from tropism.errors import UsageError, did_you_mean

TRAINERS: dict[str, tuple[str, Callable[[Given], Translation]]] = {
    "openrlhf": (openrlhf.PROGRAMS, openrlhf.translate),
    "trl": (transformers_based.TRL, transformers_based.trl),
    "llamafactory": (transformers_based.LLAMA_FACTORY, transformers_based.llamafactory),
    "axolotl": (axolotl.PROGRAMS, axolotl.translate),
    "coati": (aligner.COATI, aligner.coati),
    "nemo-aligner": (aligner.NEMO, aligner.nemo),
}
"""Pattern of the programs and the translation, by the name that the command line takes."""


def migrate(trainer: str, arguments: Sequence[str]) -> Translation:
    """Our options for a command or configuration of another trainer. Nothing in it is run.

    Args:
        trainer: one of `TRAINERS`.
        arguments: a command line as one text or as its words, or a configuration file.

    Raises:
        UsageError: if it cannot be read, or trains in a way that is not offered.
    """
    name = trainer.lower().replace("_", "-")
    name = {"llama-factory": "llamafactory", "nemo": "nemo-aligner", "colossalai": "coati"}.get(name, name)
    if name not in TRAINERS:
        raise UsageError(f"unknown trainer {trainer}. {did_you_mean(name, TRAINERS)}")
    programs, translate = TRAINERS[name]
    run = translate(read_command(arguments, programs))
    run.finish()
    return run


__all__ = ["TRAINERS", "Translation", "migrate", "show", "write_yaml"]
