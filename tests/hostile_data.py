"""Data files and YAML files that must be refused."""

import gzip
import json
import os
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from hostile_values import NESTED

MIB = 2**20
ROW = json.dumps({"prompt": "p ", "completion": "a"}).encode() + b"\n"
Write = Callable[[Path], Any]


def sparse(size: int, path: Path) -> None:
    """A file of zeros that takes no room on the disk."""
    path.touch()
    os.truncate(path, size)


def _bytes(content: bytes) -> Write:
    return lambda path: path.write_bytes(content)


def _repeated(block: bytes, count: int) -> Iterator[bytes]:
    return (block for _ in range(count))


def _gzipped(blocks: Callable[[], Iterator[bytes]], path: Path) -> None:
    with gzip.open(path, "wb", compresslevel=9) as file:
        for block in blocks():
            file.write(block)


def _zstd(blocks: Callable[[], Iterator[bytes]], path: Path) -> None:
    with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
        for block in blocks():
            file.write(block)


def _parquet(prompt: str, rows: int, path: Path, groups: int = 1) -> None:
    """Rows that are all the same: some kilobytes on the disk, whatever their number."""
    indices = pyarrow.array([0] * rows, pyarrow.int32())
    columns = {name: pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array([text]))
               for name, text in (("prompt", prompt), ("completion", "a"))}
    table = pyarrow.table(columns)
    with pyarrow.parquet.ParquetWriter(path, table.schema, compression="zstd", dictionary_pagesize_limit=2**30
                                       ) as writer:
        for _ in range(groups):
            writer.write_table(table)


def _arrow_nulls(rows: int, path: Path) -> None:
    """Columns without buffers may be of any length."""
    batch = pyarrow.record_batch({name: pyarrow.NullArray.from_buffers(pyarrow.null(), rows, [None])
                                  for name in ("prompt", "completion")})
    with pyarrow.ipc.new_file(path, batch.schema) as file:
        file.write_batch(batch)


def _arrow_of(prompts: pyarrow.Array, path: Path) -> None:
    """Prompts as an Arrow array, with a completion each."""
    batch = pyarrow.record_batch({"prompt": prompts, "completion": pyarrow.array(["a"] * len(prompts))})
    with pyarrow.ipc.new_file(path, batch.schema) as file:
        file.write_batch(batch)


def _run_ends(path: Path) -> None:
    _arrow_of(pyarrow.RunEndEncodedArray.from_arrays(pyarrow.array([9], pyarrow.int32()), pyarrow.array(["x"])), path)


def _list_views(path: Path) -> None:
    """Lists that all show the same values."""
    offsets, sizes = pyarrow.array([0] * 999, pyarrow.int32()), pyarrow.array([999] * 999, pyarrow.int32())
    _arrow_of(pyarrow.ListViewArray.from_arrays(offsets, sizes, pyarrow.array(["x"] * 999)), path)


def _dictionary(path: Path) -> None:
    indices = pyarrow.array([0] * 5_000_000, pyarrow.int8())
    batch = pyarrow.record_batch({name: pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["x" * 1000]))
                                  for name in ("prompt", "completion")})
    with pyarrow.ipc.new_file(path, batch.schema) as file:
        file.write_batch(batch)


def _arrow_changed(old: bytes, new: bytes, path: Path) -> None:
    table = pyarrow.Table.from_pylist([{"prompt": "p ", "completion": "a"}] * 4)
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_file(sink, table.schema) as file:
        file.write_table(table)
    path.write_bytes(sink.getvalue().to_pybytes().replace(old, new))


def _parquet_cut(path: Path) -> None:
    _parquet("p ", 4, path)
    os.truncate(path, path.stat().st_size - 20)


def _long_line(row: bytes, path: Path) -> None:
    """One line of 70 MiB."""
    with path.open("wb") as file:
        file.write(row)
        for _ in range(70):
            file.write(b"x" * MIB)


_MANY = 1100
"""Megabytes that bombs expand to."""


