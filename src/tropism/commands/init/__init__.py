"""`tropism init`: a commented configuration for a model and data."""

from tropism.commands.init.choose import Initial, init
from tropism.commands.init.page import page

__all__ = ["Initial", "init", "page"]
