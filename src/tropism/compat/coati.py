"""ColossalChat's (coati's) KTO trainer: its constructor, methods, counting and numbers."""

import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from tropism.compat.base import Door, given, optimizer_inside, parallel_note, wandb_variables
from tropism.compat.session import Batches, Figures, MicroBatches, Session
from tropism.data.schedule import PUBLISHED, MicroBatchRule
from tropism.errors import DataError, OutputError, UsageError, count_of
from tropism.model.save import export
from tropism.observe.console import Voice
from tropism.runner import RunResult
from tropism.trainers import KTOTrainer as PlainTrainer

_NAMES = ("loss", "chosen_rewards", "rejected_rewards", "margin")


class KTOTrainer:
    """KTO as coati's trainer of this name does it, with its signature. The actor is trained in place.

    `fit` calls `_before_fit`, then for each epoch `_train` and `_eval`, which subclasses may override.

    Args:
        actor, ref_model: models; boosted ones are unwrapped. Default of `ref_model`: the actor before training.
        booster, plugin, coordinator: replaced by Tropism's engine. The plugin says how gradients are clipped, and that
            the run computes in float32 if its precision is fp32. `print_on_master` of the coordinator is called.
        actor_optim, actor_lr_scheduler: boosted ones are unwrapped. The scheduler is stepped after each update.
        tokenizer: of the actor.
        max_epochs, start_epoch: epochs from `start_epoch` to `max_epochs` - 1 are trained.
        beta, desirable_weight, undesirable_weight: of KTO.
        apply_loss_mask: False trains on the prompt too, from its second token.
        accumulation_steps: micro-batches per update. Their gradients are added, not averaged.
        save_interval: micro-batches between checkpoints, which are saved at updates; 0 saves none.
        save_dir: for checkpoints, evaluations and the run directory.
        reference_point: `published` pools over each micro-batch, with its reversed pairs, as coati does. `step` and
            `micro_batch` are those of `tropism.KTOTrainer`.
        voice: receives all output, instead of the terminal.
        options: of `tropism.KTOTrainer`.

    Raises:
        TropismError: a subclass that names the problem and the remedy.
    """

    def __init__(self, actor: Any, ref_model: Any, booster: Any, actor_optim: Any, plugin: Any, actor_lr_scheduler: Any,
                 tokenizer: Any, max_epochs: int = 1, beta: float = 0.1, desirable_weight: float = 1.0,
                 undesirable_weight: float = 1.0, apply_loss_mask: bool = True, accumulation_steps: int = 1,
                 start_epoch: int = 0, save_interval: int = 0, save_dir: str | Path | None = None,
                 coordinator: Any = None, *,
                 reference_point: Literal["published", "step", "micro_batch"] | MicroBatchRule = "published",
                 voice: Voice | None = None, **options: Any) -> None:
        self.model, self.ref_model, self.booster, self.plugin = actor, ref_model, booster, plugin
        self.optimizer, self.actor_scheduler, self.tokenizer = actor_optim, actor_lr_scheduler, tokenizer
        self.max_epochs, self.start_epoch, self.accumulation_steps = max_epochs, start_epoch, accumulation_steps
        self.beta, self.desirable_weight, self.undesirable_weight = beta, desirable_weight, undesirable_weight
        self.apply_loss_mask, self.save_interval, self.save_dir = apply_loss_mask, save_interval, save_dir
        self.coordinator, self.num_train_step, self.writer = coordinator, 0, None
        self.train_dataloader: Any = None
        self.eval_dataloader: Any = None
        if not 0 <= start_epoch < max_epochs:
            raise UsageError(f"no epoch to train: start_epoch is {start_epoch}, and max_epochs is {max_epochs}. Raise "
                             "max_epochs.")
        clip = clipping(plugin, booster, actor_optim)
        self._optimizer = optimizer_inside(actor_optim)
        rule: Any = PUBLISHED["coati"] if reference_point == "published" else reference_point
        names = {split: {f"{split}/{name}": self._from_session(split, name) for name in logged}
                 for split, logged in (("train", (*_NAMES, "lr")), ("eval", _NAMES))}
        self._door = Door(PlainTrainer, actor, rule, ref_model, None, tokenizer, self._optimizer, actor_lr_scheduler,
                          names, self._notes(clip, reference_point, apply_loss_mask), {
                              "beta": beta, "desirable_weight": desirable_weight, "undesirable_weight":
                              undesirable_weight, "max_grad_norm": clip, "log_every": 1, "eval_every": 0,
                              **_precision(plugin, booster), **options},
                          voice)
        self._is_main = os.environ.get("RANK", "0") == "0"
        self._speaker = voice or Voice(loud=self._is_main)
        self._published = reference_point == "published"
        self._batches: Batches | None = None
        self._session: Session | None = None
        self._environment: dict[str, str] = {}
        self._carried = 0

    def _notes(self, clip: float, reference_point: Any, masked: bool) -> list[str]:
        """What a user of coati should know."""
        clipped = f"clipped to norm {clip:g}, as the plugin says" if clip else "not clipped: the plugin has no max_norm"
        notes = [*parallel_note("The booster"),
                 f"booster, plugin and coordinator are replaced by Tropism's engine. Gradients are {clipped}."]
        if not masked:
            notes.append("apply_loss_mask=False trains on prompts too, from their second token. coati's trainer then "
                         "trains on the padding up to max_length as well.")
        if reference_point == "published":
            notes.append("the numbers are coati's: a reference point for each micro-batch, pairs from the reversed "
                         "micro-batch, added gradients, the same row order in each epoch. reference_point='step' makes "
                         "the result independent of the micro-batch size")
        return notes

    def _from_session(self, split: str, name: str) -> Any:
        """A metric of a record, by its published name."""
        def read(record: Mapping[str, float]) -> float | None:
            value = self._session.figures(record, split).get(name) if self._session else None
            return None if value is None or math.isnan(value) else value
        return read

    def fit(self, *args: Any, **kwargs: Any) -> RunResult | None:
        """Train and evaluate. The arguments are those of `_before_fit`.

        Returns:
            The result of the run; None if an overridden `_train` did the work.
        """
        self._before_fit(*args, **kwargs)
        try:
            for epoch in range(self.start_epoch, self.max_epochs):
                self._train(epoch)
                self._eval(epoch)
        except BaseException as error:
            if self._session is not None and self._session.result is None:
                self._session.fail(error)
            raise
        finally:
            if self.writer is not None:
                self.writer.close()
        return self._session.finish() if self._session is not None else None

    def _before_fit(self, train_preference_dataloader: Iterable[Any] | None = None,
                    eval_preference_dataloader: Iterable[Any] | None = None, log_dir: str | Path | None = None,
                    use_wandb: bool | str = False) -> None:
        """Take the dataloaders, and start the trackers.

        Args:
            log_dir: directory for TensorBoard; None for none.
            use_wandb: log to wandb too. A string is the API key, which is not recorded.
        """
        self.train_dataloader, self.eval_dataloader = train_preference_dataloader, eval_preference_dataloader
        self.writer = None
        self._session, self._batches = None, None
        self._environment = wandb_variables(use_wandb, project="Coati-kto") if use_wandb else {}
        if log_dir is not None and self._is_main:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UsageError("log_dir requires tensorboard. Run: pip install 'tropism[tensorboard]'") from None
            self.writer = SummaryWriter(str(Path(log_dir) / "kto" / time.strftime("%Y-%m-%d_%H:%M:%S")))

    def _train(self, epoch: int) -> None:
        """Train an epoch. Micro-batches that it leaves over begin the first update of the next one."""
        session = self._begin()
        assert self._batches is not None
        taken = self._batches.passes[: epoch - self.start_epoch + 1]
        before = sum(taken[:-1])
        for number in range(before // self.accumulation_steps, sum(taken) // self.accumulation_steps):
            self._carried = max(0, before - number * self.accumulation_steps)
            found = session.update()
            self.num_train_step = (number + 1) * self.accumulation_steps
            if self.writer is not None:
                for name, value in self._logged("train", found).items():
                    self.writer.add_scalar(f"train/{name}", value, number + 1)
            if self.save_dir is not None and self.save_interval and self.num_train_step % self.save_interval == 0:
                self._save(epoch, self.num_train_step - before, len(found[-1][0].losses))
        self.num_train_step = sum(taken)

    def _eval(self, epoch: int) -> None:
        """Evaluate on the evaluation data; the result is printed, and written to `save_dir` if there is one."""
        if not given(self.eval_dataloader):
            self._print("No eval dataloader is provided, skip evaluation")
            return
        found = window(self._begin().evaluation(), self.beta)
        message = "Evaluation Result:\n" + "".join(f"{name}: {found[name]}\n" for name in _NAMES)
        self._print(message)
        if self.save_dir is not None and self._is_main:
            place = Path(self.save_dir) / f"eval_result_epoch{epoch}.txt"
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(message, encoding="utf-8")
            except OSError as error:
                raise OutputError.because(place, error) from error

    def _begin(self) -> Session:
        """The session of this fit; the first call reads the dataloaders."""
        if self._session is not None:
            return self._session
        if self.train_dataloader is None:
            raise UsageError("train_preference_dataloader is required")
        change = (lambda batch: batch) if self.apply_loss_mask else without_loss_mask
        self._batches, held_out = Batches(self.train_dataloader, change, announce=not self._published), None
        if given(self.eval_dataloader):
            held_out = Batches(self.eval_dataloader, change)
        self._session = Session(
            self._door, self._batches, held_out, self._logged, output=Path(self.save_dir or ".") / "tropism-run",
            environment=self._environment, epochs=self.max_epochs - self.start_epoch,
            accumulation_steps=self.accumulation_steps, **{"track": "wandb"} if self._environment else {})
        if held_out is not None:
            self._speaker.warn(f"each epoch is evaluated on the {count_of(held_out.passes[0], 'batch', 'batches')} of "
                            "eval_preference_dataloader. coati's trainer evaluates on the "
                            f"{count_of(self._batches.passes[0], 'batch', 'batches')} of its training data instead, "
                            "which looks better: loss 0.40 for 0.47 in examples/coming_from/coati_kto.py")
        return self._session

    def _logged(self, split: str, found: MicroBatches) -> Mapping[str, float]:
        if split == "eval":
            return window(found, self.beta)
        assert self._session is not None
        rate = self._optimizer.param_groups[0]["lr"] if self._optimizer is not None else self._session.learning_rate
        return {**window(found[self._carried :], self.beta), "lr": float(rate)}

    def _save(self, epoch: int, step: int, rows: int) -> None:
        """Write a checkpoint in the published layout: model, states of optimizer and scheduler, position."""
        if not self._is_main:
            return
        assert self.save_dir is not None
        assert self._session is not None
        place = Path(self.save_dir) / f"epoch-{epoch}_step-{step}"
        partial = place.with_name(f".{place.name}.partial")
        model, run = self._door.model, self._session.run
        self._print("Start saving model checkpoint with running states")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            export(model, self.tokenizer or run.inputs.tokenizer, partial / "modeling", next(model.parameters()).dtype,
                   sorted(run.inputs.data.renderer.stop_ids))
            for name, owner in (("optimizer", self._optimizer), ("lr_scheduler", self.actor_scheduler)):
                if owner is not None:
                    torch.save(owner.state_dict(), partial / name)
            states = {"epoch": epoch, "step": step, "sample_start_index": step * rows}
            (partial / "running_states.json").write_text(json.dumps(states, indent=4), encoding="utf-8")
            shutil.rmtree(place, ignore_errors=True)
            partial.replace(place)
        except OutputError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise OutputError.because(place, error) from error
        self._print(f"Saved checkpoint at epoch {epoch} step {step} at folder {self.save_dir}")

    def _print(self, text: str) -> None:
        """Print on the main process, by the coordinator if it can."""
        show = getattr(self.coordinator, "print_on_master", None)
        if callable(show):
            show(text)
        else:
            for line in text.splitlines():
                self._speaker.say(line)


def window(micro_batches: MicroBatches, beta: float) -> dict[str, float]:
    """What coati logs of micro-batches: the means of their own means, each through float16. A class that none of them
    has is NaN."""
    def through(value: float) -> float:
        return float(np.float16(value))

    def rewards(parts: list[Figures], of_class: bool) -> float:
        found = [mean for part in parts if not math.isnan(mean := part.mean(of_class))]
        return through(beta * sum(found) / len(found)) if found else math.nan

    def mean(values: list[float]) -> float:
        known = [value for value in values if not math.isnan(value)]
        return sum(known) / len(known) if known else math.nan

    chosen, rejected = (mean([rewards(parts, side) for parts in micro_batches]) for side in (True, False))
    return {"loss": mean([through(float(np.mean([part.losses.mean() for part in parts]))) for parts in micro_batches]),
            "chosen_rewards": chosen, "rejected_rewards": rejected, "margin": chosen - rejected}


def without_loss_mask(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch whose every token is trained on, from the second token of each text. Padding is not.

    Raises:
        DataError: for a batch of another layout.
    """
    needed = [f"{prefix}{name}" for prefix in ("", "kl_") for name in ("attention_mask", "loss_mask")]
    if not isinstance(batch, Mapping) or not set(needed) <= batch.keys():
        raise DataError(f"apply_loss_mask=False needs batches of coati's layout, with {', '.join(needed)}")
    changed = dict(batch)
    for prefix in ("", "kl_"):
        attention, loss = (torch.as_tensor(batch[f"{prefix}{name}"]) for name in ("attention_mask", "loss_mask"))
        text = attention.bool() | loss.bool()
        begun, rest = text.long().cumsum(1), text.flip(1).long().cumsum(1).flip(1)
        inside = (begun > 0) & (rest > 0)  # an EOS inside a text is one of its tokens
        first = inside.long().cumsum(1) == 1
        changed |= {f"{prefix}attention_mask": inside, f"{prefix}loss_mask": (inside & ~first).long()}
    return changed


def _precision(*sources: Any) -> dict[str, str]:
    """The option for a plugin, or the plugin of a booster, that computes in float32."""
    owners = [owner for source in sources for owner in (source, getattr(source, "plugin", None))]
    named = next(filter(None, (getattr(owner, "precision", None) for owner in owners)), None)
    return {"precision": "fp32"} if named == "fp32" else {}


def clipping(*sources: Any) -> float:
    """The gradient norm that a plugin, the plugin of a booster or a boosted optimizer clips to; 0 if none does."""
    for source in sources:
        for owner in (source, getattr(source, "plugin", None)):
            for place in (owner, getattr(owner, "optim_kwargs", None), getattr(owner, "zero_optim_kwargs", None)):
                for name in ("max_norm", "clip_grad_norm", "_clip_grad_norm"):
                    value = place.get(name) if isinstance(place, Mapping) else getattr(place, name, None)
                    if isinstance(value, int | float) and not isinstance(value, bool):
                        return max(0.0, float(value))
    return 0.0
