"""What looks at the records of a run while it goes on, and speaks, or ends it."""

from collections.abc import Callable
from typing import Any

from tropism.observe.console import Voice
from tropism.train.monitor.early_stopping import EarlyStopping
from tropism.train.monitor.guards import Guards
from tropism.train.records import Record

Line = Callable[[dict[str, Any]], None]
"""Writes a line of a file."""


class Watch:
    """Guards and early stopping of a run. Every rank has one and hears the same; the main rank speaks and writes.

    Args:
        guards: look at train records.
        stopper: looks at evaluations; None if the run has its full length.
        voice: speaks to the user.
        notice, skipped: write a line of `notices.jsonl` and of `skipped.jsonl`.
    """

    def __init__(self, guards: Guards, stopper: EarlyStopping | None, voice: Voice, notice: Line,
                 skipped: Line) -> None:
        self.guards = guards
        self.stopper = stopper
        self.voice = voice
        self.notice = notice
        self.skipped = skipped

    def see(self, record: Record) -> str | None:
        """Look at a record.

        Returns:
            Why the run ends with this step; None if it goes on.
        """
        for bad in record.skipped:
            self.voice.warn(f"{bad}. The step was left out")
            self.skipped(bad.to_json())
        if record.split == "train":
            for found in self.guards.see(record.step, record.metrics):
                self.voice.warn(found.text)
                self.notice(found.to_json())
        elif self.stopper is not None and self.stopper.see(record.step, record.metrics):
            self.voice.say(f"step {record.step}: the run ends here: {self.stopper.reason}")
            return self.stopper.reason
        return None

    @property
    def over(self) -> str | None:
        """Why the run has ended, if it has: it can be killed between its last save and its end."""
        return self.stopper.reason if self.stopper is not None and self.stopper.over else None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"guards": self.guards.state(), "stopper": self.stopper.state() if self.stopper else None}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state()`; what it does not have begins anew."""
        if state.get("guards"):
            self.guards.restore(state["guards"])
        if self.stopper is not None and state.get("stopper"):
            self.stopper.restore(state["stopper"])
