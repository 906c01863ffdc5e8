"""The options of a run with the values that it uses, in one place for every default that depends on something."""

from collections.abc import Mapping
from typing import Any

from tropism.data.sources.resolve import pinned
from tropism.methods.build import effective
from tropism.model.names import split_revision
from tropism.model.source import ModelSource
from tropism.train.frozen import teacher as teachers
from tropism.train.options import TeacherOptions
from tropism.train.setup.build import RunInputs


def resolve(options: Mapping[str, Any], inputs: RunInputs) -> dict[str, Any]:
    """Every option with its effective value, as `config.yaml` and checkpoints hold it.

    Defaults of the losses, of the teacher and of the device are filled in. How this process was started (`resume`,
    `fall_back`) is left at its default, since it is no part of the run. Models and data on the Hub get the commit
    that is read, so that a resumed run reads the same.

    Args:
        options: as they were given, complete.
        inputs: of the run.
    """
    given, audits = inputs.options, (inputs.data.audit, inputs.data.eval_audit)
    commits = {name: pinned(str(options[name]), audit.commits) for name, audit in zip(
        ("data", "eval_data"), audits, strict=True) if audit is not None and audit.commits and options[name]}
    for name, source in (("model", inputs.policy.named), ("reference", inputs.reference), ("teacher", inputs.teacher)):
        if isinstance(source, ModelSource) and split_revision(str(options.get(name)))[0] == source.name:
            commits[name] = source.base_name
    of_teacher: dict[str, Any] = teachers.effective(given) if isinstance(given, TeacherOptions) else {}
    return {**options, **commits, **effective(inputs.method, options), **of_teacher,
            "precision": inputs.numerics.precision, "resume": "never", "fall_back": False}
