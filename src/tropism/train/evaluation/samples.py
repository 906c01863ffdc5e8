"""Completions of held-out prompts, sampled before, in the course of, and after training."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tropism.data.rows import EncodedRow
from tropism.data.tree import TokenIds
from tropism.distributed.passes import rest
from tropism.distributed.shard import is_sharded
from tropism.errors import CheckpointError, count_of
from tropism.model.attention import attention, plain_implementation
from tropism.model.config import max_positions
from tropism.model.generation import generating
from tropism.model.language_model import LanguageModel, computing
from tropism.train.engine import Engine

NEW_TOKENS = 64
_TOGETHER = 16  # prompts in a batch
_SHOWN = 200  # characters of a text on the console


def sample_prompts(rows: Iterable[EncodedRow], count: int) -> list[EncodedRow]:
    """The first rows with distinct prompts."""
    distinct: dict[bytes, EncodedRow] = {}
    for row in rows:
        if len(distinct) == count:
            break
        distinct.setdefault(row.prompt_key, row)
    return list(distinct.values())


@torch.no_grad()
def answer(model: LanguageModel, tokenizer: Any, rows: Sequence[EncodedRow], stop_ids: Sequence[int],
           new_tokens: int = NEW_TOKENS) -> list[str]:
    """The model's greedy completion of each row's prompt, without the settings of its generation config."""
    answers = []
    with (attention(model.module, plain_implementation(model.module)), generating(model.module),
          computing(model.module, model.precision, model.device)):
        for start in range(0, len(rows), _TOGETHER):
            ids, mask = _pad_left([row.asked for row in rows[start : start + _TOGETHER]], stop_ids[0])
            out = model.module.generate(input_ids=ids.to(model.device), attention_mask=mask.to(model.device),
                                        do_sample=False, max_new_tokens=new_tokens, eos_token_id=list(stop_ids),
                                        synced_gpus=is_sharded(model.module),
                                        pad_token_id=stop_ids[0])
            answers += [tokenizer.decode(line, skip_special_tokens=True).strip() for line in out[:, ids.shape[1] :]]
    rest(model.module)
    return answers


def _pad_left(prompts: Sequence[TokenIds], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of unequal length as `[B, L]` ids and mask, aligned at the end, where completions start."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for line, prompt in enumerate(prompts):
        ids[line, width - len(prompt) :] = torch.from_numpy(prompt.astype("int64"))
        mask[line, width - len(prompt) :] = 1
    return ids, mask


class Sampler:
    """Completes the same prompts before and after training.

    Args:
        rows: held-out rows, or training rows if none are held out.
        held_out: whether the rows are held out.
        count: number of prompts. Prompts that leave no room for a completion are not used.
        tokenizer, stop_ids: as in `answer`.
        max_positions: the longest sequence of the model, in tokens.
    """

    def __init__(self, rows: Sequence[EncodedRow], *, held_out: bool, count: int, tokenizer: Any,
                 stop_ids: Sequence[int], max_positions: int | None) -> None:
        room = (row for row in rows if max_positions is None or len(row.asked) + NEW_TOKENS <= max_positions)
        self.rows = sample_prompts(room, count)
        self.held_out = held_out
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids

    @classmethod
    def of(cls, inputs: Any, engine: Engine) -> "Sampler":
        """The sampler of a run, by its `RunInputs`."""
        data = inputs.data
        return cls(data.evaluation or data.train, held_out=bool(data.evaluation), count=inputs.options.samples,
                   tokenizer=inputs.tokenizer, stop_ids=sorted(data.renderer.stop_ids),
                   max_positions=max_positions(engine.model.module.config))

    def ask(self, model: LanguageModel) -> list[str]:
        """Completions of the current model."""
        return answer(model, self.tokenizer, self.rows, self.stop_ids)

    def check(self, before: Sequence[str]) -> None:
        """Check that completions of an earlier process can be compared with those to come.

        Raises:
            CheckpointError: if their number is another.
        """
        if len(before) != len(self.rows):
            raise CheckpointError(f"the checkpoint has {count_of(len(before), 'completion')} sampled before training, "
                                  f"but this run samples {len(self.rows)}. Use --output NEW to start a new run.")

    def ask_together(self, engine: Engine) -> list[str]:
        """Completions of the policy: from the main process, or from all processes if the model is sharded."""
        if engine.world.mesh is not None:
            return engine.world.computed(lambda: self.ask(engine.model))
        return engine.world.on_main(lambda: self.ask(engine.model)) or []

    def lines(self, completions: Sequence[str]) -> list[dict[str, Any]]:
        """The prompts with their completions; none without completions, as on other processes than the main one."""
        return [{**self._about(row), "completion": text} for row, text in zip(self.rows, completions, strict=False)]

    def compare(self, before: Sequence[str], after: Sequence[str]) -> list[dict[str, Any]]:
        """Lines of `samples.jsonl`."""
        return [{**self._about(row), "before": old, "after": new}
                for row, old, new in zip(self.rows, before, after, strict=True)]

    def _about(self, row: EncodedRow) -> dict[str, Any]:
        return {"id": row.id, "held_out": self.held_out,
                "prompt": self.tokenizer.decode(row.asked.tolist(), skip_special_tokens=False)}


def start_of(text: str) -> str:
    """The start of a text, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN - 3]}..."
