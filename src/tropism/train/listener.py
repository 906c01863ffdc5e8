"""What a Python caller can attach to the training loop: it looks, and may ask for what follows a step."""

from dataclasses import dataclass

from tropism.train.records import Record
from tropism.train.run_state import RunState


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for after a step, beside what the plan does.

    Args:
        log, evaluate, save: do it after this step.
        stop: end the run with this step.
    """

    log: bool = False
    evaluate: bool = False
    save: bool = False
    stop: bool = False


class Listener:
    """Does nothing. Every process has one, and all call it alike; what one process asks for, all do.

    Attributes:
        follows_saves: wait for each checkpoint to be on the disk before `saved`. Otherwise `saved` is not called.
    """

    follows_saves = False

    def begins(self, state: RunState) -> None:
        """The first step of this process comes next."""

    def step_begins(self, state: RunState) -> None:
        """A step comes next."""

    def step_ended(self, state: RunState, epoch: float) -> Asked:
        """A step was done.

        Args:
            epoch: epochs completed after it.
        """
        return Asked()

    def recorded(self, record: Record) -> str | None:
        """A record was written. Returns why the run ends with this step; None to continue."""
        return None

    def saved(self, state: RunState) -> None:
        """A checkpoint is complete."""
