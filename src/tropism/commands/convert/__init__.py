"""`tropism convert`: any format to a plain one, with a report of what is lost. It needs no model and no torch."""

from tropism.commands.convert.report import ConversionReport
from tropism.commands.convert.run import convert, show, write_report

__all__ = ["ConversionReport", "convert", "show", "write_report"]
