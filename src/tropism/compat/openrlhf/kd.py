"""OpenRLHF's trainer for distillation."""

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal

import torch

from tropism import trainers
from tropism.compat.openrlhf.fitting import Fitting, args_of
from tropism.data.schedule import MicroBatchRule
from tropism.observe.console import Voice
from tropism.observe.metrics import OtherNames

_NOTE = ("steps follow OpenRLHF with one correction: each response is trained from its first token to its EOS. "
         "OpenRLHF also trained the last token of the prompt, and distilled one position past the EOS. Its distil_loss "
         "includes the teacher's entropy, which has no gradient. kd/divergence does not.")


class KDTrainer(Fitting):
    """`openrlhf.trainer.KDTrainer`: trains `model` in place with the caller's optimizer and scheduler.

    Minimizes (1 - kd_coef) x cross-entropy + kd_coef x divergence from the teacher over the full vocabulary.

    Args:
        model, teacher_model: an `Actor`, or another module that holds one transformers model.
        strategy: read for `args`, `accumulated_gradient` and `max_norm`, at which gradients are clipped if it is there.
            `args` gives `kd_coef`.
        optim, scheduler: over weights of the model.
        train_dataloader, eval_dataloader: batches `(input_ids, attention_masks, loss_masks)`, or of earlier versions
            `(prompt_ids_lens, input_ids, attention_masks, infos)`.
        max_norm, batch_size: ignored, as in OpenRLHF.
        pretrain_mode: train on every token.
        max_epochs: passes over `train_dataloader`.
        tokenizer: of the model. Default: the one of the name that it was loaded from.
        save_hf_ckpt: checkpoints hold a loadable model too.
        disable_ds_ckpt: without `save_hf_ckpt`, write no checkpoints.
        reference_point: `published` forms steps from micro-batches as OpenRLHF does. `step` is that of the
            trainers of `tropism`.
        voice: receives all output, instead of the terminal.
        options: of `tropism.KDTrainer`.

    Raises:
        UsageError: for a strategy without `args`.
        ModelError: if a module holds no model, or several.
    """

    ours = trainers.KDTrainer
    method = "kd"
    names: ClassVar[OtherNames] = {
        "train": {"train/gpt_loss": "kd/ce", "train/distil_loss": "kd/divergence", "train/lr": "learning_rate",
                  "train/loss_mean": "kd/ce", "train/global_step": "step"},
        "eval": {"eval/eval gpt_loss": "kd/ce", "eval/global_step": "step"},
    }

    def __init__(self, model: Any, teacher_model: Any, strategy: Any, optim: Any, train_dataloader: Any,
                 eval_dataloader: Any, scheduler: Any, max_norm: float = 1, pretrain_mode: bool = False,
                 batch_size: int = 1, max_epochs: int = 2, tokenizer: Any = None, save_hf_ckpt: bool = False,
                 disable_ds_ckpt: bool = False, *,
                 reference_point: Literal["published", "step"] | MicroBatchRule = "published",
                 voice: Voice | None = None, **options: Any) -> None:
        self.teacher_model, self.pretrain_mode, self.batch_size = teacher_model, pretrain_mode, batch_size
        coefficient = getattr(args_of(strategy), "kd_coef", None)
        self.open(model, strategy, optim=optim, scheduler=scheduler, tokenizer=tokenizer,
                  loaders=(self._batches(train_dataloader), self._batches(eval_dataloader)), max_norm=max_norm,
                  max_epochs=max_epochs, save_hf_ckpt=save_hf_ckpt, disable_ds_ckpt=disable_ds_ckpt, notes=[_NOTE],
                  teacher=teacher_model, reference_point=reference_point, voice=voice,
                  options={"kd_weight": 0.4 if coefficient is None else float(coefficient), **options})

    def evaluate(self, eval_dataloader: Iterable[Any], steps: int = 0) -> dict[str, float]:
        """As `Fitting.evaluate`."""
        return super().evaluate(self._batches(eval_dataloader), steps)

    def _batches(self, loader: Any) -> Any:
        """A dataloader; in `pretrain_mode`, of batches in which every token counts."""
        return _EveryToken(loader) if self.pretrain_mode and loader is not None else loader


class _EveryToken:
    """The batches of a dataloader, in which every token but the first is supervised. It has the dataloader's other
    attributes."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            if len(batch) == 3:  # loss masks, which mark the token before the supervised one
                ids, attention_masks, loss_masks = batch
                yield ids, attention_masks, torch.ones_like(torch.as_tensor(loss_masks))
            else:  # lengths of prompts: the first token is one
                lengths, *others = batch
                yield ([1] * len(lengths), *others)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
