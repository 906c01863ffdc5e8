"""OpenRLHF's DPO trainer."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from tropism import trainers
from tropism.compat.openrlhf.fitting import Fitting, args_of
from tropism.compat.openrlhf.logps import batch_logps, forward
from tropism.data.schedule import MicroBatchRule
from tropism.errors import UsageError
from tropism.observe.console import Voice
from tropism.observe.metrics import OtherNames

_NOTE = ("steps follow OpenRLHF: losses are averaged over each micro-batch and then over micro-batches, and those that "
         "an epoch leaves over belong to the next update")


def _preference(record: Mapping[str, float]) -> float | None:
    """The preference loss, without the likelihood term."""
    return next((record[key] for key in ("loss/sigmoid", "loss/ipo", "loss") if key in record), None)


class DPOTrainer(Fitting):
    """`openrlhf.trainer.DPOTrainer`: trains `model` in place with the caller's optimizer and scheduler.

    Args:
        model, ref_model: an `Actor`, or another module that holds one transformers model.
        strategy: read for `args`, `accumulated_gradient` and `max_norm`, at which gradients are clipped if it is there.
            `args` gives `ipo`, `label_smoothing`, `nll_loss_coef` and `aux_loss_coef`.
        tokenizer: of the model.
        optim, scheduler: over weights of the model.
        train_dataloader, eval_dataloader: batches `(chosen_ids, chosen_masks, reject_ids, reject_masks,
            prompt_ids_lens)`, not packed.
        max_norm: ignored, as in OpenRLHF.
        beta: as in DPO.
        max_epochs: passes over `train_dataloader`.
        save_hf_ckpt: checkpoints hold a loadable model too.
        disable_ds_ckpt: without `save_hf_ckpt`, write no checkpoints.
        reference_point: `published` forms steps from micro-batches as OpenRLHF does. `step` is that of the
            trainers of `tropism`.
        voice: receives all output, instead of the terminal.
        options: of `tropism.DPOTrainer`.

    Raises:
        UsageError: for a strategy without `args`, and for `args.packing_samples`.
        ModelError: if a module holds no model, or several.
    """

    ours = trainers.DPOTrainer
    method = "dpo"
    names: ClassVar[OtherNames] = {
        "train": {"train/loss": _preference, "train/acc": "rewards/accuracies", "train/chosen_reward": "rewards/chosen",
                  "train/reject_reward": "rewards/rejected", "train/lr": "learning_rate", "train/nll_loss": "loss/sft",
                  "train/loss_mean": _preference, "train/acc_mean": "rewards/accuracies",
                  "train/global_step": "step"},
        "eval": {"eval/eval_loss": _preference, "eval/acc_mean": "rewards/accuracies", "eval/global_step": "step"},
    }

    def __init__(self, model: Any, ref_model: Any, strategy: Any, tokenizer: Any, optim: Any, train_dataloader: Any,
                 eval_dataloader: Any, scheduler: Any, max_norm: float = 0.5, beta: float = 0.01, max_epochs: int = 2,
                 save_hf_ckpt: bool = False, disable_ds_ckpt: bool = False, *,
                 reference_point: Literal["published", "step"] | MicroBatchRule = "published",
                 voice: Voice | None = None, **options: Any) -> None:
        self.ref_model, self.beta = ref_model, beta
        args = args_of(strategy)
        if getattr(args, "packing_samples", False):
            raise UsageError("args.packing_samples: packed batches cannot be read. Turn it off; rows are packed here "
                             "anyway.")
        own: dict[str, Any] = {"beta": beta, "loss": "ipo" if getattr(args, "ipo", False) else "sigmoid"}
        smoothing = float(getattr(args, "label_smoothing", None) or 0)
        if smoothing and own["loss"] == "sigmoid":
            own["label_smoothing"] = smoothing
        if (weight := float(getattr(args, "nll_loss_coef", None) or 0)) > 1e-8:
            own |= {"loss": f"{own['loss']},sft", "loss_weights": f"1,{weight}"}
        self.open(model, strategy, optim=optim, scheduler=scheduler, tokenizer=tokenizer,
                  loaders=(train_dataloader, eval_dataloader), max_norm=max_norm, max_epochs=max_epochs,
                  save_hf_ckpt=save_hf_ckpt, disable_ds_ckpt=disable_ds_ckpt, reference=ref_model,
                  reference_point=reference_point, voice=voice, notes=[_NOTE] if reference_point == "published" else [],
                  options={**own, **options})

    def concatenated_forward(self, model: Any, chosen_ids: Tensor, c_mask: Tensor, reject_ids: Tensor, r_mask: Tensor,
                             prompt_id_lens: Sequence[int]) -> tuple[Tensor, Tensor, Any, Tensor]:
        """Summed log-probs `[n]` of both sides, the router loss, and the mean negative log-likelihood per token of the
        chosen side.

        Args:
            model: wrapped or not.
            chosen_ids, c_mask, reject_ids, r_mask: `[n, L]` of each side.
            prompt_id_lens: n lengths.
        """
        ids, masks, lengths = self.concatenated_inputs(chosen_ids, c_mask, reject_ids, r_mask, prompt_id_lens)
        logits, aux = forward(model, ids, masks)
        sums, means = self._get_batch_logps(logits, ids, masks, lengths)
        half = len(chosen_ids)
        return sums[:half], sums[half:], aux, -means[:half].mean()

    def concatenated_inputs(self, chosen_ids: Tensor, c_mask: Tensor, reject_ids: Tensor, r_mask: Tensor,
                            prompt_id_lens: Sequence[int]) -> tuple[Tensor, Tensor, list[int]]:
        """Ids and masks `[2n, L]` of both sides, the chosen one first, and 2n lengths of prompts."""
        chosen_ids, c_mask, reject_ids, r_mask = (
            rows.reshape(len(rows), -1) for rows in (chosen_ids, c_mask, reject_ids, r_mask))
        width = max(chosen_ids.shape[1], reject_ids.shape[1])
        fill = getattr(self.tokenizer, "pad_token_id", None) or 0

        def joined(one: Tensor, other: Tensor, value: int) -> Tensor:
            return torch.cat([pad(side, (0, width - side.shape[1]), value=value) for side in (one, other)])

        return joined(chosen_ids, reject_ids, fill), joined(c_mask, r_mask, 0), [*prompt_id_lens, *prompt_id_lens]

    def _get_batch_logps(self, logits: Tensor, labels: Tensor, attention_mask: Tensor, prompt_id_lens: Sequence[int],
                         average_log_prob: bool = False) -> tuple[Tensor, Tensor]:
        """`[n]` summed and mean log-probs of the tokens after the prompts."""
        return batch_logps(logits, labels, attention_mask, prompt_id_lens)
