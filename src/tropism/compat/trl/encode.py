"""Rows as token ids, the way TRL encodes them: prompt and completion jointly, cut at the end."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, islice, takewhile
from typing import Any

import numpy as np
from jinja2 import TemplateError

from tropism.data.rows import EncodedRow
from tropism.data.tree import Completion, token_ids
from tropism.errors import DataError, UsageError

Record = Mapping[str, Any]
_CHUNK = 1000
"""Rows that `datasets` maps at a time: pairs become labeled completions, and rows become blocks, chunk by chunk."""


@dataclass(frozen=True)
class Rules:
    """How rows of a config are encoded.

    Args:
        method: kto, dpo, sft or gkd.
        max_length: tokens of a row; longer ones are cut at the end (`gkd`: at the beginning). None cuts none.
        text_field: column of plain text.
        eos_token: at the end of plain text. Default: the tokenizer's.
        completion_only, assistant_only: which tokens `sft` supervises.
        formatting: makes plain text of a record.
    """

    method: str
    max_length: int | None
    text_field: str = "text"
    eos_token: str | None = None
    completion_only: bool | None = None
    assistant_only: bool = False
    formatting: Callable[[Any], str] | None = None


def encode(dataset: Any, tokenizer: Any, rules: Rules, name: str, most: int | None = None) -> tuple[
        list[EncodedRow], int]:
    """The rows of a dataset, and how many were dropped because their prompt leaves no room for a completion.

    Args:
        dataset: a `datasets.Dataset`, or any iterable of dicts.
        tokenizer: of the policy.
        name: of the argument, for errors.
        most: maximum number of records to read.

    Raises:
        UsageError: for a dict of datasets.
        DataError: for a row without the columns of the method, or that cannot be trained on. It names the row.
    """
    if isinstance(dataset, Mapping):
        raise UsageError(f"{name} holds several datasets ({', '.join(map(str, dataset))}). Pass one of them, such as "
                         f"dataset['{next(iter(dataset), 'train')}'].")
    if isinstance(dataset, str) or not isinstance(dataset, Iterable):
        raise UsageError(f"{name} must be a dataset or a list of rows, not {type(dataset).__name__}. Load it with "
                         "datasets.load_dataset.")
    records: Iterable[Any] = islice(dataset, most)
    first = next(iter(records := iter(records)), None)
    if not isinstance(first, Mapping):
        raise DataError(f"{name} has no rows" if first is None else
                        f"{name} row 1: must be a dict, not {type(first).__name__}")
    if found := [column for column in ("image", "images") if first.get(column)]:
        raise UsageError(f"{name} has a column {found[0]}, and images are not supported. Remove the column to train on "
                         "the text alone.")
    encoder = _Encoder(tokenizer, rules, first)
    numbered = enumerate(chain([first], records), start=1)
    rows: list[EncodedRow] = []
    dropped = 0
    for number, record in encoder.unpaired(numbered) if encoder.unpairs else numbered:
        place = f"{name} row {number}"
        try:
            row = encoder.row(record, place)
        except KeyError as error:
            raise DataError(f"{place}: no column {error}. {rules.method.upper()} needs {_NEEDS[rules.method]}."
                            ) from None
        except (AttributeError, TypeError, TemplateError) as error:
            raise DataError(f"{place}: a value has the wrong type: {error}. {rules.method.upper()} needs "
                            f"{_NEEDS[rules.method]}, as text or messages.") from error
        dropped += row is None
        rows += [row] if row else []
    return rows, dropped


_NEEDS = {"kto": "prompt, completion and label, or pairs with chosen and rejected",
          "dpo": "chosen and rejected, with or without prompt", "gkd": "messages",
          "sft": "text, messages, or prompt and completion"}


class _Encoder:
    """Encodes records as the first one tells: with or without prompt, text or messages.

    Args:
        tokenizer: of the policy.
        rules: of the config.
        first: record.
    """

    def __init__(self, tokenizer: Any, rules: Rules, first: Record) -> None:
        self.tokenizer, self.rules = tokenizer, rules
        self.extracts = rules.method in ("kto", "dpo") and "prompt" not in first
        self.unpairs = rules.method == "kto" and "chosen" in first and "rejected" in first
        self.of_text = rules.formatting is not None or not _is_chat(first)
        self.eos = rules.eos_token or tokenizer.eos_token or ""
        self.completion_only = (rules.completion_only if rules.completion_only is not None
                                else "prompt" in first and "completion" in first)

    def unpaired(self, records: Iterable[tuple[int, Record]]) -> Iterable[tuple[int, Record]]:
        """Pairs as labeled completions: of each chunk the chosen ones first."""
        records = iter(records)
        while chunk := list(islice(records, _CHUNK)):
            for side, label in (("chosen", True), ("rejected", False)):
                for number, record in chunk:
                    if isinstance(record, Mapping) and {"chosen", "rejected"} <= record.keys():
                        full = _extracted(record) if self.extracts and None not in record.values() else record
                        yield number, {**full, "completion": full[side], "label": label}
                    else:  # `row` says what it lacks
                        yield number, record

    def row(self, record: Record, place: str) -> EncodedRow | None:
        """One row; None if it is to be dropped."""
        if self.rules.method == "gkd":
            return self._of_conversation(record, place)
        if self.rules.method == "sft":
            return self._single(record, place)
        if self.extracts and not self.unpairs:
            record = _extracted(record)
        if self.rules.method == "dpo":
            return self._row(record, (record["chosen"], record["rejected"]), place, None)
        label = record["label"]
        if label not in (0, 1):
            raise DataError(f"{place}: label {label!r} is not True or False")
        return self._row(record, (record["completion"],), place, bool(label))

    def _row(self, record: Record, completions: tuple[Any, ...], place: str, label: bool | None) -> EncodedRow | None:
        prompt, joint = self._joint(record, completions)
        border = min(_shared(prompt, ids) for ids in joint)
        if self.rules.max_length is not None and border >= self.rules.max_length:
            return None
        if not border and len({ids[0] for ids in joint if ids}) == 1:
            border = 1  # as in TRL, no token before the first one predicts it
        if not border or any(len(ids) <= border for ids in joint):
            why = ("a completion has no tokens" if border else
                   "no token predicts the first one of a completion. Give the tokenizer a BOS, or the row a prompt.")
            raise DataError(f"{place}: {why}")
        sides = tuple(Completion.supervised(ids[border : self.rules.max_length]) for ids in joint)
        ids = token_ids(joint[0][:border])
        return EncodedRow(place, place, ids, sides, label, ids.tobytes())

    def _joint(self, record: Record, completions: tuple[Any, ...]) -> tuple[list[int], list[list[int]]]:
        """Ids of the prompt, and of the prompt with each completion."""
        prompt = record["prompt"]
        if isinstance(prompt, str):
            return self._text(prompt), [self._text(prompt + self._ended(side)) for side in completions]
        more = _chat_arguments(record)
        return (self._chat(prompt, add_generation_prompt=True, **more)["input_ids"],
                [self._chat([*prompt, *side], **more)["input_ids"] for side in completions])

    def _single(self, record: Record, place: str) -> EncodedRow | None:
        """A row of SFT: text, messages, prompt and completion, or token ids with labels."""
        record = _chatml(record)
        if "input_ids" in record and self.rules.formatting is None:
            ids = [int(token) for token in record["input_ids"]]
            mask = [int(label) != -100 for label in record.get("labels", ids)]
        else:
            ids, mask = self._supervised(record)
        if self.rules.max_length is not None:
            ids, mask = ids[: self.rules.max_length], mask[: self.rules.max_length]
        if not any(mask[1:]):  # no token predicts the first one
            if self.rules.max_length is not None or not ids:
                return None
            raise DataError(f"{place}: no supervised token")
        return _from_mask(ids, mask, place)

    def _supervised(self, record: Record) -> tuple[list[int], list[bool]]:
        """Ids, and which of them are supervised."""
        if self.rules.formatting is not None:
            ids = self._text(self._ended(self.rules.formatting(record)))
            return ids, [True] * len(ids)
        if "prompt" not in record:
            if self.of_text:
                ids = self._text(self._ended(record[self.rules.text_field]))
                return ids, [True] * len(ids)
            found = self._chat(record["messages"], **self._masked, **_chat_arguments(record))
            return found["input_ids"], self._assistants(found)
        if isinstance(record["prompt"], str):
            prompt, (ids,) = self._joint(record, (record["completion"],))
            assistants = [True] * len(ids)
        else:
            more = _chat_arguments(record)
            prompt = self._chat(record["prompt"], add_generation_prompt=True, **more)["input_ids"]
            found = self._chat([*record["prompt"], *record["completion"]], **self._masked, **more)
            ids, assistants = found["input_ids"], self._assistants(found)
        border = _shared(prompt, ids) if self.completion_only else 0
        return ids, [own and index >= border for index, own in enumerate(assistants)]

    @property
    def _masked(self) -> dict[str, bool]:
        return {"return_assistant_tokens_mask": True} if self.rules.assistant_only else {}

    def _assistants(self, found: Any) -> list[bool]:
        """Which tokens an assistant wrote, if that is asked for; else all."""
        if not self.rules.assistant_only:
            return [True] * len(found["input_ids"])
        mask = [bool(bit) for bit in found["assistant_masks"]]
        if not any(mask):
            raise DataError("assistant_only_loss needs a chat template with {% generation %} marks, which this one "
                            "lacks. Set tokenizer.chat_template to one that has them, or pass prompt and completion.")
        return mask

    def _of_conversation(self, record: Record, place: str) -> EncodedRow | None:
        """A row of GKD: the last message is the completion. Long conversations lose their beginning."""
        messages = list(record["messages"])
        render = self.tokenizer.apply_chat_template
        before = render(messages[:-1], add_generation_prompt=True, tokenize=False)
        text = render(messages, add_generation_prompt=False, tokenize=False)
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = list(encoding["input_ids"])
        start = next((index for index, (begin, _) in enumerate(encoding["offset_mapping"]) if begin >= len(before)),
                     len(ids))
        cut = max(0, len(ids) - (self.rules.max_length or len(ids)))
        mask = [index >= start for index in range(len(ids))][cut:]
        return _from_mask(ids[cut:], mask, place) if any(mask[1:]) else None

    def _ended(self, text: str) -> str:
        return text if text.endswith(self.eos) else text + self.eos

    def _text(self, text: str) -> list[int]:
        return list(self.tokenizer(text=text)["input_ids"])

    def _chat(self, messages: Any, **more: Any) -> Any:
        return self.tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=True, **more)


def _from_mask(ids: list[int], mask: list[bool], place: str) -> EncodedRow:
    """A row of which the first supervised token begins the completion. What follows the last one is not computed."""
    own = np.array(mask)
    own[0] = False
    marked = np.flatnonzero(own)
    first, end = int(marked[0]), int(marked[-1]) + 1
    prompt = token_ids(ids[:first])
    loss_mask = own[first:end].copy()
    loss_mask.setflags(write=False)
    completion = Completion(token_ids(ids[first:end]), loss_mask)
    return EncodedRow(place, place, prompt, (completion,), None, prompt.tobytes())


def _is_chat(record: Record) -> bool:
    """Whether the record holds messages instead of text."""
    return any(isinstance(record.get(name), list) for name in (
        "prompt", "completion", "chosen", "rejected", "messages", "conversations"))


def _chat_arguments(record: Record) -> dict[str, Any]:
    tools = record.get("tools")
    return {"tools": json.loads(tools) if isinstance(tools, str) else tools,
            **(record.get("chat_template_kwargs") or {})}


def _chatml(record: Record) -> Record:
    """The record with `from` and `value` of its messages renamed, and `conversations` as `messages`."""
    if not isinstance(record.get("conversations"), list):
        return record
    messages = [{{"from": "role", "value": "content"}.get(key, key): value for key, value in message.items()}
                for message in record["conversations"]]
    return {**record, "messages": messages}


def _extracted(record: Record) -> Record:
    """The record with what chosen and rejected share as its prompt; of text without a space at its end."""
    chosen, rejected = record["chosen"], record["rejected"]
    shared, shorter = _shared(chosen, rejected), min(len(chosen), len(rejected))
    if shared == shorter:  # both sides keep something
        shared = max(0, shorter - 1)
    elif isinstance(chosen, str) and chosen[:shared].endswith(" "):
        shared -= 1
    return {**record, "prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}


def _shared(one: Any, other: Any) -> int:
    """Length of the common beginning of two sequences."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
