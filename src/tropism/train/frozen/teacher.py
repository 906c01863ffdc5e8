"""The teacher: a frozen model, live or as a store of its most likely tokens."""

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tropism.data.batching.collate import Batch, collate
from tropism.data.batching.pack import scoring_packs
from tropism.data.batching.transfer import sent
from tropism.data.tree import PromptTree
from tropism.distributed.world import World
from tropism.errors import ReferenceMismatchError, StoppedEarly
from tropism.files import check_writable
from tropism.losses.divergence import DEFAULT_MIX, DIVERGENCES
from tropism.methods.build import DEFAULT_KD_WEIGHT
from tropism.model.fingerprint import fingerprint
from tropism.model.head.divergence import Comparison, FullTargets, Targets, TopK, top_k
from tropism.model.head.logprob import Head, head_of
from tropism.model.language_model import LanguageModel
from tropism.store import use
from tropism.train.frozen.topk_store import TopkEntry, TopKStore, bytes_per_token
from tropism.train.frozen.write_store import advice
from tropism.train.options import TeacherOptions
from tropism.train.out_of_memory import by_ids
from tropism.train.score_packs import PlaceOf, ReportProgress, score_packs, silent, unscored

_WRITE_EVERY_S = 10.0
_WRITE_EVERY_BYTES = 2**26


class Teacher(Protocol):
    """Provides the targets for the supervised tokens of some trees."""

    comparison: Comparison

    @property
    def fingerprint(self) -> str:
        """Hash of everything that its targets depend on."""
        ...

    def targets(self, trees: Sequence[PromptTree], batch: Batch) -> Targets:
        """Targets of the batch's supervised tokens, in its order, on its device."""
        ...


def compare_as(options: TeacherOptions, vocabulary: int) -> Comparison:
    """The comparison that the options ask for.

    Args:
        vocabulary: ids that student and teacher share.
    """
    name = options.divergence or "forward_kl"
    temperature = options.temperature or 1.0
    mix = options.divergence_mix if options.divergence_mix is not None else DEFAULT_MIX.get(name, 0.5)
    scaled = options.temperature_scaling is not False
    return Comparison(partial(DIVERGENCES[name], mix=mix), temperature, temperature**2 if scaled else 1.0, vocabulary)


def describe(options: TeacherOptions) -> str:
    """A description of the divergence, for the log."""
    name = options.divergence or "forward_kl"
    reading = {"forward_kl": "KL(teacher || student)", "reverse_kl": "KL(student || teacher)",
               "js": "Jensen-Shannon", "skew": "KL(teacher || mix of both)", "tvd": "total variation"}[name]
    mix = "" if name not in DEFAULT_MIX else f", mixing weight {options.divergence_mix or DEFAULT_MIX[name]:g}"
    temperature = options.temperature or 1.0
    scaling = "times T^2" if options.temperature_scaling is not False else "not multiplied by T^2"
    heat = "" if temperature == 1 else f", temperature {temperature:g}, {scaling}"
    how = (f"stored top {options.top_k} tokens and the tail as one more outcome" if options.top_k
           else "live, over the full vocabulary")
    return f"{name}, {reading}{mix}{heat}; {how}"


def effective(options: TeacherOptions) -> dict[str, Any]:
    """Defaults of the options that are not set; empty without a teacher."""
    if options.teacher is None:
        return {}
    name = options.divergence or "forward_kl"
    filled = {"kd_weight": DEFAULT_KD_WEIGHT, "divergence": name, "divergence_mix": DEFAULT_MIX.get(name),
              "temperature": 1.0, "temperature_scaling": True}
    return {option: value for option, value in filled.items() if getattr(options, option) is None}


def shared_vocabulary(tokenizer: Any, *heads: int) -> int:
    """Number of ids that both models have: those of the tokenizer. Further columns of an output head are padding.

    Args:
        heads: rows of each model's head.
    """
    return min((max(tokenizer.get_vocab().values()) + 1, *heads))


