"""Checks of what a run wrote: whether its files are as it left them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tropism.errors import CheckpointError, first_line
from tropism.observe.checksums import differences, file_hash
from tropism.observe.log_files import disorder
from tropism.observe.rundir import EVAL_ROWS, GROWING, MOVED, SCORES
from tropism.train.checkpoints import files as checkpoint

State = Literal["same", "differs", "gone", "unknown"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was compared with the manifest.

    Args:
        what: its name.
        state: the outcome.
        how: how it differs, or why it is unknown.
        of: `intact` for what the run wrote, `repeatable` for what the same run would need again.
    """

    what: str
    state: State
    how: str = ""
    of: Literal["intact", "repeatable"] = "repeatable"

    def __str__(self) -> str:
        word = {"same": "same", "differs": "changed", "gone": "not found", "unknown": "unknown"}[self.state]
        return f"{self.what}: {word}" + (f": {self.how}" if self.how else "")


def check_output(directory: Path, manifest: Mapping[str, Any]) -> Iterator[Check]:
    """Checks of the files that the run wrote."""
    check = partial(Check, of="intact")
    known = manifest["fingerprints"].get("config")
    config = directory / "config.yaml"
    if not config.is_file():
        yield check("config.yaml", "gone")
    elif known is None:
        yield check("config.yaml", "unknown", "the manifest has no fingerprint of it")
    else:
        yield check("config.yaml", "same") if file_hash(config) == known else check(
            "config.yaml", "differs", "edited after the run started")
    for name in GROWING:
        yield from _log(directory / name, expected=name == "metrics.jsonl" and manifest.get("status") == "done")
    for name in (EVAL_ROWS, SCORES, MOVED):
        files = manifest.get("files", {})
        if name in files:
            wrong = differences(directory, {name: files[name]})
            yield check(name, "differs", _listed(wrong)) if wrong else check(name, "same")
    if manifest.get("status") == "done":
        files = manifest.get("model_files")
        yield _files("model", directory / "model", files, "the manifest has no checksums of it")
    for one in checkpoint.listed(directory / "checkpoints"):  # unfinished ones are ignored
        yield from _checkpoint(one.path)


def _log(file: Path, expected: bool) -> Iterator[Check]:
    """Check of a file that grew line by line."""
    if not file.exists():
        if expected:
            yield Check(file.name, "gone", of="intact")
        return
    wrong = disorder(file)
    yield Check(file.name, "differs", _listed(wrong), of="intact") if wrong else Check(file.name, "same", of="intact")


def _checkpoint(path: Path) -> Iterator[Check]:
    name = f"checkpoints/{path.name}"
    try:
        checkpoint.verify(path)
    except CheckpointError as error:
        if path.exists():  # else the run has just removed or renamed it
            yield Check(name, "differs", first_line(error), of="intact")
        return
    yield Check(name, "same", of="intact")


def _files(what: str, directory: Path, files: Mapping[str, Any] | None, why_not: str) -> Check:
    if not directory.is_dir():
        return Check(what, "gone", of="intact")
    if files is None:
        return Check(what, "unknown", why_not, of="intact")
    wrong = differences(directory, files)
    return Check(what, "differs", _listed(wrong), of="intact") if wrong else Check(what, "same", of="intact")


def _listed(wrong: Sequence[str]) -> str:
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return ", ".join(wrong[:3]) + more
