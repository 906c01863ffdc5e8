"""Encoded rows in blocks of columns, in memory or mapped from files. A row becomes an object when it is read."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tropism import store
from tropism.data.row_facts import RowFacts, facts_of, prompt_hash
from tropism.data.rows import Dropped, EncodedRow, Reason
from tropism.data.tree import Completion, TokenIds

BLOCK_ROWS = 1024
"""Rows of a full block. Only full blocks are written to files."""

_KEPT_OBJECTS = 32_768  # rows that stay objects after they were read: all of a small file, some of a large one
_CHECKSUM_BYTES = 16
_SCHEMA = pa.schema([
    ("ids", pa.large_list(pa.int32())), ("learned", pa.large_list(pa.uint8())),
    ("prompt_tokens", pa.int32()), ("first_tokens", pa.int32()), ("sides", pa.uint8()),
    ("tree", pa.uint64()), ("prompt_key", pa.binary(16)), ("keys", pa.binary(32)), ("split_key", pa.binary(16)),
    ("notes", pa.string()), ("reason", pa.string()), ("detail", pa.string())])


class Block:
    """Rows that were rendered together, without what depends on their place in a file: id, place, label and weight.

    Args:
        batch: columns of `_SCHEMA`.

    Attributes:
        stop_ids: terminators of the completions.
        saw_messages: True if a row had messages.
    """

    def __init__(self, batch: pa.RecordBatch) -> None:
        facts = json.loads(batch.schema.metadata[b"tropism"])
        self.stop_ids: set[int] = set(map(int, facts["stop_ids"]))
        self.saw_messages: bool = facts["saw_messages"]
        self.batch = batch
        ids = batch.column("ids")
        self.starts: npt.NDArray[np.int64] = ids.offsets.to_numpy()
        self.ids: npt.NDArray[np.int32] = ids.values.to_numpy()
        self.learned: npt.NDArray[np.bool_] = batch.column("learned").values.to_numpy().view(np.bool_)
        self.prompt_tokens = batch.column("prompt_tokens").to_numpy()
        self.first_tokens = batch.column("first_tokens").to_numpy()
        self.sides = batch.column("sides").to_numpy()

    @classmethod
    def of(cls, results: Sequence[EncodedRow | Dropped], stop_ids: set[int], saw_messages: bool) -> "Block":
        """A block in memory from encoded and dropped rows."""
        kept = [row if isinstance(row, EncodedRow) else None for row in results]
        flat = [np.concatenate([row.prompt_ids, *(side.ids for side in row.completions)]) if row else _NO_IDS
                for row in kept]
        masks = [np.concatenate([np.zeros(len(row.prompt_ids), np.bool_),
                                 *(side.loss_mask for side in row.completions)]) if row else _NO_IDS for row in kept]
        ends = np.cumsum([0, *map(len, flat)], dtype=np.int64)
        empty = pa.array([], pa.int32())

        def lists(parts: list[Any], dtype: Any) -> pa.Array:
            values = pa.array(np.concatenate(parts).astype(dtype)) if parts else empty.cast(pa.from_numpy_dtype(dtype))
            return pa.LargeListArray.from_arrays(pa.array(ends), values)

        columns = [
            lists(flat, np.int32), lists(masks, np.uint8),
            pa.array([len(row.prompt_ids) if row else 0 for row in kept], pa.int32()),
            pa.array([len(row.completions[0].ids) if row else 0 for row in kept], pa.int32()),
            pa.array([len(row.completions) if row else 0 for row in kept], pa.uint8()),
            pa.array([prompt_hash(row.prompt_ids) if row else 0 for row in kept], pa.uint64()),
            pa.array([row.prompt_key if row else bytes(16) for row in kept], pa.binary(16)),
            pa.array([b"".join(side.key for side in row.completions).ljust(32, b"\0") if row else bytes(32)
                      for row in kept], pa.binary(32)),
            pa.array([row.split_key if row else bytes(16) for row in kept], pa.binary(16)),
            pa.array([",".join(sorted(row.notes)) if row else "" for row in kept], pa.string()),
            pa.array([None if isinstance(row, EncodedRow) else str(row.reason) for row in results], pa.string()),
            pa.array([None if isinstance(row, EncodedRow) else _plain(row.detail) for row in results], pa.string())]
        facts = json.dumps({"stop_ids": sorted(stop_ids), "saw_messages": saw_messages})
        return cls(pa.record_batch(columns, schema=_SCHEMA.with_metadata({"tropism": facts})))

    def __len__(self) -> int:
        return len(self.sides)

    def dropped(self, number: int, place: str) -> Dropped | None:
        """The reason for dropping a row; None for a kept row."""
        if self.sides[number]:
            return None
        reason, detail = (self.batch.column(name)[number].as_py() for name in ("reason", "detail"))
        return Dropped(place, Reason(reason), detail)

    def row(self, number: int, id: str, place: str, desirable: bool | None, weight: float) -> EncodedRow:
        """A row as an object, whose arrays are views of the block."""
        start, end = int(self.starts[number]), int(self.starts[number + 1])
        borders = [start + int(self.prompt_tokens[number])]
        borders.append(borders[0] + int(self.first_tokens[number]))
        if self.sides[number] == 2:
            borders.append(end)
        keys = self.batch.column("keys")[number].as_py()
        completions = []
        for side, (left, right) in enumerate(pairwise(borders)):
            completion = Completion(self.ids[left:right], self.learned[left:right])
            completion.__dict__["key"] = keys[16 * side : 16 * side + 16]  # not computed again
            completions.append(completion)
        notes = self.batch.column("notes")[number].as_py()
        return EncodedRow(id, place, self.ids[start : borders[0]], tuple(completions), desirable,
                          self.batch.column("split_key")[number].as_py(),
                          frozenset(notes.split(",")) if notes else frozenset(),
                          prompt_key=self.batch.column("prompt_key")[number].as_py(), weight=weight)

    def content(self, number: int) -> tuple[TokenIds, bytes, list[bytes]]:
        """A row's prompt ids, the key of its prompt, and the keys of its completions."""
        start, keys = int(self.starts[number]), self.batch.column("keys")[number].as_py()
        return (self.ids[start : start + int(self.prompt_tokens[number])],
                self.batch.column("prompt_key")[number].as_py(),
                [keys[16 * side : 16 * side + 16] for side in range(int(self.sides[number]))])

    def facts(self) -> dict[str, Any]:
        """Columns of `RowFacts` for all rows, without labels and notes."""
        two = self.sides == 2
        tokens = np.stack([self.first_tokens, np.diff(self.starts) - self.prompt_tokens - self.first_tokens], axis=1)
        borders = self.starts[:-1] + self.prompt_tokens
        sums = np.concatenate([[0], np.cumsum(self.learned, dtype=np.int64)])
        middle = borders + self.first_tokens
        learned = np.stack([sums[middle] - sums[borders], sums[self.starts[1:]] - sums[middle]], axis=1)
        keys = _fixed(self.batch.column("keys"), 32).view(np.uint64).reshape(-1, 4)
        completion = np.stack([keys[:, 0], np.where(two, keys[:, 2], 0)], axis=1)
        prompt, split = (_fixed(self.batch.column(name), 16).view(np.uint64).reshape(-1, 2)[:, 0]
                         for name in ("prompt_key", "split_key"))
        return {"prompt": prompt, "tree": self.batch.column("tree").to_numpy(), "prompt_tokens": self.prompt_tokens,
                "completion": completion, "tokens": tokens, "learned": learned, "split": split}

    def write(self, path: Path) -> None:
        """Write the block to a file, atomically.

        Raises:
            OutputError: if it cannot be written.
        """
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.batch.schema) as writer:
            writer.write_batch(self.batch)
        content = sink.getvalue().to_pybytes()
        store.write(path, content + _checksum(content, path))

    @classmethod
    def open(cls, path: Path) -> "Block | None":
        """The block of a file, mapped; None if it is missing, corrupted, or was written as another file."""
        try:
            if not store.is_file(path):
                return None
            content = pa.memory_map(str(path)).read_buffer()
            body = content.slice(0, max(content.size - _CHECKSUM_BYTES, 0))
            if content.slice(body.size).to_pybytes() != _checksum(body, path):
                return None
            batch = next(iter(pa.ipc.open_stream(body)))
            batch.validate(full=True)
            return block if batch.schema.equals(_SCHEMA) and (block := cls(batch))._is_consistent() else None
        except Exception:  # whoever can write to the store can write anything under a right checksum
            return None

    def _is_consistent(self) -> bool:
        """Whether the columns fit each other."""
        complete = all(self.batch.column(field.name).null_count == 0 for field in _SCHEMA
                       if field.name not in ("reason", "detail"))
        tokens = self.prompt_tokens.astype(np.int64) + self.first_tokens
        return (complete and self.batch.column("learned").offsets.equals(self.batch.column("ids").offsets)
                and min(part.min(initial=0) for part in (self.prompt_tokens, self.first_tokens, self.ids)) == 0
                and bool((tokens <= np.diff(self.starts)).all())
                and self.sides.max(initial=0) <= 2 and self.learned.view(np.uint8).max(initial=0) <= 1)

    def same_rows(self, numbers: Sequence[int], other: "Block") -> bool:
        """Whether the rows at `numbers` are those of another block. The texts of dropped rows are not compared."""
        names = [field.name for field in _SCHEMA if field.name != "detail"]
        return (self.batch.select(names).take(pa.array(numbers, pa.int64())).equals(other.batch.select(names))
                and self.stop_ids >= other.stop_ids and self.saw_messages >= other.saw_messages)


