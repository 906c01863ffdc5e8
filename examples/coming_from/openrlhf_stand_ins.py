"""What the openrlhf_*.py scripts use of OpenRLHF besides its trainers, in small: the scripts run without it."""

import json
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

LOG = Path(__file__).parents[1] / "data" / "feedback.jsonl"


class Actor(torch.nn.Module):
    """A wrapper around a language model."""

    def __init__(self, pretrain: str) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(pretrain)

    def forward(self, sequences: torch.Tensor, attention_mask: torch.Tensor, return_output: bool = False) -> Any:
        return self.model(sequences, attention_mask=attention_mask)


class Strategy:
    """DeepSpeed's place: it holds the arguments, and makes optimizers and dataloaders."""

    def __init__(self, args: Namespace) -> None:
        self.args, self.max_norm = args, args.max_norm
        self.accumulated_gradient = args.train_batch_size // args.micro_train_batch_size

    def setup_distributed(self) -> None:
        pass

    def create_optimizer(self, model: Actor, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **options)

    def setup_dataloader(self, dataset: Dataset, batch_size: int, pin_memory: bool = False, shuffle: bool = True,
                         collate_fn: Callable | None = None, drop_last: bool = True) -> DataLoader:
        sampler: DistributedSampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=shuffle,
                                                         seed=self.args.seed, drop_last=drop_last)
        return DataLoader(dataset, batch_size, sampler=sampler, drop_last=drop_last, collate_fn=collate_fn)

    def prepare(self, *models: Any) -> list[Any]:
        return list(models)

    def print(self, *message: Any) -> None:
        print(*message)

    def is_rank_0(self) -> bool:
        return True

    def save_model(self, model: Actor, tokenizer: Any, output_dir: str) -> None:
        model.model.save_pretrained(output_dir)
        tokenizer.save_pretrained(output_dir)


def get_strategy(args: Namespace) -> Strategy:
    return Strategy(args)


def get_tokenizer(pretrain: str, model: Any, padding_side: str = "left", strategy: Any = None,
                  use_fast: bool = True) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(pretrain, use_fast=use_fast)
    tokenizer.padding_side = padding_side
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def labeled(share: slice = slice(None)) -> list[dict[str, Any]]:
    """Rows with a question, an answer, and a thumb: up or down."""
    return [json.loads(line) for line in LOG.read_text(encoding="utf-8").splitlines()][share]


def pairs(share: slice = slice(None)) -> list[dict[str, Any]]:
    """Rows with a prompt, and a chosen and a rejected answer."""
    answers: dict[str, dict[str, str]] = {}
    for row in labeled():
        answers.setdefault(row["question"], {})[row["thumb"]] = row["answer"]
    return [{"prompt": question, "chosen": both["up"], "rejected": both["down"]}
            for question, both in answers.items() if len(both) == 2][share]


class _Rows(Dataset):
    """Rows of token ids."""

    def __init__(self, rows: list[dict[str, Any]], tokenizer: Any) -> None:
        self.rows, self.tokenizer = rows, tokenizer

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        return self.rows[number]

    def ids(self, prompt: str, response: str = "", eos: bool = True) -> list[int]:
        ids = self.tokenizer.encode(f"User: {prompt}\nAssistant: {response}", add_special_tokens=False)
        return [*ids, self.tokenizer.eos_token_id] if eos else ids

    def padded(self, texts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = pad_sequence([torch.tensor(text) for text in texts], True, self.tokenizer.pad_token_id)
        return ids, pad_sequence([torch.ones(len(text), dtype=torch.long) for text in texts], True)


class UnpairedPreferenceDataset(_Rows):
    """Labeled responses; the second half of a batch pairs each prompt with the next row's response."""

    def collate_fn(self, rows: list[dict[str, Any]]) -> tuple:
        others = rows[1:] + rows[:1]
        pairs = [*zip(rows, rows, strict=True), *zip(rows, others, strict=True)]
        ids, mask = self.padded([self.ids(row["question"], other["answer"]) for row, other in pairs])
        labels = [int(row["thumb"] == "up") for row in rows] + [-1] * len(rows)
        return (ids.unsqueeze(1), mask.unsqueeze(1), torch.tensor(labels),
                [len(self.ids(row["question"], eos=False)) for row, _ in pairs])


class RewardDataset(_Rows):
    """Pairs of responses."""

    def collate_fn(self, rows: list[dict[str, Any]]) -> tuple:
        sides = [part.unsqueeze(1) for name in ("chosen", "rejected")
                 for part in self.padded([self.ids(row["prompt"], row[name]) for row in rows])]
        return (*sides, [len(self.ids(row["prompt"], eos=False)) for row in rows])


class SFTDataset(_Rows):
    """Responses; the loss mask is at the token before the one that counts."""

    def collate_fn(self, rows: list[dict[str, Any]]) -> tuple:
        texts = [self.ids(row["prompt"], row["chosen"]) for row in rows]
        ids, mask = self.padded(texts)
        loss_mask = torch.zeros(ids.shape)
        for row, text in enumerate(texts):
            loss_mask[row, len(self.ids(rows[row]["prompt"], eos=False)) - 1 : len(text) - 1] = 1
        return ids, mask, loss_mask


def parser(description: str, method: str) -> ArgumentParser:
    """The arguments that OpenRLHF's scripts share, as far as they are used here."""
    found = ArgumentParser(description=description)
    add = found.add_argument
    add("pretrain", metavar="MODEL", help="directory or hub id")
    add("--save_path", default="./ckpt", help="directory for the model")
    add("--ckpt_path", default=f"./ckpt/checkpoints_{method}", help="directory for checkpoints")
    for name, value in (("save_steps", -1), ("logging_steps", 1), ("eval_steps", -1), ("max_ckpt_num", 3),
                        ("micro_train_batch_size", 2), ("train_batch_size", 4), ("seed", 42), ("max_epochs", 2)):
        add(f"--{name}", type=int, default=value, help=f"default: {value}")
    for name, value in (("max_ckpt_mem", 1e8), ("max_norm", 1.0), ("learning_rate", 5e-5), ("lr_warmup_ratio", 0.03),
                        ("l2", 0.0), ("aux_loss_coef", 0.0)):
        add(f"--{name}", type=float, default=value, help=f"default: {value:g}")
    add("--load_checkpoint", action="store_true", help="resume the run at ckpt_path")
    for name in ("use_wandb", "wandb_org", "wandb_group", "use_tensorboard"):
        add(f"--{name}", help="for the tracker")
    add("--wandb_project", default=f"openrlhf_train_{method}", help="for the tracker")
    add("--wandb_run_name", default=f"{method}_run", help="for the tracker")
    return found


def updates(dataset: Dataset, args: Namespace) -> tuple[int, int]:
    """Updates per epoch and in all."""
    per_epoch = len(dataset) // args.train_batch_size  # type: ignore[arg-type]
    return per_epoch, math.ceil(args.max_epochs * per_epoch)
