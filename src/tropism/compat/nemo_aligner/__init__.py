"""NeMo-Aligner's KTO trainer and its collate function: signatures, methods, counting and numbers."""

from tropism.compat.nemo_aligner.collate import kto_custom_collate
from tropism.compat.nemo_aligner.trainer import KTOTrainer

__all__ = ["KTOTrainer", "kto_custom_collate"]
