"""Fingerprints of weights. They identify the model that stored scores and checkpoints belong to."""

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

from tropism.distributed.shard import each_whole
from tropism.model.adapters.parameters import base_name
from tropism.model.adapters.switch import active_scales, active_state
from tropism.model.language_model import LanguageModel

VERSION = 1
"""Part of every fingerprint. Increment it when the computation or storage of log-probs changes."""


def fingerprint(model: LanguageModel) -> str:
    """Hash of everything that decides log-probs of given ids: weights, scales of adapters, config and numerics."""
    numerics = [VERSION, model.precision, model.layout, model.device.type]
    decided = json.dumps([deciding_settings(model.module.config), numerics], sort_keys=True, default=str)
    digest = hashlib.blake2b(decided.encode(), digest_size=16)
    for line in (*weight_hashes(model.module), *active_scales(model.module)):
        digest.update(line.encode())
    return digest.hexdigest()


def deciding_settings(config: Any) -> dict[str, Any]:
    """The settings of a model's config that log-probs depend on."""
    return {name: value for name, value in config.to_dict().items()
            if name not in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache",
                            "architectures") and not name.startswith("_")}


def weight_hashes(module: Any) -> list[str]:
    """`name hash` of each weight and stored buffer that the module computes with now, independent of sharding.

    Hashing releases the interpreter lock, so threads make it faster.
    """
    known: dict[str, str] = getattr(module, "hashes_before_rounding", {})

    def one(name: str, weight: Tensor) -> str:
        return f"{name} {tuple(weight.shape)} {known.get(base_name(name)) or tensor_hash(weight)}"

    return each_whole(active_state(module), one)


def tensor_hash(tensor: Tensor) -> str:
    """Hash of the bits of a tensor."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data, digest_size=16).hexdigest()
