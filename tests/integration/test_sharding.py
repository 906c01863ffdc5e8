"""A model that is spread over processes: the same weights, metrics and checkpoints as in one."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from integration.conftest import assert_same_metrics, distance, records, weights
from integration.test_invariance import BOUNDS, Left, one_rank, run_ranks
from tropism.api import run
from tropism.config import METHODS

SHARDED: dict[str, tuple[int, dict[str, Any]]] = {
    "two": (2, {}), "two, summed once": (2, {"reduce_once": True}), "two copies": (2, {"shard": 1, "replicate": 2}),
    "tensor": (2, {"tensor": 2})}
SPREAD: dict[str, tuple[int, dict[str, Any]]] = {
    "four": (4, {}), "replicas": (4, {"replicate": 2}), "tensor": (4, {"tensor": 2}),
    "replicas, summed once": (4, {"replicate": 2, "reduce_once": True}), "replicas of tensor": (4, {
        "replicate": 2, "shard": 1, "tensor": 2})}
METHOD_OPTIONS: dict[str, dict[str, Any]] = {
    "kto": {"learning_rate": 1e-3}, "dpo": {"learning_rate": 1e-3}, "sft": {"learning_rate": 1e-3},
    "kd": {"learning_rate": 1e-3}}
