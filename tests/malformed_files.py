"""Files as they should not be: records with odd values, texts with odd bytes, and both at once. Seeded."""

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

from format_examples import KINDS, MADE, content, packed

VIEWS = ("unpaired", "paired", "single")
DEEP = 300  # nested calls of the tokenizer's template engine end at fewer than Python's own limit


def _nested(depth: int, inside: Any = "x") -> Any:
    for number in range(depth):
        inside = [inside] if number % 2 else {"a": inside}
    return inside


ODD: list[Any] = [
    None, True, False, 0, 1, 2, -1, 0.5, 1.0, 10**300, 10**4000, float("nan"), float("inf"), "", " ", "\xa0", "\u200b",
    "\x00", "\ud800", "half \udfff", "true", "False", "1", "0", "good", "NaN", "null", "<|end|>", "<|eos|>", "\r\n",
    "\u2028", "x" * 3000, [], {}, [[]], [None], [{}], {"role": "user"}, {"a": {"b": None}}, [1, "a"], _nested(DEEP),
    _nested(20), {"role": "assistant", "content": "a"}, [{"role": "user", "content": None}],
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": ["a"]}], [{"role": 5, "content": "a"}],
    [{"role": "user", "content": [{"type": "text", "text": None}]}], [{"role": "user", "content": [{"type": "image"}]}],
    [{"role": "\ud800", "content": "q"}, {"role": "assistant", "content": "a"}],
    [{"role": "user", "content": "q", "tool_calls": 5}, {"role": "assistant", "content": "a", "tool_calls": {"a": 1}}],
    [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}],
    [{"from": "human", "value": "q"}, {"from": "martian", "value": "a"}], [{"from": 5, "value": "q"}],
    [{"from": "human", "value": ["q"]}, {"from": "gpt", "value": {"a": 1}}],
    [{"from": "function_call", "value": "{"}, {"from": "gpt", "value": "a"}],
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}],
    [{"name": "f", "d": "\ud800"}], ['{"name": "f"}'], "[{]", '[{"name": 5}]', "Human: q\n\nAssistant: a", "2024-01-01",
    [{"response": "a", "overall_score": 10**400}], [{"response": 5, "overall_score": 1}], [["x"]], [["q", "a"]],
    {"text": "p", "role": "prompter", "replies": 5}, {"text": 5, "replies": []},
    {"text": "p", "replies": [{"text": "a", "role": "assistant", "rank": "best"}] * 2}, "\ufeff", "=1+1",
    "[{'role': 'u'}]",
]
EXTRA = ("id", "tools", "system", "history", "input", "label", "kto_tag", "source", "prompt", "messages", "score",
         "instruction", "chosen", "\ud800", "", "a\nb")
TEXTS = [b"", b"\n", b"\r\n\r\n", b"null", b"[]", b"{}", b"[[]]", b"0", b'"', b"\x00" * 40, b"\xff\xfe",
         b"\xef\xbb\xbf",
         b"[" * 100_000, b'{"a":' * 50_000, b"[" * 950 + b"]" * 950, b'{"prompt": "' + b"x" * 1_000_000 + b'"}',
         b'{"a": ' + b"9" * 5000 + b"}", b'{"data": 5}', b'{"data": [5]}', b"PAR1", b"ARROW1\x00\x00", b"\x1f\x8b\x08",
         b"\x28\xb5\x2f\xfd", b'a,b\n"1', b"a\n1,2", b"prompt,completion\n" + b'"' * 99, b"prompt\tcompletion\n\t\t\t"]


