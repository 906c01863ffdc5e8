"""What OpenRLHF's trainers have in common: `fit`, `evaluate`, and what they read of `strategy` and `args`."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from tropism.compat.base import Door, given, interval, parallel_note, wandb_variables, whole
from tropism.data.dataloaders.steps import rule_of
from tropism.data.schedule import PUBLISHED
from tropism.distributed.world import processes
from tropism.errors import UsageError
from tropism.observe.console import Voice
from tropism.observe.metrics import OtherNames
from tropism.runner import RunResult
from tropism.trainers import Trainer

_NOT_CALLED = ("save_logs_and_checkpoints", "evaluate", "compute_model_logps_with_KL", "compute_model_logps",
               "concatenated_forward", "concatenated_inputs", "_get_batch_logps")
"""Published methods that `fit` does without."""


class Fitting:
    """The methods that OpenRLHF's trainers share. `door` is the plain trainer's."""

    ours: ClassVar[type[Trainer]]
    method: ClassVar[str]
    names: ClassVar[OtherNames]

    def open(self, model: Any, strategy: Any, *, optim: Any, scheduler: Any, tokenizer: Any, loaders: Sequence[Any],
             max_norm: float, max_epochs: int, save_hf_ckpt: bool, disable_ds_ckpt: bool, notes: Sequence[str],
             options: Mapping[str, Any], reference_point: Any, voice: Voice | None, **others: Any) -> None:
        """Take what the published constructors share, under their names.

        Args:
            loaders: for training and evaluation.
            notes: what differs from OpenRLHF.
            options: of the plain trainer.
            reference_point: `published`, a scope or a rule of the plain trainer.
            voice: receives all output, instead of the terminal.
            others: `reference` or `teacher`.
        """
        self.model, self.strategy, self.args = model, strategy, args_of(strategy)
        self.optimizer, self.scheduler, self.tokenizer = optim, scheduler, tokenizer
        self.train_dataloader, self.eval_dataloader = loaders
        self.max_norm, self.epochs = max_norm, max_epochs
        self.save_hf_ckpt, self.disable_ds_ckpt = save_hf_ckpt, disable_ds_ckpt
        clip = getattr(strategy, "max_norm", None) or getattr(self.args, "max_norm", None) or 0.0
        router = getattr(self.args, "aux_loss_coef", 0) or 0
        extra = {"max_grad_norm": clip} | ({"router_aux_weight": router} if router > 1e-8 else {})
        rule: Any = (PUBLISHED["OpenRLHF"] if reference_point == "published" else
                     rule_of(reference_point, self.ours.options_class.view))
        self.door = Door(self.ours, model, rule, tokenizer=tokenizer, optimizer=optim, scheduler=scheduler,
                         names=self.names, notes=[*notes, *parallel_note("DeepSpeed")], options={**extra, **options},
                         voice=voice, **others)

    def fit(self, args: Any, consumed_samples: int = 0, num_update_steps_per_epoch: int | None = None) -> RunResult:
        """Train as `openrlhf` did, and write a run directory at `args.ckpt_path`, or at the next free name.

        Args:
            args: object or mapping; default: those of the strategy. With `eval_steps`, `save_steps`, `logging_steps`,
                `ckpt_path`, `max_ckpt_num`, `use_wandb`, `use_tensorboard` and `load_checkpoint`, which resumes the run
                at `ckpt_path`, if there is one.
            consumed_samples: rows that were trained on before. Their optimizer steps are skipped, unless a run is
                resumed, which knows them.
            num_update_steps_per_epoch: interval of evaluations if `eval_steps` is -1.

        Raises:
            TropismError: a subclass that names the problem and the remedy, before the first step where possible.
        """
        if self.train_dataloader is None:
            raise UsageError("train_dataloader is required")
        args = self.args if args is None else as_namespace(args)
        own = [name for name in _NOT_CALLED if _is_overridden(type(self), name)]
        if own:
            self.door.notes = [*self.door.notes, f"fit() does not call {', '.join(own)}. Records are in metrics.jsonl, "
                               "checkpoints in the run directory. To change the loss, use the trainers of tropism."]
        output = self._place(args)
        resume = bool(getattr(args, "load_checkpoint", False)) and (output / "config.yaml").is_file()
        rule = self.door.rule
        if not resume:
            rule = replace(rule, done=self._steps_done(args, consumed_samples))
        every = interval(getattr(args, "eval_steps", -1), "args.eval_steps", num_update_steps_per_epoch or "1ep")
        evaluation = self.eval_dataloader if every is not None and given(self.eval_dataloader) else None
        options: dict[str, Any] = {} if evaluation is None else {"eval_every": every}
        save = interval(getattr(args, "save_steps", -1), "args.save_steps")
        if save is not None and (self.save_hf_ckpt or not self.disable_ds_ckpt):
            most = getattr(args, "max_ckpt_num", None)
            kept = 3 if most is None else whole(most, "args.max_ckpt_num")
            options |= {"save_every": save, "keep": 0 if kept is None else max(1, kept),
                        "checkpoint_model": self.save_hf_ckpt}
        options["log_every"] = _logging_steps(args)
        use_wandb, board = (getattr(args, name, None) for name in ("use_wandb", "use_tensorboard"))
        if use_wandb and str(use_wandb).lower() != "false":
            options["track"] = "wandb"
        elif board:
            options |= {"track": "tensorboard", "log_dir": str(board)}
        named = {ours: getattr(args, f"wandb_{theirs}", None) for ours, theirs in (
            ("entity", "org"), ("run_group", "group"), ("project", "project"), ("name", "run_name"))}
        return self.door.fit(self.train_dataloader, evaluation, output=output, epochs=self.epochs, resume=resume,
                             accumulation=self._accumulation(), rule=rule,
                             environment=wandb_variables(use_wandb, **named) if use_wandb else {}, **options)

    def evaluate(self, eval_dataloader: Iterable[Any], steps: int = 0) -> dict[str, float]:
        """Evaluate the policy as it is, and print the published metrics.

        Raises:
            UsageError: if there is no batch.

        Args:
            eval_dataloader: batches in the layout of the training batches.
            steps: optimizer steps so far, for the log.

        Returns:
            Our metrics, and the published ones with the prefix `eval/`.
        """
        if not given(eval_dataloader):
            raise UsageError("eval_dataloader is required, with a batch to evaluate")
        metrics = {**self.door.evaluate(eval_dataloader), "eval/global_step": steps}
        self._say(f"evaluation at step {steps}: " + ", ".join(
            f"{name.removeprefix('eval/')} {metrics[name]:.4f}" for name, ours in self.names["eval"].items()
            if name in metrics and ours != "step"))
        return metrics

    def save_logs_and_checkpoints(self, args: Any, global_step: int, step_bar: Any = None,
                                  logs_dict: Mapping[str, float] | None = None,
                                  client_states: Mapping[str, Any] | None = None) -> None:
        """What follows an update, for training loops of your own: print, evaluate and save where it is due. `fit` does
        it by its own means.

        Args:
            args: as for `fit`.
            global_step: optimizer steps so far.
            step_bar: ignored.
            logs_dict: figures to print.
            client_states: ignored; only a run of `fit` can be resumed.
        """
        args = as_namespace(args)
        if logs_dict and global_step % _logging_steps(args) == 0:
            self._say(f"step {global_step}: " + ", ".join(f"{name} {value:.4g}" for name, value in logs_dict.items()))
        every, save = (interval(getattr(args, f"{what}_steps", -1), f"args.{what}_steps") for what in ("eval", "save"))
        if every and global_step % int(every) == 0 and given(self.eval_dataloader):
            self.evaluate(self.eval_dataloader, global_step)
        if save and global_step % int(save) == 0:
            target = self._place(args) / f"global_step{global_step}_hf"
            self.door.model.save_pretrained(target)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(target)

    def _place(self, args: Any) -> Path:
        """Where checkpoints go."""
        own = self.door.options.get("output")
        return Path(own or getattr(args, "ckpt_path", None) or f"./ckpt/checkpoints_{self.method}")

    def _say(self, text: str) -> None:
        self.door.say(text)

    def _accumulation(self) -> int:
        """Micro-batches of an update."""
        given = getattr(self.strategy, "accumulated_gradient", None)
        if given is None:
            total, micro = (getattr(self.args, name, None) for name in ("train_batch_size", "micro_train_batch_size"))
            given = total // (micro * processes()) if total and micro else 1
        return max(1, int(given))

    @staticmethod
    def _steps_done(args: Any, consumed: int) -> int:
        """Optimizer steps in which some rows were trained on."""
        if not consumed:
            return 0
        rows = getattr(args, "train_batch_size", None)
        if not rows:
            raise UsageError(f"consumed_samples {consumed} requires args.train_batch_size, the rows of an update")
        return math.floor(consumed / rows)


def _is_overridden(kind: type, name: str) -> bool:
    """Whether a class of the user has a method of its own."""
    owner = next((one for one in kind.__mro__ if name in vars(one)), None)
    return owner is not None and not owner.__module__.startswith("tropism.")


def args_of(strategy: Any) -> Any:
    """The arguments of a strategy.

    Raises:
        UsageError: if it has none.
    """
    args = getattr(strategy, "args", None)
    if args is None:
        raise UsageError(f"strategy is a {type(strategy).__name__} without args. Pass OpenRLHF's strategy, or an "
                         "object with its args and accumulated_gradient.")
    return as_namespace(args)


def _logging_steps(args: Any) -> int:
    """Steps between logs; infinity logs the last step only."""
    number = whole(value := getattr(args, "logging_steps", 1), "args.logging_steps")
    return max(1, number) if number is not None else 1 if value is None else sys.maxsize


def as_namespace(args: Any) -> Any:
    """Arguments whose names are attributes; a mapping becomes such an object."""
    return SimpleNamespace(**args) if isinstance(args, Mapping) else args
