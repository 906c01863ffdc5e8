"""Small builders that tests share, and the reading back of what was encoded."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from tropism.data.rows import EncodedRow, Message, RawRow, Row
from tropism.data.tokenization.render import Renderer
from tropism.data.tree import Completion, PromptTree, token_ids

CASES = Path(__file__).parent / "cases"

CONTROL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>", "unk_token": "<|unk|>"}

CHATML = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


@cache
def _yaml(name: str) -> Any:
    return yaml.safe_load((CASES / name).read_text(encoding="utf-8"))


def fixture_parts() -> dict[str, Any]:
    """`00-fixture.yaml`."""
    return _yaml("00-fixture.yaml")


def expected(case: str) -> dict[str, Any]:
    """What `EXPECTED.yaml` says of a case."""
    return _yaml("EXPECTED.yaml")[case]


def case_yaml(name: str) -> dict[str, Any]:
    """The content of a YAML case."""
    return _yaml(name)


def case_rows(name: str) -> list[RawRow]:
    """The rows of a JSONL case, with their places."""
    lines = (CASES / name).read_text(encoding="utf-8").splitlines()
    return [RawRow(f"{name}:{number}", json.loads(line)) for number, line in enumerate(lines, start=1)]


def build_tokenizer(*, auto_bos: bool = False, **changes: Any) -> PreTrainedTokenizerFast:
    """A fresh copy of the fixture tokenizer; `changes` replace its special tokens or chat template.

    Args:
        auto_bos: put the BOS in front of any text, as many tokenizers do.
        changes: keyword arguments of the tokenizer; a None leaves one out.
    """
    backend = Tokenizer.from_file(str(CASES / "00-fixture-tokenizer.json"))
    if auto_bos:
        backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    settings = {**CONTROL, "chat_template": fixture_parts()["chat_template"], **changes}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, **{key: value for key, value in settings.items() if value is not None})


def row(
    prompt: Sequence[int], *completions: Sequence[int], desirable: bool | None = None, id: str = "r",
) -> EncodedRow:
    """A row of token ids, every completion token supervised."""
    ids = token_ids(list(prompt))
    return EncodedRow(id, id, ids, tuple(Completion.supervised(list(c)) for c in completions), desirable,
                      ids.tobytes())


def tree(prompt: Sequence[int], *completions: Sequence[int] | Completion) -> PromptTree:
    """A tree of token ids."""
    return PromptTree(token_ids(list(prompt)), tuple(
        c if isinstance(c, Completion) else Completion.supervised(list(c)) for c in completions))


# --- rows of text and messages ----------------------------------------------------------------------------------------


def said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def chat(*turns: str, answers: tuple[str, ...] = ("fine",), system: str | None = None, **extra: Any) -> Row:
    """A row of messages: user and assistant take turns, then each of the answers."""
    prompt = [said(("user", "assistant")[n % 2], text) for n, text in enumerate(turns)]
    if system is not None:
        prompt.insert(0, said("system", system))
    return Row("r", "f:1", tuple(prompt), tuple((said("assistant", a),) for a in answers), **extra)


def encoded(renderer: Renderer, row: Row) -> EncodedRow:
    found = renderer.encode(row)
    assert isinstance(found, EncodedRow), found
    return found


def supervised_text(tokenizer: Any, row: EncodedRow, side: int = 0) -> str:
    """M1: what a person is shown as the supervised text of a completion: by decoding behind the prompt."""
    completion = row.completions[side]
    prompt = row.prompt_ids.tolist()
    before = tokenizer.decode(prompt)
    whole = tokenizer.decode(prompt + completion.ids.tolist())
    assert whole.startswith(before)
    assert completion.loss_mask.all()
    return whole[len(before) :]


def generation_ids(tokenizer: Any, row: Row) -> list[int]:
    return tokenizer.apply_chat_template(
        list(row.prompt), tools=list(row.tools) if row.tools else None, add_generation_prompt=True)["input_ids"]


# --- tokenizers of the kinds that models have, with tiny vocabularies -----------------------------------------------

_TEXT = "Name a root vegetable. Parsnip, the red kite is cold; say two words: <end> turn of the hall lamp to 20.\n" * 4
_SPECIAL = ["<|bos|>", "<|eos|>", "<|pad|>", "<|turn|>", "<|end|>", "<|unk|>"]


def _sentencepiece_like() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a BPE with byte fallback, as converted SentencePiece models have them."""
    pieces = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(set(_TEXT.replace(" ", "▁")) | {"|"})]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "r"), ("e", "d"), ("▁r", "ed"), ("▁", "▁")]
    pieces += [a + b for a, b in merges]
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}, merges


def _with_control_merges(vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Merges that build `<|end|>` from its characters, as converters have been known to write them."""
    merges, left = [], "<"
    for letter in "|end|>":
        merges.append((left, letter))
        left += letter
        vocab.setdefault(left, len(vocab))
    return merges


EXACT_KINDS = ["byte level", "metaspace", "prepend", "unigram", "control merges", "ignore merges", "space runs"]
"""Kinds that read back any text exactly; word tokenizers do not."""


def tokenizer_kinds() -> dict[str, Tokenizer]:
    """A backend of each kind, by name."""
    byte_level = Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    byte_level.train_from_iterator([_TEXT], trainers.BpeTrainer(
        vocab_size=340, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False))

    vocab, merges = _sentencepiece_like()
    metaspace = Tokenizer(models.BPE(vocab, merges, unk_token="<|unk|>", byte_fallback=True, fuse_unk=True))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    metaspace.decoder = decoders.Sequence(strip)
    prepend = Tokenizer(models.BPE(vocab, merges, unk_token="<|unk|>", byte_fallback=True, fuse_unk=True))
    prepend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    prepend.decoder = decoders.Sequence(strip)

    unigram = Tokenizer(models.Unigram(
        [(piece, 0.0 if piece in _SPECIAL else -3.0 - len(piece) / 10) for piece in vocab], unk_id=5))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    unigram.decoder = decoders.Metaspace(prepend_scheme="first")

    characters = json.loads((CASES / "00-fixture-tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    control_merges = _with_control_merges(characters)
    merged = Tokenizer(models.BPE(characters, control_merges, unk_token="<|unk|>"))
    whole = Tokenizer(models.BPE(characters, [], unk_token="<|unk|>", ignore_merges=True))
    merged.decoder = whole.decoder = decoders.Fuse()

    spaces = Tokenizer.from_str(byte_level.to_str())
    spaces.add_tokens([AddedToken(" " * count, normalized=True) for count in range(2, 9)])

    words = {word: number for number, word in enumerate([*_SPECIAL, *sorted(set(_TEXT.split())), "user", "assistant"])}
    word_level = Tokenizer(models.WordLevel(words, unk_token="<|unk|>"))
    word_level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    word_piece = Tokenizer(models.WordPiece(
        {**words, **{f"##{letter}": len(words) + n for n, letter in enumerate("abcdefghijklmnopqrstuvwxyz<|>")}},
        unk_token="<|unk|>"))
    word_piece.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    word_piece.decoder = decoders.WordPiece(cleanup=False)
    return {"byte level": byte_level, "metaspace": metaspace, "prepend": prepend, "unigram": unigram,
            "control merges": merged, "ignore merges": whole, "space runs": spaces,
            "word level": word_level, "word piece": word_piece}


def kind_of_tokenizer(kind: str, template: str = CHATML, **changes: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of that kind with the control tokens of the fixture."""
    backend = tokenizer_kinds()[kind]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _SPECIAL])
    settings = {**CONTROL, "chat_template": template, **changes}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{k: v for k, v in settings.items() if v is not None})
