"""`tropism export`: a run's result or checkpoint as a directory that transformers or peft loads, with a model card."""

from tropism.commands.export.run import Exported, export

__all__ = ["Exported", "export"]