class LiveTeacher:
    """A teacher in memory, exact over the full vocabulary.

    Args:
        model: the frozen teacher.
        comparison: how the student is compared with it.
    """

    def __init__(self, model: LanguageModel, comparison: Comparison) -> None:
        self.model = model
        self.comparison = comparison
        self._head: Head | None = None

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that the teacher's log-probs depend on."""
        return fingerprint(self.model)

    @torch.no_grad()
    def targets(self, trees: Sequence[PromptTree], batch: Batch) -> FullTargets:
        """As `Teacher` says."""
        if (self.model.layout == "tree") != (batch.segments is not None):
            batch = collate(trees, self.model.layout).to(self.model.device)
        hidden = self.model.hidden(batch, self.model.tree_pass(batch))
        if self._head is None:  # of a sharded teacher it is here, and stays, from the first pass on
            head = head_of(self.model.module, self.model.compute)
            self._head = replace(head, weight=head.weight.detach().to(self.model.compute))
        return FullTargets(hidden, self._head)


class StoredTeacher:
    """A teacher's most likely tokens from the store. The teacher itself is no longer in memory.

    Args:
        store: opened, with every completion of the run.
        comparison: how the student is compared with it.
        stored: keys of the completions that were there before.
        completions: number of completions of the run.
    """

    def __init__(self, store: TopKStore, comparison: Comparison, stored: Collection[bytes] = (),
                 completions: int = 0) -> None:
        self.store = store
        self.comparison = comparison
        self.stored = stored
        self.completions = completions

    @property
    def fingerprint(self) -> str:
        """As `Teacher` says."""
        return self.store.path.name

    def targets(self, trees: Sequence[PromptTree], batch: Batch) -> TopK:
        """As `Teacher` says."""
        found = [self._entry(key, completion.length) for tree in trees
                 for key, completion in zip(tree.score_keys, tree.completions, strict=True)]
        device = batch.lengths.device

        def joined(part: int, dtype: torch.dtype | None) -> Tensor:
            arrays = [entry[part] for entry in found]
            whole = np.concatenate(arrays) if arrays else np.zeros((0, 1) if part < 2 else (0,), np.float32)
            whole = whole.astype(np.int64) if part == 0 else whole
            return sent(torch.from_numpy(whole).to(dtype), device)

        ids, logps, tail = joined(0, torch.int64), joined(1, None), joined(2, None)
        return TopK(ids, logps, tail)

    def _entry(self, key: bytes, tokens: int) -> TopkEntry:
        ids, logps, tail = self.store.read(key)
        if len(tail) != tokens:
            raise ReferenceMismatchError(f"{self.store.file_of(key)}: {len(tail)} tokens of a completion that has "
                                         f"{tokens}. {advice(self.store.path.parent)}")
        return ids, logps, tail


def stored_name(of_model: str, options: TeacherOptions, vocabulary: int) -> str:
    """The fingerprint under which a teacher's most likely tokens are stored.

    Args:
        of_model: fingerprint of the teacher.
        vocabulary: ids that student and teacher share.
    """
    temperature = options.temperature or 1.0
    return hashlib.blake2b(f"{of_model} top {options.top_k} of {vocabulary} at {temperature!r}".encode(),
                           digest_size=16).hexdigest()


