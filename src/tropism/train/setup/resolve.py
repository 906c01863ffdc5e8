"""The options of a run with the values that it uses, in one place for every default that depends on something."""

from collections.abc import Mapping
from typing import Any

from tropism.methods.build import effective
from tropism.train.frozen import teacher as teachers
from tropism.train.options import TeacherOptions
from tropism.train.setup.build import RunInputs


def resolve(options: Mapping[str, Any], inputs: RunInputs) -> dict[str, Any]:
    """Every option with its effective value, as `config.yaml` and checkpoints hold it.

    Defaults of the losses, of the teacher and of the device are filled in. How this process was started (`resume`,
    `fall_back`) is left at its default, since it is no part of the run.

    Args:
        options: as they were given, complete.
        inputs: of the run.
    """
    given = inputs.options
    of_teacher: dict[str, Any] = teachers.effective(given) if isinstance(given, TeacherOptions) else {}
    return {**options, **effective(inputs.method, options), **of_teacher, "precision": inputs.numerics.precision,
            "resume": "never", "fall_back": False}
