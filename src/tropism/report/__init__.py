"""`tropism report`: one page about a run, or about several side by side."""

from tropism.report.page import report, report_on, write_figures, write_page

__all__ = ["report", "report_on", "write_figures", "write_page"]
