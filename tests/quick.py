"""What takes time in every run and proves nothing in most: imported by processes that run tests or what tests start."""

import importlib.metadata
import os
from functools import cache
from typing import Any

from tropism.train.evaluation import samples

SAMPLED = 8
"""Tokens of a sampled completion in place of `samples.NEW_TOKENS`: random models do not end theirs."""


def _ask(self: samples.Sampler, model: Any) -> list[str]:
    return samples.answer(model, self.tokenizer, self.rows, self.stop_ids, SAMPLED)


samples.Sampler.ask = _ask  # type: ignore[method-assign]
os.fsync = lambda file: None  # no test outlives its machine
importlib.metadata.version = cache(importlib.metadata.version)  # of eight libraries, twice in a run
