"""States of random number generators as plain values. Only user code draws from them; no result of Tropism does."""

import base64
import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """States of torch, numpy and Python, and of the GPU if there is one."""
    kind, keys, *rest = np.random.get_state()
    version, internal, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": _text(torch.get_rng_state().numpy()), "numpy": [str(kind), _text(np.asarray(keys)), *rest],
        "python": [version, list(internal), gauss]}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = _text(torch.cuda.get_rng_state().cpu().numpy())
    return found


def set_random_state(state: dict[str, Any]) -> None:
    """Restore `random_state()`."""
    torch.set_rng_state(torch.from_numpy(_array(state["torch"], np.uint8)))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, _array(keys, np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(_array(state["cuda"], np.uint8)))


def _text(values: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii")


def _array(text: str, dtype: Any) -> Any:
    return np.frombuffer(base64.b64decode(text), dtype=dtype).copy()
