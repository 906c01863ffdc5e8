"""Which models carry a state from token to token beside attention: recurrences, scans and convolutions.

In the tree layout completions stand behind each other in one line, and only attention keeps them apart. A state would
flow from one into the next, however little that shows in a comparison of a few tokens. So these models are found by
the kinds of their layers, not by the size of a difference.
"""

import re
from typing import Any

from torch import nn

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_CHUNKED = "chunked_attention"
_OTHER_PARTS = {"dense", "moe", "sparse"}
"""Kinds of layers in a config that tell about the MLP only."""
_RECURRENT = re.compile(r"Mamba|SSM|Recurrent|Rwkv|[xms]LSTM|DeltaNet|DeltaAttention|LinearAttention|"
                        r"LightningAttention|ShortConv|RgLru|Retention|Hyena|TimeMix|Indexer")


def carries_state(module: Any) -> str | None:
    """What in a causal model depends on earlier tokens beside attention that trees support; None if nothing does."""
    kinds = getattr(module.config.get_text_config(), "layer_types", None) or ()
    if other := sorted({str(kind) for kind in kinds} - _ATTENTION - _OTHER_PARTS):
        return f"layers of type {other[0]}"
    for part in module.modules():
        if isinstance(part, nn.Conv1d | nn.RNNBase) or _RECURRENT.search(type(part).__name__):
            return type(part).__name__
    return type(module).__name__ if getattr(module, "_is_stateful", False) else None


def depends_on_line(module: Any) -> str | None:
    """What in a causal model depends on places in a line that trees do not keep; None if nothing does.

    A comparison of a few tokens shows neither: both begin at thousands of tokens. Chunks are cut in the mask, of which
    trees have none, and Llama 4 scales queries by their place in the line, not by their position.
    """
    config = module.config.get_text_config()
    if _CHUNKED in (getattr(config, "layer_types", None) or ()):
        return f"layers of type {_CHUNKED}"
    return "attn_temperature_tuning" if getattr(config, "attn_temperature_tuning", False) else None


def has_window(module: Any) -> bool:
    """Whether the config limits attention of some layers to a sliding window."""
    config = module.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",)
    return "sliding_attention" in kinds and getattr(config, "sliding_window", None) is not None \
        and getattr(config, "use_sliding_window", True) is not False


def layers_of(module: Any) -> list[nn.Module]:
    """The decoder layers of a causal model."""
    names = set(getattr(module, "_no_split_modules", None) or ())
    found = [part for part in module.modules() if type(part).__name__ in names]
    if found:
        return found
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))


def without_attention(module: Any, seen: set[int]) -> str | None:
    """The first decoder layer that did not use tree attention in a pass; None if all did.

    Args:
        seen: ids of the modules that used it.
    """
    return next((type(layer).__name__ for layer in layers_of(module)
                 if not any(id(part) in seen for part in layer.modules())), None)
