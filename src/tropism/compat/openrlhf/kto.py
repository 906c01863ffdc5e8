"""OpenRLHF's KTO trainer."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from tropism import trainers
from tropism.compat.openrlhf.fitting import Fitting, args_of
from tropism.compat.openrlhf.logps import batch_logps, forward
from tropism.data.schedule import MicroBatchRule
from tropism.observe.console import Voice
from tropism.observe.metrics import OtherNames

_NOTE = ("steps follow OpenRLHF: KTO's reference point is pooled over each micro-batch, from the mismatched rows in "
         "it, so it depends on the size of micro-batches and the number of processes. "
         "reference_point='step' pools it over the optimizer step, which depends on neither.")


class KTOTrainer(Fitting):
    """`openrlhf.trainer.KTOTrainer`: trains `model` in place with the caller's optimizer and scheduler.

    Args:
        model, ref_model: an `Actor`, or another module that holds one transformers model.
        strategy: read for `args`, `accumulated_gradient` and `max_norm`, at which gradients are clipped if it is there.
            `args` gives `desirable_loss_weight`, `undesirable_loss_weight` and `aux_loss_coef`.
        tokenizer: of the model.
        optim, scheduler: over weights of the model.
        train_dataloader, eval_dataloader: batches `(input_ids, attention_mask, labels, prompt_ids_lens)` of 2B rows, of
            which the last B are mismatched.
        max_norm: ignored, as in OpenRLHF.
        beta: as in KTO.
        max_epochs: passes over `train_dataloader`.
        save_hf_ckpt: checkpoints hold a loadable model too.
        disable_ds_ckpt: without `save_hf_ckpt`, write no checkpoints.
        reference_point: `published` forms steps from micro-batches as OpenRLHF does. `step` and `micro_batch` are
            those of `tropism.KTOTrainer`.
        voice: receives all output, instead of the terminal.
        options: of `tropism.KTOTrainer`.

    Raises:
        UsageError: for a strategy without `args`.
        ModelError: if a module holds no model, or several.
    """

    ours = trainers.KTOTrainer
    method = "kto"
    names: ClassVar[OtherNames] = {
        "train": {"train/kto_loss": "loss", "train/chosen_reward": "rewards/chosen",
                  "train/reject_reward": "rewards/rejected", "train/lr": "learning_rate", "train/kl": "kl",
                  "train/loss_mean": "loss", "train/global_step": "step"},
        "eval": {"eval/eval_loss": "loss", "eval/chosen_reward": "rewards/chosen",
                 "eval/reject_reward": "rewards/rejected", "eval/global_step": "step"},
    }

    def __init__(self, model: Any, ref_model: Any, strategy: Any, tokenizer: Any, optim: Any, train_dataloader: Any,
                 eval_dataloader: Any, scheduler: Any, max_norm: float = 0.5, beta: float = 0.01, max_epochs: int = 2,
                 save_hf_ckpt: bool = False, disable_ds_ckpt: bool = False, *,
                 reference_point: Literal["published", "step", "micro_batch"] | MicroBatchRule = "published",
                 voice: Voice | None = None, **options: Any) -> None:
        self.ref_model, self.beta = ref_model, beta
        args = args_of(strategy)
        weights = {name: float(value) for name in ("desirable", "undesirable")
                   if (value := getattr(args, f"{name}_loss_weight", None)) is not None}
        self.open(model, strategy, optim=optim, scheduler=scheduler, tokenizer=tokenizer,
                  loaders=(train_dataloader, eval_dataloader), max_norm=max_norm, max_epochs=max_epochs,
                  save_hf_ckpt=save_hf_ckpt, disable_ds_ckpt=disable_ds_ckpt, reference=ref_model,
                  reference_point=reference_point, voice=voice, notes=[_NOTE] if reference_point == "published" else [],
                  options={"beta": beta, **{f"{name}_weight": value for name, value in weights.items()}, **options})

    def compute_model_logps_with_KL(self, model: Any, input_ids: Tensor, attention_mask: Tensor,
                                    labels: Tensor, prompt_id_lens: Sequence[int],
                                    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Summed log-probs of a batch of 2B rows: of its desirable, its undesirable and its mismatched rows; and the
        router loss.

        Args:
            model: wrapped or not.
            input_ids, attention_mask: `[2B, L]`.
            labels: `[2B]`.
            prompt_id_lens: 2B lengths.
        """
        half = len(input_ids) // 2
        chosen, rejected, aux = self.compute_model_logps(model, input_ids[:half], attention_mask[:half], labels[:half],
                                                         prompt_id_lens[:half])
        logits, _ = forward(model, input_ids[half:], attention_mask[half:])
        return chosen, rejected, self._get_batch_logps(logits, input_ids[half:], attention_mask[half:], False,
                                                       prompt_id_lens[half:]), aux

    def compute_model_logps(self, model: Any, input_ids: Tensor, attention_mask: Tensor, labels: Tensor,
                            prompt_id_lens: Sequence[int]) -> tuple[Tensor, Tensor, Any]:
        """Summed log-probs of the desirable and of the undesirable rows, and the router loss. Arguments as in
        `compute_model_logps_with_KL`."""
        logits, aux = forward(model, input_ids, attention_mask)
        logps = self._get_batch_logps(logits, input_ids, attention_mask, False, prompt_id_lens)
        labels = labels.to(logps.device)
        return logps[labels == 1], logps[labels == 0], aux

    def _get_batch_logps(self, logits: Tensor, labels: Tensor, attention_mask: Tensor, average_log_prob: bool = False,
                         prompt_id_lens: Sequence[int] = ()) -> Tensor:
        """`[n]` log-probs of the tokens after the prompts, summed or averaged."""
        return batch_logps(logits, labels, attention_mask, prompt_id_lens)[int(average_log_prob)]
