"""OpenRLHF's trainers for KTO, DPO and distillation (version 0.9.5): `openrlhf.trainer` becomes this import."""

from tropism.compat.openrlhf.dpo import DPOTrainer
from tropism.compat.openrlhf.kd import KDTrainer
from tropism.compat.openrlhf.kto import KTOTrainer

__all__ = ["DPOTrainer", "KDTrainer", "KTOTrainer"]
