"""The command line: help, one call, exit code. It imports torch only when a command needs it."""

import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext

from tropism.borders import is_out_of_memory
from tropism.cli.environment import set_environment
from tropism.cli.help import requested
from tropism.cli.library_output import clean_library_output, library_output_as_json
from tropism.cli.output_options import output_options
from tropism.errors import StoppedEarly, TropismError, UsageError
from tropism.observe.console import Voice, take_lost
from tropism.observe.log_format import log_format, printing
from tropism.observe.torchrun_notes import follows_stop, note_stop, say_once


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0 when done, 1 when failed, 2 for a usage or data error, 75 when stopped and resumable.

    An error that several processes share is printed once.
    """
    began = time.monotonic()
    set_environment()
    clean_library_output()
    how, tokens, problem = output_options(list(sys.argv[1:] if argv is None else argv))
    with printing(how), library_output_as_json() if how.json else nullcontext():
        return _main(tokens, began, problem)


def _main(tokens: list[str], began: float, problem: UsageError | None) -> int:
    """Run a command whose format is chosen.

    Args:
        problem: of the choice.
    """
    try:
        if problem is not None:
            raise problem
        if follows_stop():
            raise StoppedEarly("the run has already stopped. torchrun restarted the processes because it treats the "
                               "stop as a failure (--max-restarts). Nothing was done. To resume, run torchrun again.")
        if tokens and tokens[0].partition("=")[0] in ("--show-completion", "--install-completion"):
            from tropism.cli.completion import complete  # imports the commands

            text = complete(tokens)
            return 0 if text is None else _show(text, as_it_is=True)
        text = requested(tokens)
        if text is not None:
            return _show(text)
        from tropism.cli.commands import call  # imports every option class: not for `tropism --help`

        take_lost()
        code = call(tokens, began)
        if (lost := take_lost()) is not None:
            _complain(f"standard output: cannot be written: {lost.strerror}")
        return code or int(lost is not None)
    except TropismError as error:
        if isinstance(error, StoppedEarly):
            note_stop()
        _complain(str(error))
        return error.exit_code
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise
        _complain(f"{os.fsdecode(error.filename)}: cannot be used: {error.strerror}")
        return 2 if isinstance(error, PermissionError) else 1
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _complain("out of memory. Use a lower --microbatch-tokens or --max-length, a smaller model, or less data.")
        return 1
    except KeyboardInterrupt:
        _complain("interrupted. Files written so far are readable.")
        return 1


def _show(text: str, as_it_is: bool = False) -> int:
    """Print a text.

    Args:
        as_it_is: also in the JSON format.
    """
    if log_format().json and not as_it_is:
        Voice().say(*text.split("\n"))
        return 0
    try:
        print(text, flush=True, file=getattr(sys.stdout, "inner", sys.stdout))
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing may be flushed at exit either
        if not isinstance(error, BrokenPipeError):  # of `| head`, which has read enough
            _complain(f"standard output: cannot be written: {error.strerror}")
            return 1
    return 0


def _complain(text: str) -> None:
    say_once(f"tropism: {text}", Voice(errors=True).error)


__all__ = ["main"]