def _odd_records(generator: random.Random, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One to three odd values in places of one record, some at any depth; a key more or less."""
    copies = [json.loads(json.dumps(record)) for record in records]
    for _ in range(generator.randint(1, 3)):
        record = generator.choice(copies)
        where: Any = record
        while True:
            keys = list(where) if isinstance(where, dict) else range(len(where))
            key = generator.choice(list(keys)) if keys else None
            below = where[key] if key is not None else None
            if isinstance(below, dict | list) and below and generator.random() < 0.6:
                where = below
                continue
            break
        choice = generator.random()
        if choice < 0.15 and key is not None:
            del where[key]
        elif choice < 0.3:
            record[generator.choice(EXTRA)] = copy.deepcopy(generator.choice(ODD))
        elif key is not None:
            where[key] = copy.deepcopy(generator.choice(ODD))
    return copies


def _damaged(generator: random.Random, plain: bytes) -> bytes:
    """Bytes cut, doubled, overwritten, moved into another encoding."""
    place = generator.randrange(len(plain) + 1)
    other = generator.randrange(len(plain) + 1)
    low, high = min(place, other), max(place, other)
    byte = bytes([generator.randrange(256)])
    text = plain.decode("utf-8", "replace")
    return generator.choice([
        lambda: plain[:place], lambda: plain[place:], lambda: plain[:low] + plain[high:],
        lambda: plain[:high] + plain[low:], lambda: plain[:place] + byte * generator.randint(1, 4) + plain[place + 1 :],
        lambda: plain[:place] + generator.choice([b"\x00", b"\r", b'"', b"\\", b"\xe9", b"\n", b"\xed\xa0\x80", b"NaN",
                                                  b",", b"}", b"[", b"'"]) + plain[place:],
        lambda: text.replace("a", "\xe9").encode("latin-1", "replace"), lambda: text.encode("utf-16"),
        lambda: text.encode("utf-16-be"), lambda: text.encode("utf-32"), lambda: b"\xef\xbb\xbf" + plain,
        lambda: plain.replace(b"\n", b"\r"), lambda: plain.replace(b"\n", b"\r\n"), lambda: plain.replace(b"\n", b""),
        lambda: plain.replace(b'"', b"'"), lambda: plain.replace(b'": ', b'": Infinity, "x": ', 1),
        lambda: re.sub(rb'"(\w+)": ', rb'"\1": null, "\1": ', plain, count=1),
        lambda: plain.replace(b"true", b"tru", 1), lambda: generator.choice(TEXTS),
        lambda: plain + generator.choice(TEXTS),
    ])()


def malformed(number: int) -> tuple[str, bytes]:
    """The file of a number: its name and its bytes."""
    generator = random.Random(number)
    made = MADE[generator.choice(list(MADE))]
    kind = generator.choice(KINDS)
    records = made.records[: generator.randint(1, 4)]
    if generator.random() < 0.65:
        records = _odd_records(generator, records)
    if kind in ("csv", "tsv"):
        records = [{key: records[0].get(key, "x") if key not in record else record[key] for key in records[0]}
                   for record in records] if records[0] else [{"a": 1}]
    if kind in ("parquet", "arrow"):
        try:
            plain = content(kind, records)
        except Exception:  # columns that cannot be united
            kind, plain = "jsonl", content("jsonl", records)
    else:
        plain = content(kind.split(".")[0], records)
    if generator.random() < 0.55:
        plain = _damaged(generator, plain)
    whole = packed(kind, plain)
    if "." in kind and generator.random() < 0.3:
        whole = _damaged(generator, whole)
    if generator.random() < 0.06:
        kind = generator.choice([*KINDS, "feather", "JSONL", "ndjson", "txt", "gz", "csv.gz", "parquet.zst",
                                 "arrow.gz"])
    return f"f{number}.{kind}", whole


_WHOLE_FILE = re.compile("no rows|no row has the columns|no row is left|match several formats|cannot be read|"
                         "unsupported file type|is a rating, not a label|not readable as (Parquet|Arrow)|"
                         "expected an array of rows|no effect|cannot decompress|not UTF-8$")


def well_said(message: str, path: Path) -> bool:
    """Whether an error about a file names it, with a line or row unless it is about the file as a whole."""
    return path.name in message and (
        re.search(re.escape(path.name) + r":(row )?\d+: ", message) is not None
        or _WHOLE_FILE.search(message) is not None) and len(message) < 3000