def build(model: LanguageModel, trees: Iterable[PromptTree], options: TeacherOptions, comparison: Comparison,
          microbatch_tokens: int, root: Path, world: World, say: Callable[[str], None],
          report: ReportProgress = silent, place: PlaceOf = by_ids) -> StoredTeacher:
    """Keep the teacher's likeliest tokens of every completion that the store does not have yet, with all ranks.

    Args:
        model: the teacher.
        trees: every (prompt, completion) that the run will ask for.
        microbatch_tokens: tokens of a pack.
        root: the store's directory.
        say: takes the estimate of what it will take on the disk.
        place: names the row of a completion in errors.

    Raises:
        OutputError: if it does not fit, or cannot be written.
    """
    k, vocabulary = options.top_k or 0, comparison.vocabulary
    of_model = fingerprint(model)
    store = TopKStore(root, stored_name(of_model, options, vocabulary), {
        "model": model.module.config.name_or_path, "precision": model.precision, "layout": model.layout,
        "holds": f"top {k} at temperature {comparison.temperature:g}", "teacher": of_model}, k, vocabulary)
    world.on_main(partial(use, store.path))
    world.together(store.open)
    packs = scoring_packs(trees, microbatch_tokens, model.layout)
    needed = {key for pack in packs for tree in pack for key in tree.score_keys}
    stored = frozenset(key for key in needed if key in store)
    missing = world.broadcast(unscored(packs, store))  # ranks may see different disks
    tokens = sum(completion.length for pack in missing for tree in pack for completion in tree.completions)
    per_token = bytes_per_token(k, vocabulary, torch.promote_types(model.compute, torch.float32).itemsize)
    if missing:
        say(f"teacher: top {k} of {tokens} tokens, {per_token} bytes each: {tokens * per_token / 2**20:.1f} MiB in "
            f"{store.path}")
        world.on_main(partial(check_writable, store.path, what="the teacher's store cannot be written",
                              advice="Choose another place with --store"))
        world.together(lambda: store.check_space(tokens * per_token))
    _fill(model, missing, store, comparison, k, world, report, place)
    world.together(store.open)
    world.on_main(partial(store.mark, needed))
    world.on_main(store.discard_damaged)
    return StoredTeacher(store, comparison, stored, len(needed))


def _fill(model: LanguageModel, packs: Sequence[list[PromptTree]], store: TopKStore, comparison: Comparison, k: int,
          world: World, report: ReportProgress, place: PlaceOf) -> None:
    """Each rank computes its packs and writes its own files; nobody comes back before everybody has written."""
    fresh: dict[bytes, TopkEntry] = {}
    written, size = time.monotonic(), 0

    def keep(found: dict[bytes, TopkEntry]) -> None:
        nonlocal size
        if not world.leads:
            return  # those that compute a layer together find the same, and one of them writes it
        fresh.update(found)
        size += sum(ids.nbytes + logps.nbytes for ids, logps, _ in found.values())
        if time.monotonic() - written > _WRITE_EVERY_S or size > _WRITE_EVERY_BYTES:
            write()

    def write() -> None:
        nonlocal written, size
        store.add(fresh, comparison.vocabulary)
        fresh.clear()
        written, size = time.monotonic(), 0

    try:
        for found in score_packs(model, packs, lambda pack, batch: _top_k_of(model, pack, batch, comparison, k),
                                 world, report, place):
            world.together(partial(keep, found))
    except StoppedEarly:  # from the report: the next time begins where this one stopped
        world.together(write)
        raise
    world.together(write)


def _top_k_of(model: LanguageModel, pack: Sequence[PromptTree], batch: Batch, comparison: Comparison,
              k: int) -> list[TopkEntry]:
    found = likeliest(model, batch, comparison, k)
    if not all(np.isfinite(part).all() for entry in found for part in entry[1:]):
        raise ReferenceMismatchError("the teacher gives a token a log-prob that is not finite. Nothing was trained.")
    return found


def likeliest(model: LanguageModel, batch: Batch, comparison: Comparison, k: int) -> list[TopkEntry]:
    """The k most likely tokens of a model for the supervised tokens of each completion of a batch."""
    hidden = model.hidden(batch, model.tree_pass(batch))  # and with it the head, of a sharded teacher
    best = top_k(hidden, head_of(model.module, model.compute), k, comparison.temperature, comparison.vocabulary)
    parts = [tensor.cpu().split(batch.lengths.tolist()) for tensor in (best.ids, best.logps, best.tail)]
    return [(ids.numpy(), logps.numpy(), tail.numpy()) for ids, logps, tail in zip(*parts, strict=True)]
