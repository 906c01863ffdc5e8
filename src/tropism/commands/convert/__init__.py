"""Data of any known format to a plain one, with an account of what that leaves out. Needs no model and no torch."""

from tropism.commands.convert.account import Account
from tropism.commands.convert.run import convert, show, write_json

__all__ = ["Account", "convert", "show", "write_json"]
