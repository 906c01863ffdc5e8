"""What nemo_aligner_kto.py uses of NeMo, NeMo-Aligner and OmegaConf, in small: the script runs without them."""

import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

LOG = Path(__file__).parents[1] / "data" / "feedback.jsonl"


class DictConfig(dict[str, Any]):
    """A configuration whose keys are attributes too."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__({key: DictConfig(value) if isinstance(value, dict) else value
                          for key, value in content.items()})

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


class MegatronGPTKTOModel(torch.nn.Module):
    """A wrapper around a language model, with its configuration and tokenizer."""

    def __init__(self, name: str, cfg: DictConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.model = AutoModelForCausalLM.from_pretrained(name)
        self.tokenizer = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(name))
        self.tokenizer.eos_id = self.tokenizer.tokenizer.eos_token_id


class KTODataset(list[dict[str, Any]]):
    """Rows of token ids as NeMo-Aligner's dataset gives them."""

    def __init__(self, tokenizer: Any, share: slice, seq_length: int) -> None:
        super().__init__()
        for line in LOG.read_text(encoding="utf-8").splitlines()[share]:
            row = json.loads(line)
            prompt = torch.tensor(tokenizer.encode(f"Human:\n{row['question']}\nAssistant:\n"))
            response = torch.tensor([*tokenizer.encode(row["answer"], add_special_tokens=False),
                                     tokenizer.eos_token_id])
            labels = torch.cat((torch.full_like(prompt, -100), response))
            if len(labels) > seq_length:
                labels = torch.full_like(labels, -100)
            self.append({"prompt_tokens": prompt, "response_tokens": response, "sample_length": len(labels),
                         "sample_labels": labels, "preference": int(row["thumb"] == "up")})


class RandomBatchSampler:
    """Global batches in another order in each epoch; it counts the samples that were consumed."""

    drop_last = True

    def __init__(self, total_samples: int, consumed_samples: int, global_batch_size: int, seed: int = 0) -> None:
        self.total_samples, self.consumed_samples, self.seed = total_samples, consumed_samples, seed
        self.global_batch_size = global_batch_size

    def __len__(self) -> int:
        return self.total_samples // self.global_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        active = len(self) * self.global_batch_size
        epoch, done = divmod(self.consumed_samples, active)
        order = torch.randperm(self.total_samples, generator=torch.Generator().manual_seed(self.seed + epoch)).tolist()
        for start in range(done, active, self.global_batch_size):
            self.consumed_samples += self.global_batch_size
            yield order[start : start + self.global_batch_size]


def build_dataloader(cfg: DictConfig, dataset: KTODataset, consumed_samples: int, gbs: int,
                     collate_fn: Callable[..., Any]) -> DataLoader:
    sampler = RandomBatchSampler(len(dataset), consumed_samples, gbs, cfg.model.seed)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate_fn)


class CustomLoggerWrapper:
    """Prints what it is given."""

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        print("hyperparameters:", ", ".join(sorted(params)))

    def log_metrics(self, metrics: dict[str, float], step: int | None = None, prefix: str = "") -> None:
        print(f"step {step}:", ", ".join(f"{prefix}{key} {value:.4g}" for key, value in metrics.items()))

    def finalize(self) -> None:
        print("finished")


class CheckpointCallback:
    """Saves the model where the experiment manager would."""

    def __init__(self, directory: str, model: MegatronGPTKTOModel) -> None:
        self.directory, self.model = Path(directory), model

    def custom_save(self, monitor_candidates: dict[str, torch.Tensor], is_train_end: bool = False) -> None:
        step = int(monitor_candidates["step"])
        self.model.model.save_pretrained(self.directory / (f"step={step}" + ("-last" if is_train_end else "")))


class Timer:
    """Counts the time of a run against "DD:HH:MM:SS"; None is unlimited."""

    def __init__(self, duration: str | None) -> None:
        days, hours, minutes, seconds = map(int, (duration or "0:0:0:0").split(":"))
        limit = timedelta(days, seconds, minutes=minutes, hours=hours)
        self.limit, self.began = limit.total_seconds() if duration else float("inf"), 0.0

    def start_time(self) -> None:
        self.began = time.monotonic()

    def is_finished(self) -> bool:
        return time.monotonic() - self.began > self.limit
