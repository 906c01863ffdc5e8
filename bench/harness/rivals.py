"""The other sides of a comparison: TRL, tuned and with its defaults, and a plain loop over a transformers model."""

import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from harness.serving import Ready, serve, state_bytes
from harness.work import BETA, LEARNING_RATE, MAX_GRAD_NORM, Job
from tropism.data.rows import EncodedRow
from tropism.data.tree import Completion, score_key
from tropism.model import load
from tropism.model.source import ModelSource
from tropism.train.memory import keep_freed_memory

Tensors = dict[str, Any]
PlainBatch = tuple[Sequence[EncodedRow], float, Tensors]


def rival(pipe: Connection, job: Job, name: str) -> None:
    """Serve one of `RIVALS`."""
    keep_freed_memory()
    torch.set_num_threads(job.cell.threads)
    side: Rival = RIVALS[name](job)
    largest = max(len(job.step(number)) for number in job.numbers)
    tried, micro = "", (side.one_batch and largest) or job.cell.micro_batch
    if not micro:
        sizes = [largest] + [2**n for n in range(4, -1, -1) if side.smallest <= 2**n < largest]
        times = side.try_sizes(sizes[::-1])
        micro = min(times, key=times.__getitem__)
        tried = "; tried " + ", ".join(f"{size}: {seconds:.2f} s" for size, seconds in times.items())
    batches = {number: side.batches(number, micro) for number in job.numbers}
    serve(pipe, Ready(f"micro-batch {micro}{tried}; {side.note}", side.logps(job.step(1)),
                      state_bytes(side.model, *side.frozen), {"micro_batch": micro}),
          list(side.model.parameters()), job.device, lambda number: side.step(batches[number]))


class Rival:
    """A side that is driven micro-batch by micro-batch.

    Args:
        job: rows and order.

    Attributes:
        model: that trains.
        frozen: models that it holds beside it.
        smallest: rows of the smallest micro-batch.
        one_batch: the whole step is one micro-batch.
    """

    smallest = 1
    one_batch = False
    note = ""
    model: Any
    optimizer: Any

    def __init__(self, job: Job) -> None:
        self.job, self.method = job, job.cell.method
        self.frozen: list[Any] = []

    def batches(self, number: int, micro: int) -> list[Any]:
        """The micro-batches of a step."""
        raise NotImplementedError

    def backward(self, batches: Sequence[Any]) -> float:
        """Gradients of a step; returns its loss."""
        raise NotImplementedError

    def step(self, batches: Sequence[Any]) -> tuple[float, float]:
        """Loss and gradient norm of one optimizer step."""
        loss = self.backward(batches)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.model.zero_grad()
        return loss, float(norm)

    def try_sizes(self, sizes: Sequence[int]) -> dict[int, float]:
        """Seconds of the first step's gradients by micro-batch, until one is much slower or memory runs out."""
        times: dict[int, float] = {}
        for size in (sizes[0], *sizes):  # the first one is the warm-up
            try:
                batches = self.batches(1, size)
                began = time.perf_counter()
                self.backward(batches)
            except torch.OutOfMemoryError:
                break
            times[size] = time.perf_counter() - began
            self.model.zero_grad()
            if times[size] > 1.5 * min(times.values()):
                break
        return times

    @torch.no_grad()
    def logps(self, rows: Sequence[EncodedRow]) -> dict[bytes, float]:
        """The model's log-prob of each completion, by its key."""
        found = {}
        for row in rows:
            for completion in row.completions:
                batch = collate([(row, completion)], self.job.device)
                with self.autocast():
                    value = completion_logps(self.model, batch)[0]
                found[score_key(row.prompt_ids, completion)] = float(value)
        return found

    def autocast(self) -> Any:
        """The precision of the comparison."""
        return torch.autocast(self.job.device.type, torch.bfloat16, enabled=self.job.cell.precision == "bf16")


def collate(pairs: Sequence[tuple[EncodedRow, Completion]], device: torch.device) -> Tensors:
    """Prompts with completions, padded on the right: `[B, T]` ids, mask, and labels with -100 where none is learned."""
    ids = [torch.tensor([*row.prompt_ids.tolist(), *completion.ids.tolist()]) for row, completion in pairs]
    labels = []
    for whole, (row, completion) in zip(ids, pairs, strict=True):
        own = whole.clone()
        own[: len(row.prompt_ids)] = -100
        own[len(row.prompt_ids):][torch.tensor(~completion.loss_mask)] = -100
        labels.append(own)
    pad = torch.nn.utils.rnn.pad_sequence
    return {"input_ids": pad(ids, batch_first=True).to(device),
            "attention_mask": pad([torch.ones_like(one) for one in ids], batch_first=True).to(device),
            "labels": pad(labels, batch_first=True, padding_value=-100).to(device)}


