"""One made set of records for each format, and how to write it as a file of each kind."""

import csv
import gzip
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from tropism.data.formats import View


@dataclass(frozen=True)
class Made:
    """Records of a format.

    Args:
        view: what they are.
        records: the records.
        kept: rows that they give.
        desirable: how many of these are; None without labels.
        flat: whether a CSV can hold them.
        threshold: what the format needs to be known.
    """

    view: View
    records: list[dict[str, Any]]
    kept: int
    desirable: int | None = None
    flat: bool = False
    threshold: float | None = None


def _said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _reply(text: str, role: str = "assistant", rank: int | None = None, replies: list[Any] | None = None) -> Any:
    return {"text": text, "role": role, "rank": rank, "replies": replies or []}


N = range(4)
MADE: dict[str, Made] = {
    "trl": Made("unpaired", [{"prompt": f"p{n}, ", "completion": f'a "{n}"\n', "label": n < 3} for n in N], 4, 3, True),
    "openai": Made("paired", [{"input": {"messages": [_said("user", f"p{n}")]},
                               "preferred_output": [_said("assistant", f"a{n}")],
                               "non_preferred_output": [_said("assistant", f"b{n}")]} for n in N], 4),
    "sharegpt": Made("unpaired", [{"conversations": [{"from": "human", "value": f"p{n}"},
                                                     {"from": "gpt", "value": f"a{n}"}], "kto_tag": n == 0}
                                  for n in N], 4, 1, True),
    "alpaca": Made("unpaired", [{"instruction": f"p{n}", "input": "" if n else "more", "output": f"a{n}",
                                 "kto_tag": n < 2} for n in N], 4, 2, True),
    "openrlhf": Made("paired", [{"input": f"p{n} ", "chosen": f"a{n}", "rejected": f"b{n}"} for n in N], 4, flat=True),
    "coati": Made("paired", [{"context": [{"from": "human", "content": f"p{n}"}],
                              "chosen": [{"from": "assistant", "content": f"a{n}"}],
                              "rejected": [{"from": "assistant", "content": f"b{n}"}]} for n in N], 4, flat=True),
    "nemo": Made("unpaired", [{"prompt": f"p{n} ", "response": f"a{n}",
                               "preference": "rejected" if n else "chosen"} for n in N], 4, 1, True),
    "anthropic-hh": Made("paired", [{side: f"\n\nHuman: p{n}\n\nAssistant: {side[0]}{n}"
                                     for side in ("chosen", "rejected")} for n in N], 4, flat=True),
    "axolotl": Made("paired", [{"system": "s", "question": f"p{n}", "chosen": f"a{n}", "rejected": f"b{n}"}
                               for n in N], 4, flat=True),
    "ultrafeedback": Made("paired", [{"instruction": f"p{n}", "completions": [
        {"response": f"{text}{n}", "overall_score": score} for text, score in (("a", 9.0), ("b", 2.0), ("c", 1.0))]}
        for n in N], 4),
    "oasst": Made("paired", [{"message_tree_id": f"t{n}", "prompt": _reply(f"p{n}", "prompter", None, [
        _reply(f"b{n}", rank=1), _reply(f"a{n}", rank=0, replies=[_reply(f"q{n}", "prompter", None, [
            _reply("x", rank=0), _reply("y", rank=1)])])])} for n in N], 8),
    "rating": Made("unpaired", [{"prompt": f"p{n} ", "completion": f"a{n}", "rating": n + 1} for n in N], 4, 2, True,
                   threshold=3),
    "feedback": Made("unpaired", [{"messages": [
        _said("user", f"p{n}"), _said("assistant", f"a{n}", thumbs="up"), _said("user", "q"),
        _said("assistant", f"b{n}", thumbs="down")]} for n in N], 8, 4, True),
    "nemo-rank": Made("paired", [{"context": [_said("user", f"p{n}")], "completions": [
        {"rank": rank, "completion": [_said("assistant", f"{text}{n}")]} for rank, text in ((1, "b"), (0, "a"))]}
        for n in N], 4, flat=True),
    "helpsteer": Made("paired", [{
        "domain": "general", "language": "english", "context": [_said("user", f"p{n}")], "response1": f"b{n}",
        "response2": f"a{n}", "overall_preference": (2, -3, 1, -1)[n]} for n in N], 4, flat=True),
    "ms-swift": Made("paired", [{"messages": [_said("user", f"p{n}"), _said("assistant", f"a{n}")],
                                 "rejected_response": f"b{n}"} for n in N], 4, flat=True),
    "shp": Made("paired", [{
        "post_id": f"t{n}", "history": f"p{n}", "human_ref_A": f"a{n}", "human_ref_B": f"b{n}", "labels": n % 2,
        "score_A": 3 + 4 * (n % 2), "score_B": 5, "seconds_difference": 60.0} for n in N], 4, flat=True),
    "webgpt": Made("paired", [{
        "question": {"dataset": "eli5", "id": f"q{n}", "full_text": f"p{n}"}, "answer_0": f"a{n} [1]",
        "answer_1": f"b{n}", "score_0": (1.0, -0.5, 0.25, -1.0)[n], "score_1": (-1.0, 0.5, -0.25, 1.0)[n]}
        for n in N], 4, flat=True),
}

KINDS = ("json", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow", "csv", "tsv")


def content(kind: str, records: list[dict[str, Any]]) -> bytes:
    """Records as a file of a kind; a cell of a CSV that is not text holds JSON."""
    if kind in ("csv", "tsv"):
        lines = io.StringIO()
        rows = csv.writer(lines, delimiter="," if kind == "csv" else "\t")
        rows.writerow(records[0])
        rows.writerows([value if isinstance(value, str) else json.dumps(value) for value in record.values()]
                       for record in records)
        return lines.getvalue().encode("utf-8", "surrogatepass")
    if kind == "json":
        return json.dumps(records, indent=1).encode()
    if kind in ("parquet", "arrow"):
        table, sink = pyarrow.Table.from_pylist(records), pyarrow.BufferOutputStream()
        if kind == "parquet":
            pyarrow.parquet.write_table(table, sink)
        else:
            with pyarrow.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table)
        return sink.getvalue().to_pybytes()
    return packed(kind, "".join(json.dumps(record) + "\n" for record in records).encode())


def packed(kind: str, plain: bytes) -> bytes:
    """Bytes as a file whose name ends with a packing has them."""
    if kind.endswith(".gz"):
        return gzip.compress(plain, mtime=0)
    if kind.endswith(".zst"):
        return pyarrow.compress(plain, codec="zstd", asbytes=True)
    return plain


def write(folder: Path, name: str, kind: str, records: list[dict[str, Any]]) -> Path:
    """A file `NAME.KIND`."""
    path = folder / f"{name}.{kind}"
    path.write_bytes(content(kind, records))
    return path
