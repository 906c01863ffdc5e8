"""The reference: a frozen model whose log-probs are computed once, before step 1, and stored."""

import copy
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tropism.data.batching.collate import Batch
from tropism.data.batching.pack import scoring_packs
from tropism.data.batching.transfer import sent
from tropism.data.tree import PromptTree
from tropism.distributed.world import World
from tropism.errors import ModelError, OutputError, ReferenceMismatchError, StoppedEarly
from tropism.model.adapters.switch import adapter_off
from tropism.model.fingerprint import fingerprint
from tropism.model.language_model import LanguageModel
from tropism.store import is_read_only, use
from tropism.train.frozen.score_store import ScoreStore
from tropism.train.out_of_memory import by_ids
from tropism.train.reward_rounding import most_logp
from tropism.train.score_packs import PlaceOf, ReportProgress, score_packs, silent, unscored

_WRITE_EVERY_S = 10.0  # at most this much of the pass is lost by a kill


class Reference(Protocol):
    """Gives each completion of some trees its log-prob under the frozen weights."""

    fingerprint: str

    def score(self, trees: Sequence[PromptTree], batch: Batch) -> Tensor:
        """`[C]` float64, on the batch's device, in the batch's order."""
        ...


def freeze(model: LanguageModel) -> LanguageModel:
    """A frozen copy in memory. Weights that do not learn are shared, not copied."""
    shared: dict[int, Any] = {id(weight): weight for weight in model.module.parameters() if not weight.requires_grad}
    module = copy.deepcopy(model.module, shared).requires_grad_(False)
    return LanguageModel(module, model.layout, model.precision, model.device)


class StoredReference:
    """Scores from the store. No second model is in memory.

    Args:
        scores: log-prob by the key of (prompt, completion).
        store: where they are kept.
        stored: keys of those that were there before.
        unsaved: why the others are not kept; empty if they are.
    """

    def __init__(self, scores: dict[bytes, float], store: ScoreStore, stored: Collection[bytes] = (),
                 unsaved: str = "") -> None:
        self.scores = scores
        self.store = store
        self.fingerprint = store.path.name
        self.stored = stored
        self.unsaved = unsaved

    def score(self, trees: Sequence[PromptTree], batch: Batch) -> Tensor:
        """As `Reference` says.

        Raises:
            ReferenceMismatchError: if a score is missing.
        """
        values = [self.scores.get(key) for tree in trees for key in tree.score_keys]
        if None in values:
            raise ReferenceMismatchError("a completion has no reference score. This is a bug. Please report it.")
        return sent(torch.tensor(values, dtype=torch.float64), batch.lengths.device)


class LiveReference:
    """Scores from a frozen model that stays in memory."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.fingerprint = fingerprint(model)

    @torch.no_grad()
    def score(self, trees: Sequence[PromptTree], batch: Batch) -> Tensor:
        """As `Reference` says."""
        return self.model.logps(batch)


class OffReference:
    """Scores from the policy itself with its adapter switched off, which no step changes."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        with adapter_off(model.module):
            self.fingerprint = fingerprint(model)

    @torch.no_grad()
    def score(self, trees: Sequence[PromptTree], batch: Batch) -> Tensor:
        """As `Reference` says."""
        with adapter_off(self.model.module):
            return self.model.logps(batch)


def build(model: LanguageModel, trees: Iterable[PromptTree], microbatch_tokens: int, root: Path, world: World,
          report: ReportProgress = silent, place: PlaceOf = by_ids) -> StoredReference:
    """Score what the store does not have yet, with all ranks together, and return all scores of `trees`.

    Packs are a function of the whole set of trees; a pack of which one score is missing is computed whole, but
    scores that the store has are kept as they are.

    Args:
        model: the frozen weights.
        trees: every (prompt, completion) that the run will ask for.
        microbatch_tokens: tokens of a pack.
        root: the store's directory.
        place: names the row of a completion in errors.

    Raises:
        ReferenceMismatchError: if a score is not a log-prob, naming its row.
    """
    packs = scoring_packs(trees, microbatch_tokens, model.layout)
    store = ScoreStore(root, fingerprint(model), {
        "model": model.module.config.name_or_path, "precision": model.precision, "layout": model.layout})
    known = world.broadcast(world.on_main(partial(_stored, store, packs)) or {})
    _check(known, packs, model, place, f"Remove the stored scores with: tropism store clean --store {root}")
    stored = frozenset(known)
    missing = unscored(packs, known)
    fresh: dict[bytes, float] = {}
    written = time.monotonic()
    unsaved = ""

    def keep() -> None:
        nonlocal written
        if time.monotonic() - written > _WRITE_EVERY_S:
            write()
            written = time.monotonic()

    def write() -> None:
        nonlocal unsaved
        try:
            store.add(fresh)
        except OutputError as error:
            if not is_read_only(error):
                raise
            unsaved = str(error)
        known.update(fresh)
        fresh.clear()

    try:
        for own in score_packs(model, missing, partial(_score_pack, model), world, report, place):
            for scores in world.gather(own):
                _check(scores, packs, model, place, "Check the weights of the reference.")
                fresh.update((key, value) for key, value in scores.items() if key not in known)
            world.on_main(keep)
    except StoppedEarly:  # from the report: the next time begins where this one stopped
        world.on_main(write)
        raise
    world.on_main(write)
    world.on_main(store.discard_damaged)
    known = world.broadcast(known) if missing else known
    return StoredReference({key: known[key] for pack in packs for tree in pack for key in tree.score_keys}, store,
                           stored, unsaved)


def _stored(store: ScoreStore, packs: Iterable[Sequence[PromptTree]]) -> dict[bytes, float]:
    """What the store has of the scores that are needed, from now on in use by this process."""
    use(store.path)
    return store.load({key for pack in packs for tree in pack for key in tree.score_keys})


def check_vocabulary(other: Any, policy: Any, name: str = "reference") -> None:
    """Check that reference and policy, or teacher and student, have the same token for every id.

    Raises:
        ModelError: for the first id that differs.
    """
    ours, theirs = ({index: token for token, index in tokenizer.get_vocab().items()}
                    for tokenizer in (policy, other))
    for index in sorted(ours.keys() | theirs.keys()):
        if ours.get(index) != theirs.get(index):
            raise ModelError(f"token id {index} is {theirs.get(index)!r} in the {name} but {ours.get(index)!r} in the "
                             f"{'student' if name == 'teacher' else 'policy'}; both need the same tokenizer")


def _score_pack(model: LanguageModel, pack: Sequence[PromptTree], batch: Batch) -> list[float]:
    values: list[float] = model.logps(batch).tolist()
    return values


def _check(scores: Mapping[bytes, float], packs: Sequence[Sequence[PromptTree]], model: LanguageModel,
           place: PlaceOf, advice: str) -> None:
    """Check that scores are log-probs: finite, and above 0 by no more than rounding.

    Raises:
        ReferenceMismatchError: naming the row of the first one that is not.
    """
    odd = {key: value for key, value in scores.items() if not math.isfinite(value) or value > 0}
    for tree in (tree for pack in packs for tree in pack) if odd else ():
        for key, completion in zip(tree.score_keys, tree.completions, strict=True):
            value = odd.get(key, 0.0)
            if not math.isfinite(value) or value > most_logp(completion.length, model.precision):
                where = place(PromptTree(tree.prompt_ids, (completion,)))
                raise ReferenceMismatchError(
                    f"{where}: the reference gives this completion the log-prob {value:.6g}, but a log-prob is at most "
                    f"0. Nothing was trained. {advice}")
