"""Record formats: how the format of a file is recognized, and how its records become rows."""

from tropism.data.formats.known_formats import FORMATS
from tropism.data.formats.recognize import Reading, recognize, view_of
from tropism.data.formats.rows_from_records import pair_by_prompt, rows_of_record
from tropism.data.rows import View

__all__ = ["FORMATS", "Reading", "View", "pair_by_prompt", "recognize", "rows_of_record", "view_of"]
