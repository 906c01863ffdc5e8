"""NeMo-Aligner's KTO trainer: its constructor, methods, counting and numbers."""

import copy
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tropism.compat.base import Door, optimizer_inside, parallel_note, whole
from tropism.compat.nemo_aligner.settings import Intervals, Timer, batches, batches_of, owner_of, read, steps
from tropism.compat.session import Batches, MicroBatches, Session
from tropism.data.schedule import PUBLISHED, MicroBatchRule
from tropism.errors import UsageError
from tropism.model.wrapped_module import model_inside
from tropism.observe.console import Voice
from tropism.runner import RunResult
from tropism.trainers import KTOTrainer as PlainTrainer

_NAMES = ("loss", "kl", "rewards_chosen_mean", "rewards_rejected_mean", "rewards_all_mean", "rewards_all_std",
          "rewards_margin")
_IGNORED = {"sft_loss_weight": 0.0, "preference_loss_weight": 1.0}  # read by the published model, then ignored


class KTOTrainer:
    """KTO as NeMo-Aligner's trainer of this name does it, with its signature. The model is trained in place.

    Args:
        cfg: `max_epochs`, `max_steps`, `val_check_interval`, `save_interval`, `limit_train_batches`,
            `limit_val_batches` and `gradient_clip_val`; OmegaConf's, a dict or an object with attributes.
        model: a transformers model, or a module that holds one. Its `cfg` has `micro_batch_size`, `global_batch_size`
            and `kto` (`ref_policy_kl_penalty`, `desirable_loss_weight`, `undesirable_loss_weight`,
            `preference_average_log_probs`), its `tokenizer` the tokenizer, its `ref_policy_state_dict` the weights of
            the reference. Defaults: the whole batch, NeMo-Aligner's, the tokenizer at the model's name, and the model
            before training.
        optimizer, scheduler: over the model's weights.
        train_dataloader, val_dataloader, test_dataloader: global batches, or each process's part of them, as
            `kto_custom_collate` makes them. The test data is not used.
        logger: its `log_metrics(metrics, step=, prefix=)` and `finalize()` are called; None for none.
        ckpt_callback: its `custom_save(monitor_candidates=, is_train_end=)` is called; None for none.
        run_timer: an object with `start_time()` and `is_finished()`, "DD:HH:MM:SS", or None for no limit.
        reference_point: `published` takes z0 from each micro-batch, clamped before it is averaged over processes, with
            the pairs of the batch, as NeMo-Aligner does. `step` and `micro_batch` are those of `tropism.KTOTrainer`.
        voice: receives all output, instead of the terminal.
        options: of `tropism.KTOTrainer`.

    Raises:
        TropismError: a subclass that names the problem and the remedy.
    """

    def __init__(self, cfg: Any, model: Any, optimizer: Any, scheduler: Any, train_dataloader: Any, val_dataloader: Any,
                 test_dataloader: Any, logger: Any, ckpt_callback: Any, run_timer: Any, *,
                 reference_point: Literal["published", "step", "micro_batch"] | MicroBatchRule = "published",
                 voice: Voice | None = None, **options: Any) -> None:
        self.cfg, self.model, self.optimizer, self.scheduler = cfg, model, optimizer, scheduler
        self.train_dataloader, self.val_dataloader = train_dataloader, val_dataloader
        self.test_dataloader, self.logger, self.ckpt_callback = test_dataloader, logger, ckpt_callback
        self.run_timer = run_timer if hasattr(run_timer, "is_finished") else Timer(run_timer)
        if ckpt_callback is not None and not callable(getattr(ckpt_callback, "custom_save", None)):
            raise UsageError(f"ckpt_callback ({type(ckpt_callback).__name__}) has no custom_save. Pass None to save "
                             "nothing.")
        self.step = self.consumed_samples = 0
        self.num_steps_per_epoch = batches(batches_of(train_dataloader), read(cfg, "limit_train_batches"),
                                           "limit_train_batches")
        if not self.num_steps_per_epoch:
            raise UsageError("train_dataloader has no batch to train on. Lower the global batch size, or raise "
                             "limit_train_batches.")
        self.limit_val_batches = 0 if val_dataloader is None else batches(
            len(val_dataloader), read(cfg, "limit_val_batches"), "limit_val_batches")
        self.val_check_interval, self.save_interval = (
            steps(read(cfg, name), share, name)
            for name, share in (("val_check_interval", self.num_steps_per_epoch), ("save_interval", 1)))
        self.set_max_steps()
        owner = owner_of(model)
        settings = read(owner, "cfg", {})
        self._kto, self._size = read(settings, "kto", {}), read(settings, "global_batch_size")
        self._published = reference_point == "published"
        size = read(settings, "micro_batch_size")
        rule: Any = reference_point
        if self._published:
            rule = replace(PUBLISHED["NeMo-Aligner"], size=size,
                           average=bool(read(self._kto, "preference_average_log_probs", False)))
        clip = float(read(cfg, "gradient_clip_val", 0.0))
        self._clip = max(0.0, clip)
        wrapped = read(owner, "tokenizer")
        self._optimizer = optimizer_inside(optimizer)
        names = {split: {f"{prefix}/{name}": self._from_session(split, name) for name in _NAMES}
                 for split, prefix in (("train", "train"), ("eval", "val"))}
        names["train"] |= {"train/lr": "learning_rate", "train/grad_norm": "grad_norm"}
        self._door = Door(
            PlainTrainer, model, rule, _reference_of(owner), None, getattr(wrapped, "tokenizer", wrapped),
            self._optimizer, scheduler, names, self._notes(), {
                "beta": read(self._kto, "ref_policy_kl_penalty", 0.2),
                "desirable_weight": read(self._kto, "desirable_loss_weight", 1.0),
                "undesirable_weight": read(self._kto, "undesirable_loss_weight", 1.0), "max_grad_norm": self._clip,
                "log_every": 1, **options}, voice)
        self._session: Session | None = None
        self._live = False
        self._sizes: list[int] = []
        self._planned: Any = None

    def _notes(self) -> list[str]:
        """What a user of NeMo-Aligner should know."""
        notes = parallel_note("Megatron")
        if notes:
            notes.append("rewards are divided into chosen and rejected by their own labels. NeMo-Aligner uses the "
                         "labels of one process for the rewards of all of them, which can halve rewards_margin")
        notes += [f"model.cfg.kto.{name} is ignored, as in NeMo-Aligner" for name, default in _IGNORED.items()
                  if read(self._kto, name, default) != default]
        if self._published:
            notes.append("the numbers are NeMo-Aligner's: a reference point for each micro-batch, clamped before it is "
                         "averaged over processes, with the pairs of the batch. reference_point='step' makes the "
                         "result independent of micro-batches and processes")
        return notes

    def _from_session(self, split: str, name: str) -> Any:
        """A metric of a record, by its published name."""
        def value(record: Mapping[str, float]) -> float | None:
            found = self._session.figures(record, split).get(name) if self._session else None
            return None if found is None or math.isnan(found) else found
        return value

    # --- counting ---------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Epochs that are complete."""
        return self.step // self.num_steps_per_epoch

    def set_max_steps(self) -> None:
        """Set `max_steps`: the steps of `max_epochs`, or `cfg.max_steps` if that is fewer and not negative."""
        epochs, most = (whole(read(self.cfg, name, otherwise), name)
                        for name, otherwise in (("max_epochs", 1), ("max_steps", -1)))
        limits = [] if epochs is None else [self.num_steps_per_epoch * epochs]
        limits += [] if most is None or most < 0 else [most]
        if not limits:
            raise UsageError("max_epochs is infinite, and max_steps is not set. Set one of them.")
        self.max_steps = min(limits)

    def state_dict(self) -> dict[str, int]:
        """The position of the run: `step`, `consumed_samples` and `epoch`."""
        return {"step": self.step, "consumed_samples": self.consumed_samples, "epoch": self.epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a position. Weights, optimizer and scheduler are the caller's to restore."""
        self.step, self.consumed_samples = int(state_dict["step"]), int(state_dict["consumed_samples"])
        self.set_max_steps()

    def _passes(self) -> list[int]:
        """Steps of each epoch that is left."""
        found, step = [], self.step
        while step < self.max_steps:
            found.append(min(self.max_steps - step, self.num_steps_per_epoch - step % self.num_steps_per_epoch))
            step += found[-1]
        return found

    # --- training ---------------------------------------------------------------------------------------------------

    def fit(self) -> RunResult | None:
        """Train from the current position to `max_steps`.

        Returns:
            The result of the run; None if there was nothing left to train.
        """
        if not self._passes():
            return None
        self.run_timer.start_time()
        session = self._begin()
        try:
            expired = self._train(session)
        except BaseException as error:
            if session.result is None:
                session.fail(error)
            raise
        result = session.finish("run_timer has expired" if expired else None)
        if not expired:
            self._tell("finalize")
        return result

    def _train(self, session: Session) -> bool:
        """Do all steps. Returns whether the time ran out."""
        intervals = Intervals(self.val_check_interval if self.limit_val_batches else 0,
                              self.save_interval, self.max_steps)
        for number in range(1, session.steps.total_steps + 1):
            began, epoch = time.monotonic(), self.epoch
            self._planned = session.batch(number)
            _, metrics = self.train_single_step(self._planned)
            self.consumed_samples += self._global_batch_size(self._planned)
            metrics |= {"consumed_samples": self.consumed_samples, "step_time": time.monotonic() - began,
                        "epoch": epoch + 1}
            self._tell("log_metrics", metrics, step=self.step, prefix="train/")
            known = {f"train_{name}": value for name, value in metrics.items()}
            self.step += 1
            expired = bool(session.run.world.max([int(self.run_timer.is_finished())])[0])
            validate, save, last = intervals.after(self.step, expired)
            if validate:
                _, found = self.run_validation()
                self._tell("log_metrics", found, step=self.step, prefix="val/")
                known |= {f"val_{name}": value for name, value in found.items()}
            if save:
                self.save({name: torch.as_tensor(value) for name, value in known.items()}, is_train_end=last)
            if expired:
                return True
        return False

    def train_single_step(self, global_batch: Any) -> tuple[float, dict[str, float]]:
        """One update.

        Args:
            global_batch: as `kto_custom_collate` makes it. `fit` passes the batches of `train_dataloader` in their
                order; any other batch is trained on too.

        Returns:
            The mean loss, and the metrics.
        """
        if self._planned is not None and global_batch is self._planned:
            assert self._session is not None
            session, found = self._session, self._session.update()
        else:
            session = self._begin(live=True)
            found = session.update_on(global_batch)
        metrics = figures(found)
        if self._clip:
            metrics["grad_norm"] = session.grad_norm
        metrics["lr"] = session.learning_rate
        return metrics["loss"], metrics

    def validation_step(self, global_batch: Any) -> tuple[float, dict[str, float]]:
        """Mean loss and metrics of a batch. The model is not changed.

        Raises:
            UsageError: during `fit`, for a batch that is not one of `val_dataloader`, unless the reference is `live`.
        """
        session = self._session if self._session is not None else self._begin(live=True)
        metrics = figures(session.evaluation_of(global_batch))
        return metrics["loss"], metrics

    def run_validation(self) -> tuple[float, dict[str, float]]:
        """Mean loss and mean metrics of the validation batches; of a metric that a batch lacks, over the others.

        Raises:
            UsageError: if there are none.
        """
        if not self.limit_val_batches:
            raise UsageError("no batch to validate on. Pass val_dataloader, and raise limit_val_batches.")
        began = time.monotonic()
        if type(self).validation_step is not KTOTrainer.validation_step or self._session is None or self._live:
            loader = Batches(self.val_dataloader, most=[self.limit_val_batches])
            each = [self.validation_step(batch)[1] for batch in loader]
            seconds = time.monotonic() - began
        else:
            each = self._batchwise(self._session.evaluation())
            seconds = self._session.seconds
        means = {name: _mean([found[name] for found in each]) for name in each[0]}
        means["validation_step_time"] = seconds / len(each)
        return means["loss"], means

    def save(self, extra_candidates: Mapping[str, Any] | None = None, is_train_end: bool = False) -> None:
        """Let `ckpt_callback` save the model, with the position and metrics to choose checkpoints by."""
        candidates = {name: torch.tensor(value, dtype=torch.int32) for name, value in self.state_dict().items()}
        if self.ckpt_callback is not None:
            self.ckpt_callback.custom_save(monitor_candidates={**candidates, **(extra_candidates or {})},
                                           is_train_end=is_train_end)

    @torch.no_grad()
    def augment_dataloader(self, dataloader: Iterable[Any]) -> Iterator[Any]:
        """Batches with the reference's log-probs of each token but the first, as `ref_policy_log_probs_samples` and
        `ref_policy_log_probs_kl_samples` `[S, L - 1]`. Training does not need them: it computes the sums once."""
        reference = self._door.reference
        if reference is None:
            if self.step:
                raise UsageError("the model has been trained, so its reference log-probs cannot be computed any more. "
                                 "Call augment_dataloader before fit, or set model.ref_policy_state_dict.")
            reference = copy.deepcopy(self._door.model).eval()
        for batch in dataloader:
            changed = dict(batch)
            for name in ("samples", "kl_samples"):
                ids = batch[name].to(reference.device)
                logps = reference(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
                changed[f"ref_policy_log_probs_{name}"] = logps.gather(2, ids[:, 1:, None]).squeeze(2).cpu()
            yield changed

    # --- the run ----------------------------------------------------------------------------------------------------

    def _begin(self, live: bool = False) -> Session:
        """The session of a fit, which reads its batches; or a live one, for single steps on any batch."""
        if self._session is not None and live == self._live and self._session.result is None:
            return self._session
        if self._session is not None and self._session.result is None:
            self._session.leave()
        augmented = type(self).augment_dataloader is not KTOTrainer.augment_dataloader
        loader, held_out = self.train_dataloader, self.val_dataloader
        if augmented:
            loader = _Augmented(self.augment_dataloader, loader)
        train = Batches(loader, most=[1] if live else self._passes(), announce=not self._published)
        evaluation, self._sizes = None, []
        if self.limit_val_batches and (live or self.val_check_interval):
            held_out = _Augmented(self.augment_dataloader, held_out) if augmented else held_out
            evaluation = Batches(held_out, self._counted, [self.limit_val_batches])
        changes: dict[str, Any] = {"reference": "live"} if live and self._door.reference is None else {}
        if not live and self.val_check_interval:
            changes["eval_every"] = self.val_check_interval
        self._session = Session(self._door, train, evaluation, self._logged, output=Path("tropism-run"),
                                environment={}, epochs=len(train.most or [1]), **changes)
        self._live = live
        return self._session

    def _counted(self, batch: Any) -> Any:
        self._sizes.append(len(batch["samples"]))
        return batch

    def _logged(self, split: str, found: MicroBatches) -> Mapping[str, float]:
        if split == "train":
            return figures(found)
        each = self._batchwise(found)
        return {name: _mean([one[name] for one in each]) for name in each[0]}

    def _batchwise(self, found: MicroBatches) -> list[dict[str, float]]:
        """The metrics of each validation batch."""
        rule, each, start = self._door.rule, [], 0
        if not self._published:  # they are evaluated together
            return [figures(found)]
        size = rule.size
        for rows in self._sizes:
            count = -(-rows // (size or rows))
            each.append(figures(found[start : start + count]))
            start += count
        return each

    def _global_batch_size(self, batch: Mapping[str, Any]) -> int:
        return int(self._size or len(batch["samples"]))

    def _tell(self, method: str, *args: Any, **named: Any) -> None:
        """Call the logger, if it has the method."""
        call = getattr(self.logger, method, None)
        if callable(call):
            call(*args, **named)


class _Augmented:
    """A dataloader whose batches pass through an overridden `augment_dataloader`."""

    def __init__(self, augment: Any, loader: Any) -> None:
        self.augment, self.loader = augment, loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.augment(self.loader))


def figures(micro_batches: MicroBatches) -> dict[str, float]:
    """What NeMo-Aligner logs of a global batch: rewards are log-ratios, not times beta. A class that the batch lacks is
    NaN."""
    parts = [part for own in micro_batches for part in own]
    ratios, labels = (np.concatenate([getattr(part, name) for part in parts]) for name in ("logratios", "desirable"))
    chosen, rejected = (float(own.mean()) if len(own := ratios[labels == side]) else math.nan for side in (True, False))
    rows = [len(part.losses) for part in parts]
    return {"loss": float(np.mean([np.mean([part.losses.mean() for part in own]) for own in micro_batches])),
            "kl": float(np.average([part.positive for part in parts], weights=rows)),
            "rewards_chosen_mean": chosen, "rewards_rejected_mean": rejected, "rewards_all_mean": float(ratios.mean()),
            "rewards_all_std": float(ratios.std(ddof=1)) if len(ratios) > 1 else math.nan,
            "rewards_margin": float(np.nan_to_num(chosen) - np.nan_to_num(rejected))}


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _reference_of(model: Any) -> Any:
    """The reference that `model.ref_policy_state_dict` describes; None for the model before training.

    Raises:
        UsageError: if its weights are not those of the model.
    """
    state: Mapping[str, Tensor] | None = getattr(model, "ref_policy_state_dict", None)
    if state is None:
        return None
    inside = model_inside(model, "model")
    prefix = next((f"{name}." for name, part in model.named_modules() if part is inside and name), "")
    own = {name.removeprefix(prefix): value for name, value in state.items()}
    reference = copy.deepcopy(inside)
    missing, unexpected = reference.load_state_dict(own, strict=False)
    tied = set(getattr(reference, "_tied_weights_keys", None) or ())
    if unexpected or set(missing) - tied:
        name = next(iter([*unexpected, *missing]))
        raise UsageError(f"model.ref_policy_state_dict does not fit the model (first: {name}). Use a copy of "
                         "model.state_dict().")
    return reference.eval()
