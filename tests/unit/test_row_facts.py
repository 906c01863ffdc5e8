"""Rows as columns: by hand, and the same wherever they come from."""

import hashlib

import numpy as np
import pytest

from helpers import chat, row
from tropism.data.row_facts import RowFacts, evenly_spaced, facts_of, first_of, groups, key_number, prompt_hash
from tropism.data.rows import EncodedRow
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits
from tropism.data.tree import Completion, token_ids


def noted(prompt: list[int], mask: list[bool], *notes: str, desirable: bool | None = None) -> EncodedRow:
    completion = Completion(token_ids(list(range(len(mask)))), np.array(mask))
    return EncodedRow("r", "r", token_ids(prompt), (completion,), desirable, b"k" * 16, frozenset(notes))


def test_columns() -> None:
    """Lengths, supervised lengths, labels and notes of three rows; nothing where there is no second completion."""
    rows = [noted([1, 2], [False, True, True], "prompt_cut", "eos_added", desirable=True),
            noted([1], [True], desirable=False), noted([1, 2], [True], "prompt_cut")]
    facts = facts_of(rows)
    assert facts.prompt_tokens.tolist() == [2, 1, 2]
    assert facts.tokens.tolist() == [[3, 0], [1, 0], [1, 0]]
    assert facts.learned.tolist() == [[2, 0], [1, 0], [1, 0]]
    assert facts.completion.tolist() == [[key_number(r.completions[0].key), 0] for r in rows]
    assert facts.desirable.tolist() == [1, 0, -1]
    assert facts.prompt[0] == facts.prompt[2] == prompt_hash(rows[0].prompt_ids) != facts.prompt[1]
    assert {note: found.tolist() for note, found in facts.notes.items()} == {"prompt_cut": [0, 2], "eos_added": [0]}
    assert (facts.classes, facts.labeled, len(facts)) == ((1, 1), True, 3)
    assert (facts.flat_tokens, facts.repeated_tokens) == (5 + 2 + 3, 2)


def test_pairs() -> None:
    """The first two completions count, whatever else a method has put beside them."""
    pair = row([1, 2, 3], [4, 5], [6])
    for facts in (facts_of([pair]), facts_of([pair.with_shared_lengths()])):
        assert facts.tokens.tolist() == [[2, 1]]
        assert facts.sides.tolist() == [2]
        assert (facts.flat_tokens, facts.repeated_tokens, facts.labeled) == (9, 3, False)


def test_hashes() -> None:
    """The definitions, which files keep: first 8 bytes, little end first, of blake2b with 16 bytes."""
    ids = token_ids([1, 2, 70000])
    assert prompt_hash(ids) == int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=16).digest()[:8], "little")
    assert key_number(bytes([1, 2, 0, 0, 0, 0, 0, 0, 9])) == 513
    key = hashlib.blake2b(b"x", digest_size=16).digest()
    assert np.frombuffer(key, np.uint64)[0] == key_number(key)


def test_split_keys(fixture_tokenizer) -> None:
    """Digests of a first message; or, of rows that came as ids, the prompt, of which the beginning is not enough."""
    renderer = Renderer(fixture_tokenizer, Limits(1000))
    rows = [renderer.encode(chat(*turns)) for turns in (("Hi",), ("Hi", "Hello", "Bye"), ("Ho",))]
    known = [r for r in rows if isinstance(r, EncodedRow)]
    assert facts_of(known).split.tolist() == [key_number(r.split_key) for r in known]
    assert len(set(facts_of(known).split.tolist())) == 2
    for length in (3, 4, 5):  # four ids are as long as a digest
        same_beginning = [row([7] * (length - 1) + [n], [1]) for n in range(3)]
        assert len(set(facts_of(same_beginning).split.tolist())) == 3


def test_rows_may_bring_their_facts() -> None:
    class Rows(list[EncodedRow]):
        facts = facts_of([row([1], [2])])

    assert facts_of(Rows()) is Rows.facts


def test_columns_are_of_one_length_and_wide() -> None:
    """Narrow columns, as files hold them, would overflow in products."""
    good = {"prompt": [1, 2], "prompt_tokens": np.array([60_000, 1], np.int32), "completion": [[1, 2], [3, 4]],
            "tokens": np.array([[60_000, 9]] * 2, np.uint16), "learned": [[1, 1]] * 2, "desirable": [-1, -1],
            "split": [1, 2], "notes": {}}
    assert (RowFacts(**good).prompt_tokens * RowFacts(**good).tokens[:, 0]).tolist() == [3_600_000_000, 60_000]
    with pytest.raises(ValueError, match=r"tokens has shape \(2,\), not \(2, 2\)"):
        RowFacts(**good | {"tokens": [1, 2]})


def test_no_rows() -> None:
    facts = facts_of([])
    assert (len(facts), facts.flat_tokens, facts.repeated_tokens, facts.labeled) == (0, 0, 0, False)


def test_groups() -> None:
    """Numbers without a gap, equal where all columns are; exact for any values."""
    big = np.array([2**64 - 1, 0, 2**64 - 1, 0, 2**64 - 1], dtype=np.uint64)
    small = np.array([-1, -1, -1, 1, 1], dtype=np.int8)
    numbers = groups(big, small)
    assert sorted(set(numbers.tolist())) == [0, 1, 2, 3]
    assert numbers[0] == numbers[2]
    assert sorted(first_of(numbers).tolist()) == [0, 1, 3, 4]
    assert groups(np.zeros(3), big[:3]).tolist() == [1, 0, 1]


def test_spread() -> None:
    assert evenly_spaced(3, 5).tolist() == [0, 1, 2]
    assert evenly_spaced(10, 4).tolist() == [0, 2, 5, 7]
    assert evenly_spaced(0, 4).tolist() == []
