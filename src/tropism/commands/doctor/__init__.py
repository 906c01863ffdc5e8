"""`tropism doctor`: what is installed, what the machine has, what a run would use, and what is broken."""

from tropism.commands.doctor.findings import Findings, examine, show

__all__ = ["Findings", "examine", "show"]
