"""Names and values of other trainers, translated to ours or answered with what to do instead.

One table, from which errors, `tropism migrate` and the documentation take their lines.
"""

from tropism.argument_names.aliases import ALIASES, ARGUMENTS, VALUES
from tropism.argument_names.lookup import (
    Answer,
    answer,
    arguments,
    canonical,
    instead,
    means_never,
    ours,
    plain,
    same_value,
    value_of,
)
from tropism.argument_names.published import PUBLISHED

__all__ = ["ALIASES", "ARGUMENTS", "PUBLISHED", "VALUES", "Answer", "answer", "arguments", "canonical", "instead",
           "means_never", "ours", "plain", "same_value", "value_of"]
