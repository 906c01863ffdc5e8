"""The known shapes of a record: how a file is recognised, and how its records become rows."""

from tropism.data.formats.recognise import Reading, recognise, view_of
from tropism.data.formats.table import FORMATS
from tropism.data.formats.understand import pair_by_prompt, understand
from tropism.data.rows import View

__all__ = ["FORMATS", "Reading", "View", "pair_by_prompt", "recognise", "understand", "view_of"]