def _compressed(suffix: str, pack: Callable[[Callable[[], Iterator[bytes]], Path], None]) -> dict[str, tuple[str, Any]]:
    block = ROW * (MIB // len(ROW))
    return {f"{suffix}: bomb of rows": (f"d.jsonl.{suffix}", partial(pack, partial(_repeated, block, _MANY))),
            f"{suffix}: bomb of zeros": (f"d.jsonl.{suffix}", partial(pack, partial(_repeated, b"\0" * MIB, _MANY))),
            f"{suffix}: bomb in one line": (f"d.jsonl.{suffix}", partial(pack, partial(_repeated, b" " * MIB, 80))),
            f"{suffix}: bomb of JSON": (f"d.json.{suffix}", partial(pack, partial(_repeated, b" " * MIB, _MANY))),
            f"{suffix}: bomb of CSV": (f"d.csv.{suffix}", partial(pack, partial(
                _repeated, b"prompt,completion\n" + b'"' * MIB, _MANY))),
            f"{suffix}: bomb of Parquet": (f"d.parquet.{suffix}", partial(pack, partial(_repeated, b"\0" * MIB,
                                                                                       _MANY))),
            f"{suffix}: empty": (f"d.jsonl.{suffix}", _bytes(b"")),
            f"{suffix}: not compressed": (f"d.jsonl.{suffix}", _bytes(ROW * 4)),
            f"{suffix}: cut": (f"d.jsonl.{suffix}", partial(_half, partial(pack, partial(_repeated, ROW, 4))))}


def _half(write: Write, path: Path) -> None:
    write(path)
    os.truncate(path, path.stat().st_size // 2)


def _directory_of(write: Write, path: Path) -> None:
    path.mkdir()
    write(path / "d.jsonl")


DATA: dict[str, tuple[str, Any]] = {
    **_compressed("gz", _gzipped), **_compressed("zst", _zstd),
    "bz2": ("d.jsonl.bz2", _bytes(b"BZh9")), "xz": ("d.jsonl.xz", _bytes(b"\xfd7zXZ\x00")),
    "zip": ("d.zip", _bytes(b"PK\x03\x04")), "no suffix": ("d", _bytes(ROW)),
    "fifo": ("d.jsonl", os.mkfifo), "device": ("d.jsonl", lambda path: path.symlink_to("/dev/zero")),
    "random device": ("d.csv", lambda path: path.symlink_to("/dev/urandom")),
    "loop": ("d.jsonl", lambda path: path.symlink_to(path)),
    "dangling link": ("d.jsonl", lambda path: path.symlink_to("/nowhere/at/all")),
    "directory with the name of a file": ("d.jsonl", lambda path: path.mkdir()),
    "directory of nothing": ("d", lambda path: path.mkdir()), "directory with a fifo": (
        "d", partial(_directory_of, os.mkfifo)),
    "directory in a loop": ("d", lambda path: (path.mkdir(), (path / "again").symlink_to(path))),
    "one long line": ("d.jsonl", partial(_long_line, b'{"prompt": "')),
    "a long line after good ones": ("d.jsonl", partial(_long_line, ROW * 4 + b'{"prompt": "')),
    "one long cell": ("d.csv", partial(_long_line, b'prompt,completion\n"')),
    "one long line of CSV": ("d.tsv", partial(_long_line, b"prompt\tcompletion\n")),
    "a gigabyte of zeros": ("d.jsonl", partial(sparse, 2**30)),
    "a gigabyte of zeros as JSON": ("d.json", partial(sparse, 2**30)),
    "a gigabyte of zeros as CSV": ("d.csv", partial(sparse, 2**30)),
    "a gigabyte of zeros as Parquet": ("d.parquet", partial(sparse, 2**30)),
    "a gigabyte of zeros as Arrow": ("d.arrow", partial(sparse, 2**30)),
    "nested": ("d.jsonl", _bytes(NESTED.encode())), "nested as JSON": ("d.json", _bytes(NESTED.encode())),
    "nested field": ("d.jsonl", _bytes(b'{"prompt": "p", "completion": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_001)),
    "long number": ("d.jsonl", _bytes(b'{"prompt": "p", "completion": ' + b"9" * 10_000 + b"}\n")),
    "number as completion": ("d.jsonl", _bytes(b'{"prompt": "p", "completion": NaN}\n')),
    "latin-1": ("d.jsonl", _bytes('{"prompt": "p", "completion": "é"}\n'.encode("latin-1"))),
    "utf-16": ("d.jsonl", _bytes(ROW.decode().encode("utf-16"))),
    "array in a line": ("d.jsonl", _bytes(b"[1, 2]\n")), "text in a line": ("d.jsonl", _bytes(b'"text"\n')),
    "cut line": ("d.jsonl", _bytes(ROW * 3 + ROW[:20])), "blank": ("d.jsonl", _bytes(b"\n" * 100_000)),
    "empty": ("d.jsonl", _bytes(b"")), "empty JSON": ("d.json", _bytes(b"")), "empty CSV": ("d.csv", _bytes(b"")),
    "empty Parquet": ("d.parquet", _bytes(b"")), "empty Arrow": ("d.arrow", _bytes(b"")),
    "JSON of a number": ("d.json", _bytes(b"5")), "JSON of numbers": ("d.json", _bytes(b"[1, 2]")),
    "quote without end": ("d.csv", _bytes(b'prompt,completion\n"p,a\n')),
    "more cells than columns": ("d.csv", _bytes(b"prompt,completion\n1,2,3\n")),
    "nul in CSV": ("d.csv", _bytes(b"prompt\0,completion\n1\0,2\n")),
    "Parquet cut": ("d.parquet", _parquet_cut), "Parquet of zeros": ("d.parquet", _bytes(b"PAR1" + b"\0" * 100 +
                                                                                       b"PAR1")),
    "Parquet with a long footer": ("d.parquet", _bytes(b"PAR1" + b"\0" * 8 + struct.pack("<i", 2**31 - 1) + b"PAR1")),
    "Parquet with a negative footer": ("d.parquet", _bytes(b"PAR1" + b"\0" * 8 + struct.pack("<i", -5) + b"PAR1")),
    "Parquet of long rows": ("d.parquet", partial(_parquet, "x" * 65 * MIB, 4000)),
    "Parquet of many rows": ("d.parquet", partial(_parquet, "x" * 2000, 1_000_000, groups=2)),
    "Arrow cut": ("d.arrow", partial(_half, partial(_arrow_changed, b"", b""))),
    "Arrow with a long message": ("d.arrow", _bytes(b"\xff\xff\xff\xff" + struct.pack("<i", 2**31 - 1) + b"\0" * 64)),
    "Arrow with a negative message": ("d.arrow", _bytes(b"\xff\xff\xff\xff" + struct.pack("<i", -8) + b"\0" * 64)),
    "Arrow of 2^31 nulls": ("d.arrow", partial(_arrow_nulls, 2**31 - 1)),
    "Arrow of 2^28 nulls": ("d.arrow", partial(_arrow_nulls, 2**28)),
    "Arrow of run ends": ("d.arrow", _run_ends), "Arrow of list views": ("d.arrow", _list_views),
    "Arrow of one text": ("d.arrow", _dictionary),
    "Arrow of other names": ("d.arrow", partial(_arrow_changed, b"prompt", b"\xff\xfe\xff\xfe\xff\xfe"))}

_LAUGHS = "\n".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]" for n in range(30))
YAMLS: dict[str, bytes] = {
    "billion laughs": f"a0: &a0 [x, x]\n{_LAUGHS}\n".encode(),
    "billion laughs in an option": f"a0: &a0 [x, x]\n{_LAUGHS}\nloss: *a30\n".encode(),
    "billion laughs of maps": ("a0: &a0 {x: 1}\n" + "\n".join(
        f"a{n + 1}: &a{n + 1} {{{', '.join(f'k{m}: *a{n}' for m in range(10))}}}" for n in range(30))).encode(),
    "merged laughs": ("a0: &a0 {x: 1}\n" + "\n".join(f"a{n + 1}: &a{n + 1} {{<<: [*a{n}, *a{n}]}}" for n in range(40))
                      ).encode(),
    "recursive alias": b"beta: &a [*a]\n", "recursive map": b"lora: &a {rank: *a}\n",
    "recursive root": b"&a\nlora: *a\n", "unknown alias": b"epochs: *nowhere\n", "nested YAML": NESTED.encode(),
    "nested blocks": "\n".join(" " * n + "a:" for n in range(2000)).encode(),
    "nested maps": ("{a: " * 5000 + "1" + "}" * 5000).encode(),
    "python object": b"epochs: !!python/object/apply:os.system ['true']\n",
    "python name": b"epochs: !!python/name:os.system\n", "binary": b"loss: !!binary '!!!'\n",
    "tag": b"epochs: !martian 5",
    "bad time": b"loss: 2024-99-99\n", "bad times": b"loss: 2024-01-01 99:99:99\n", "digits": b"epochs: " + b"9" * 5000,
    "octal": b"epochs: 0o99\n", "sexagesimal": b"epochs: 99:99:99\n", "nan": b"learning_rate: .nan\n",
    "infinite": b"learning_rate: .inf\n", "list as number": b"epochs: [1]\n", "map as number": b"epochs: {a: 1}\n",
    "number as group": b"lora: 5\n", "list as group": b"lora: [1]\n", "null as key": b"null: 5\n", "number as key":
    b"5: 5\n", "list as key": b"? [1, 2]\n: 5\n", "map as key": b"? {a: b}\n: 5\n", "twice": b"epochs: 1\nepochs: 2\n",
    "list": b"- a\n- b\n", "text": b"train please\n", "number": b"5\n", "two documents": b"epochs: 1\n---\nepochs: 2\n",
    "tab": b"epochs:\n\t- 1\n", "cut": b"epochs: [1, 2\n", "quote": b"epochs: 'a\n", "not utf-8": b"loss: \xff\xfe\n",
    "utf-16 YAML": "epochs: 1\n".encode("utf-16"), "nul": b"epochs: \x00\n", "escape": b"epochs: \x1b[31m\n",
    "unknown": b"martian: 5\n", "long value": b"epochs: " + b"x" * 100_000 + b"\n", "long key": b"x" * 1000 + b": 1\n",
    "directive": b"%YAML 9.9\n---\nepochs: 1\n", "spaces": b" " * 5_000_000, "rank": b"lora: {rank: 100000}\n",
    "a set": b"epochs: !!set {a, b}\n", "pairs": b"epochs: !!pairs [a: 1]\n", "method": b"method: [kto]\n",
    "method as map": b"method: {a: 1}\n", "empty key": b"'': 1\n", "huge": b"epochs: 1.0e400\n"}
