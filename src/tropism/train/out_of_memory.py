"""Running out of memory: which pack did, and the error if nothing smaller is left to try."""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from tropism.borders import is_out_of_memory
from tropism.data.rows import EncodedRow
from tropism.data.tree import PromptTree
from tropism.errors import TropismError, first_line

ADVICE = ("Use a lower --max-length, train an adapter (--lora.rank) on a quantized model (--lora.quantize nf4), or "
          "use a smaller model.")


class PackOutOfMemory(MemoryError):
    """Memory ran out in a pass over a pack.

    Args:
        trees: of the pack.
        reason: what the allocator says.
    """

    def __init__(self, trees: Sequence[PromptTree], reason: str) -> None:
        super().__init__(reason)
        self.trees = tuple(trees)


@contextmanager
def naming(trees: Sequence[PromptTree]) -> Iterator[None]:
    """A pass over a pack. Running out of memory in it raises `PackOutOfMemory`, other errors pass unchanged."""
    try:
        yield
    except PackOutOfMemory:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise PackOutOfMemory(trees, first_line(error)) from error


@contextmanager
def undivided(step: int) -> Iterator[None]:
    """The update of a step. It cannot be repeated, since a part of the weights may have changed.

    Raises:
        TropismError: if memory runs out.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise TropismError(f"out of memory in the update of step {step}, which may have changed only some of the "
                           f"weights ({first_line(error)}). Resume from the last checkpoint with less memory in use: "
                           f"{ADVICE[0].lower()}{ADVICE[1:]}") from error


def release(device: torch.device) -> None:
    """Return what a failed pass held to the device. Call this where its error is no longer referenced."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def too_large(place: str, tokens: int, reason: str, tried: str) -> TropismError:
    """The error for a row that does not fit into memory by itself.

    Args:
        place: of the row.
        tokens: of the smallest pack with it.
        reason: what the allocator says.
        tried: the last attempt, in words.
    """
    detail = f" ({reason})" if reason else ""
    return TropismError(f"{place}: {tokens:,} tokens do not fit into memory, {tried}{detail}. {ADVICE}")


def place_of(rows: Iterable[EncodedRow], tree: PromptTree) -> str:
    """The place of the row that a completion belongs to; of a row with its prompt if it is a mismatched one."""
    same = [row for row in rows if np.array_equal(row.prompt_ids, tree.prompt_ids)]
    keys = {completion.key for completion in tree.completions}
    own = [row for row in same if any(side.key in keys for side in row.completions)]
    return next((row.place for row in own + same), f"a completion of the {by_ids(tree)}")


def by_ids(tree: PromptTree) -> str:
    """Names a tree whose row is not known."""
    return f"prompt with ids {tree.prompt_ids[:8].tolist()}{'...' if len(tree.prompt_ids) > 8 else ''}"
