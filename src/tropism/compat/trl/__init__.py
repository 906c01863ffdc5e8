"""The config and trainer classes of TRL 1.16, and what its scripts import beside them. TRL need not be installed."""

from tropism.compat.trl.config import DPOConfig, GKDConfig, KTOConfig, SFTConfig
from tropism.compat.trl.scripts import (
    DatasetConfig,
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)
from tropism.compat.trl.trainers import DPOTrainer, GKDTrainer, KTOTrainer, SFTTrainer

__all__ = ["DPOConfig", "DPOTrainer", "DatasetConfig", "DatasetMixtureConfig", "GKDConfig", "GKDTrainer", "KTOConfig",
           "KTOTrainer", "ModelConfig", "SFTConfig", "SFTTrainer", "ScriptArguments", "TrlParser", "get_dataset",
           "get_peft_config", "get_quantization_config"]