_NO_IDS = np.zeros(0, dtype=np.int32)


def _checksum(content: Any, path: Path) -> bytes:
    """Hash of a file's content, its name, which is that of the rows, and its directory's name, that of the renderer."""
    digest = hashlib.blake2b(f"{path.parent.name}/{path.name}/".encode(), digest_size=_CHECKSUM_BYTES)
    digest.update(content)
    return digest.digest()


def _plain(text: str) -> str:
    """Text that Arrow can store: lone surrogates, which JSON allows, are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def _label(value: int) -> bool | None:
    return None if value < 0 else bool(value)


def _fixed(column: pa.Array, width: int) -> npt.NDArray[np.uint8]:
    """The bytes of a column of fixed width."""
    data = np.frombuffer(column.buffers()[1], dtype=np.uint8)
    return data[column.offset * width : (column.offset + len(column)) * width]


@dataclass(frozen=True)
class _Sidecar:
    """A block with the ids, places, labels and weights of its rows."""

    block: Block
    ids: pa.Array | None  # None if they equal the places
    places: pa.Array
    labels: npt.NDArray[np.int8]
    weights: npt.NDArray[np.float64]


@dataclass
class TableBuilder:
    """Builds a `RowTable` from blocks.

    Attributes:
        rows: number of rows in the blocks, kept or dropped.
        kept: number of kept rows.
    """

    sidecars: list[_Sidecar] = field(default_factory=list)
    rows: int = 0
    kept: int = 0

    def add(self, block: Block, ids: Sequence[str], places: Sequence[str], labels: Sequence[bool | None],
            weights: Sequence[float | None] | None = None) -> None:
        """Add a block with the ids, places, labels and weights of all its rows. Rows without a weight have 1."""
        own = None if list(ids) == list(places) else pa.array(map(_plain, ids), pa.large_string())
        self.sidecars.append(_Sidecar(block, own, pa.array(map(_plain, places), pa.large_string()), np.array(
            [-1 if label is None else int(label) for label in labels], dtype=np.int8), np.array(
            [1.0 if weight is None else weight for weight in weights or [None] * len(block)], dtype=np.float64)))
        self.rows += len(block)
        self.kept += int(np.count_nonzero(block.sides))

    def kept_numbers(self) -> npt.NDArray[np.int64]:
        """Numbers of the kept rows among all rows."""
        sides = [sidecar.block.sides for sidecar in self.sidecars]
        return np.flatnonzero(np.concatenate(sides)) if sides else np.zeros(0, np.int64)

    def table(self) -> "RowTable":
        """The kept rows, in order."""
        kept = [np.flatnonzero(sidecar.block.sides) for sidecar in self.sidecars]
        blocks = np.repeat(np.arange(len(kept), dtype=np.int32), [len(rows) for rows in kept])
        offsets = np.concatenate([*kept, np.zeros(0, np.int64)]).astype(np.int32)
        return RowTable(self.sidecars, blocks, offsets)


class RowTable(Sequence[EncodedRow]):
    """A sequence of rows in blocks. A row becomes an object when it is read.

    Args:
        sidecars: blocks with the ids, places and labels of their rows.
        blocks, offsets: `[n]` block and position of each row.
    """

    def __init__(self, sidecars: list[_Sidecar], blocks: npt.NDArray[np.int32],
                 offsets: npt.NDArray[np.int32]) -> None:
        self._sidecars, self._blocks, self._offsets = sidecars, blocks, offsets
        self._objects: dict[int, EncodedRow] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, index: int) -> EncodedRow: ...
    @overload
    def __getitem__(self, index: slice) -> "RowTable": ...
    def __getitem__(self, index: int | slice) -> "EncodedRow | RowTable":
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        number = range(len(self))[index]
        row = self._objects.get(number)
        if row is None:
            if len(self._objects) >= _KEPT_OBJECTS:
                self._objects.clear()
            row = self._objects[number] = self._row(number)
        return row

    def __iter__(self) -> Iterator[EncodedRow]:
        if len(self) <= _KEPT_OBJECTS:
            yield from (self[number] for number in range(len(self)))
        else:  # iterating over all rows keeps none of them
            yield from (self._row(number) for number in range(len(self)))

    def _row(self, number: int) -> EncodedRow:
        offset = int(self._offsets[number])
        sidecar = self._sidecars[self._blocks[number]]
        place = sidecar.places[offset].as_py()
        name = place if sidecar.ids is None else sidecar.ids[offset].as_py()
        return sidecar.block.row(offset, name, place, _label(int(sidecar.labels[offset])),
                                 float(sidecar.weights[offset]))

    def take(self, numbers: npt.NDArray[np.int64]) -> "RowTable":
        """The rows at `numbers`, in that order."""
        return RowTable(self._sidecars, self._blocks[numbers], self._offsets[numbers])

    @cached_property
    def facts(self) -> RowFacts:
        """The rows as columns, computed without row objects."""
        if not self._sidecars:
            return facts_of([])
        columns = [sidecar.block.facts() | {"desirable": sidecar.labels, "weight": sidecar.weights}
                   for sidecar in self._sidecars]
        notes: dict[str, list[npt.NDArray[np.int64]]] = {}
        starts = np.cumsum([0, *(len(sidecar.block) for sidecar in self._sidecars)])
        for start, sidecar in zip(starts, self._sidecars, strict=False):
            written = sidecar.block.batch.column("notes")
            for entry in written.unique().to_pylist():
                for note in entry.split(",") if entry else ():
                    where = np.flatnonzero(np.array(pa.compute.equal(written, entry)))
                    notes.setdefault(note, []).append(start + where)
        position = starts[self._blocks] + self._offsets
        number_at = np.full(starts[-1], -1, dtype=np.int64)
        number_at[position] = np.arange(len(self))

        def numbers(positions: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
            present = number_at[np.concatenate(positions)]
            return np.sort(present[present >= 0])

        joined: dict[str, Any] = {name: np.concatenate([column[name] for column in columns])[position]
                                  for name in columns[0]}
        return RowFacts(**joined, notes={note: rows for note, found in notes.items() if len(rows := numbers(found))})

    def split_keys(self) -> list[bytes]:
        """`split_key` of each row."""
        keys = [sidecar.block.batch.column("split_key").to_pylist() for sidecar in self._sidecars]
        return [keys[block][offset] for block, offset in zip(self._blocks, self._offsets, strict=True)]

    def contents(self) -> Iterator[tuple[TokenIds, bytes, list[bytes], bool | None, float]]:
        """The content of each row: its prompt ids, the key of its prompt, keys of its completions, label, weight."""
        for number, offset in zip(self._blocks.tolist(), self._offsets.tolist(), strict=True):
            sidecar = self._sidecars[number]
            yield (*sidecar.block.content(offset), _label(int(sidecar.labels[offset])),
                   float(sidecar.weights[offset]))

    def first_beyond(self, limit: int) -> EncodedRow | None:
        """The first row that has a token id of at least `limit`."""
        suspects = [number for number, sidecar in enumerate(self._sidecars)
                    if len(sidecar.block.ids) and int(sidecar.block.ids.max()) >= limit]
        for number in np.flatnonzero(np.isin(self._blocks, suspects)):
            block, offset = self._sidecars[self._blocks[number]].block, int(self._offsets[number])
            if int(block.ids[block.starts[offset] : block.starts[offset + 1]].max()) >= limit:
                return self[int(number)]
        return None
