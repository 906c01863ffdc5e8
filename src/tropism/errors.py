"""The errors that a user can meet. Each says where, what, and what to do; none shows a traceback."""


class TropismError(Exception):
    """Base of all errors meant for a user's eyes. `exit_code` is what the command line returns."""

    exit_code = 1


class UsageError(TropismError):
    """An option, or a combination of options, that cannot work."""

    exit_code = 2


class DataError(TropismError):
    """A file, row or label that cannot be trained on. The text starts with FILE:LINE where there is one."""

    exit_code = 2


class OutputExistsError(TropismError):
    """The output directory already holds something."""

    exit_code = 2


class ModelError(TropismError):
    """A model or tokenizer that cannot be loaded or served exactly."""

    exit_code = 2


class ReferenceMismatchError(TropismError):
    """The reference disagrees with the policy before training, or its stored scores cannot be used."""


class NonFiniteError(TropismError):
    """A loss, gradient or log-prob was NaN or infinite. The update was not applied; the rows are named."""


class OutputError(TropismError):
    """The run directory or the store could not be written."""
