"""The config and trainer classes of TRL 1.16. TRL need not be installed."""

from tropism.compat.trl.config import DPOConfig, GKDConfig, KTOConfig, SFTConfig
from tropism.compat.trl.trainers import DPOTrainer, GKDTrainer, KTOTrainer, SFTTrainer

__all__ = ["DPOConfig", "DPOTrainer", "GKDConfig", "GKDTrainer", "KTOConfig", "KTOTrainer", "SFTConfig", "SFTTrainer"]