def completion_logps(model: Any, batch: Tensors) -> Tensor:
    """`[B]` log-probs of the labels, as most loops compute them: over the logits of all tokens."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    each = torch.log_softmax(logits.float(), -1).gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return (each * (labels != -100)).sum(-1)


def supervised(rows: Sequence[EncodedRow]) -> int:
    """Supervised tokens of some rows."""
    return sum(completion.length for row in rows for completion in row.completions)


def load_plain(path: str, device: torch.device) -> Any:
    """A model as transformers loads it, in fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)


class Plain(Rival):
    """A loop over a transformers model: padded batches, the logits of all tokens, stored reference scores."""

    note = "reference precomputed, all logits"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.model = load_plain(job.cell.model, job.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        if job.cell.teacher:
            self.frozen = [load_plain(job.cell.teacher, job.device).eval().requires_grad_(False)]

    def batches(self, number: int, micro: int) -> list[PlainBatch]:
        rows, device = self.job.step(number), self.job.device
        partners = _mismatched(rows)
        made = []
        for start in range(0, len(rows), micro):
            part = rows[start : start + micro]
            batch = collate([(row, side) for row in part for side in row.completions], device)
            tensors: Tensors = {"batch": batch}
            if self.method == "kto":
                tensors["mismatched"] = collate(list(zip(part, partners[start : start + micro], strict=True)), device)
            if self.method != "kd":
                with torch.no_grad(), self.autocast():
                    tensors |= {name + "_ref": completion_logps(self.model, tensors[name]) for name in list(tensors)}
            made.append((part, len(part) / len(rows), tensors))
        return made

    def backward(self, batches: Sequence[PlainBatch]) -> float:
        total, point = 0.0, torch.zeros(())
        tokens = sum(supervised(rows) for rows, _, _ in batches)
        if self.method == "kto":
            with torch.no_grad(), self.autocast():
                away = [completion_logps(self.model, given["mismatched"]) - given["mismatched_ref"]
                        for _, _, given in batches]
            point = torch.cat(away).mean().clamp_min(0)
        for rows, share, given in batches:
            with self.autocast():
                loss = self._distill(given, tokens) if self.method == "kd" else share * self._prefer(rows, given, point)
            loss.backward()
            total += float(loss.detach())
        return total

    def _prefer(self, rows: Sequence[EncodedRow], given: Tensors, point: Tensor) -> Tensor:
        rewards = completion_logps(self.model, given["batch"]) - given["batch_ref"]
        if self.method == "dpo":
            chosen, rejected = rewards.view(-1, 2).unbind(1)
            return -functional.logsigmoid(BETA * (chosen - rejected)).mean()
        sign = torch.tensor([1.0 if row.desirable else -1.0 for row in rows], device=rewards.device)
        return (1 - torch.sigmoid(sign * BETA * (rewards - point))).mean()

    def _distill(self, given: Tensors, tokens: int) -> Tensor:
        names = {name: given["batch"][name] for name in ("input_ids", "attention_mask")}
        learned = given["batch"]["labels"][:, 1:] != -100
        student = torch.log_softmax(self.model(**names).logits[:, :-1].float(), -1)
        with torch.no_grad():
            teacher = torch.log_softmax(self.frozen[0](**names).logits[:, :-1].float(), -1)
        each = functional.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
        return (each * learned).sum() / tokens


def _mismatched(rows: Sequence[EncodedRow]) -> list[Completion]:
    """For each row the completion of the next row with another prompt, as Tropism takes it."""
    from tropism.data.batching.pack import partners

    if len({row.prompt_key for row in rows}) < 2:
        return [row.completions[0] for row in rows]
    return [rows[index].completions[0] for index in partners([row.prompt_key for row in rows])]


class Trl(Rival):
    """A TRL trainer on our token ids, driven step by step.

    TRL's defaults are the live reference and gradient checkpointing, and the step as one batch; `tuned` precomputes
    the reference and keeps activations.
    """

    tuned = True

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.one_batch = not self.tuned
        self.smallest = 2 if self.method == "kto" else 1  # KTO takes its mismatched completions from within
        self.note = (f"reference {'precomputed' if self.tuned else 'live'}, checkpointing "
                     f"{'off' if self.tuned else 'on'}")
        config, trainer, more = self._classes()

        class Given(trainer):  # type: ignore[misc, valid-type]
            """Takes rows that are ids already."""

            def _prepare_dataset(self, dataset: Any, *rest: Any) -> Any:
                return dataset

        import datasets

        rows = job.step(1)
        settings: dict[str, Any] = {
            "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": len(rows), "report_to": "none",
            "learning_rate": LEARNING_RATE, "weight_decay": 0.0, "max_grad_norm": MAX_GRAD_NORM,
            "max_length": job.cell.max_length, "bf16": job.cell.precision == "bf16",
            "use_cpu": job.device.type == "cpu", "model_init_kwargs": {"dtype": "float32"},
            **({"lmbda": 0.0, "beta": 0.0} if self.method == "kd" else {"beta": BETA})}
        if self.tuned:
            settings |= {"gradient_checkpointing": False,
                         **({} if self.method == "kd" else {"precompute_ref_log_probs": True})}
        data = datasets.Dataset.from_list(self._examples(rows[:2]))  # the trainer wants one; batches are made below
        self.trainer = Given(model=job.cell.model, args=config(**settings), train_dataset=data,
                             processing_class=load.load_tokenizer(ModelSource.of(job.cell.model)), **more)
        if self.trainer.args.gradient_checkpointing:
            self.trainer.model.gradient_checkpointing_enable(self.trainer.args.gradient_checkpointing_kwargs)
        self.model, self.optimizer = self.trainer.accelerator.prepare(
            self.trainer.model, self.trainer.create_optimizer())
        self.trainer.optimizer = self.optimizer
        self.frozen = [held for held in (getattr(self.trainer, name, None) for name in ("ref_model", "teacher_model"))
                       if held is not None]

    def _classes(self) -> tuple[Any, Any, dict[str, Any]]:
        import trl

        if self.method == "kto":
            return trl.KTOConfig, trl.KTOTrainer, {}
        if self.method == "dpo":
            return trl.DPOConfig, trl.DPOTrainer, {}
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        return GKDConfig, GKDTrainer, {"teacher_model": load_plain(str(self.job.cell.teacher), self.job.device)}

    def _examples(self, rows: Sequence[EncodedRow]) -> list[dict[str, Any]]:
        """TRL's processed columns of some rows, from our ids."""
        ids = [[completion.ids.tolist() for completion in row.completions] for row in rows]
        prompts = [row.prompt_ids.tolist() for row in rows]
        if self.method == "dpo":
            return [{"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
                    for prompt, (chosen, rejected) in zip(prompts, ids, strict=True)]
        if self.method == "kd":
            return [{"prompt_ids": prompt, "completion_ids": own[0]} for prompt, own in zip(prompts, ids, strict=True)]
        return [{"prompt_ids": prompts[i], "completion_ids": ids[i][0], "KL_completion_ids": ids[i - 1][0],
                 "label": row.desirable} for i, row in enumerate(rows)]

    def batches(self, number: int, micro: int) -> list[Any]:
        rows, made = self.job.step(number), []
        for start in range(0, len(rows), micro):
            part = rows[start : start + micro]
            if self.method == "kd":
                made.append((collate([(row, row.completions[0]) for row in part], self.job.device),
                             float(supervised(rows))))
                continue
            batch = self.trainer._prepare_inputs(self.trainer.data_collator(self._examples(part)))
            if self.tuned:
                names = ("ref_logps", "ref_KL_logps") if self.method == "kto" else (
                    "ref_chosen_logps", "ref_rejected_logps")
                batch |= zip(names, self.trainer.compute_ref_log_probs(self.model, batch), strict=True)
            made.append((batch, len(part) / len(rows)))
        return made

    def backward(self, batches: Sequence[Any]) -> float:
        self.model.train()
        loss = 0.0
        for batch, share in batches:
            # Distillation divides by the step's tokens, the others by the number of micro-batches.
            self.trainer.current_gradient_accumulation_steps = 1 if self.method == "kd" else 1 / share
            tokens = torch.tensor(share) if self.method == "kd" else None
            loss += float(self.trainer.training_step(self.model, dict(batch), num_items_in_batch=tokens))
        return loss


class TrlDefaults(Trl):
    """TRL as it is without settings."""

    tuned = False


RIVALS = {"trl-tuned": Trl, "trl-defaults": TrlDefaults, "plain": Plain}
