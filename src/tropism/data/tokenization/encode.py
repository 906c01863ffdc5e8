"""Rows to blocks of token ids: in this process or in several, kept by content, in the same order either way."""

import hashlib
import json
import marshal
import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

from tropism.data.row_table import BLOCK_ROWS, Block
from tropism.data.rows import Dropped, EncodedRow, Row
from tropism.data.tokenization.render import Renderer
from tropism.errors import OutputError, TropismError

_BEFORE_HELP = 4  # blocks that are rendered here before processes are started, which takes as long as some blocks do
_MOST_WORKERS = 8
_CODE = ("row_facts", "row_table", "rows", "tree", *(f"tokenization/{name}" for name in (
    "encode", "render", "tokenizer", "truncate")))


def default_workers() -> int:
    """Processes that render: one per CPU, eight at most."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, _MOST_WORKERS)


def render_block(renderer: Renderer, rows: Iterable[Row]) -> Block:
    """Token ids of some rows, and what was seen on the way."""
    stop_ids, saw = renderer.stop_ids, renderer.saw_messages
    renderer.stop_ids, renderer.saw_messages = set(), False
    try:
        results: list[EncodedRow | Dropped] = [renderer.encode(row) for row in rows]
        return Block.of(results, renderer.stop_ids, renderer.saw_messages)
    finally:
        renderer.stop_ids, renderer.saw_messages = stop_ids, saw


class BlockCache:
    """Rendered blocks by content: what a renderer is, and what the rows say.

    Args:
        root: directory of the cache.
        renderer: whose blocks these are.
    """

    def __init__(self, root: Path, renderer: Renderer) -> None:
        self.directory = root / fingerprint(renderer)

    def path(self, rows: Sequence[Row]) -> Path | None:
        """Where the block of these rows is, or would be; None if they hold what has no canonical form."""
        try:
            content = marshal.dumps([(row.prompt, row.completions, row.tools) for row in rows], 2)
        except ValueError:
            return None
        return self.directory / f"{hashlib.blake2b(content, digest_size=16).hexdigest()}.arrow"

    @staticmethod
    def keep(block: Block, path: Path) -> None:
        """Write a block; where the disk refuses, it is rendered again next time."""
        with suppress(OutputError):
            block.write(path)


def fingerprint(renderer: Renderer) -> str:
    """Hash of everything that decides the ids of a row but the row: tokenizer, template, options, limits, code."""
    tokenizer = renderer.text.tokenizer
    template = str(getattr(tokenizer, "chat_template", None))
    text = renderer.text
    state = {
        "tokenizer": tokenizer.backend_tokenizer.to_str(), "class": type(tokenizer).__name__,
        # What is not in the tokenizer's own file, and decides ids too.
        "ends": [text.bos_id, text.eos_id, sorted(text.terminators), sorted(text.control.items())],
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "splits_special": bool(getattr(tokenizer, "split_special_tokens", False)),
        "template": template, "kwargs": renderer.template_kwargs, "system_prompt": renderer.system_prompt,
        "supervise": renderer.supervise, "limits": [renderer.limits.max_length, renderer.limits.max_prompt_length],
        "code": _code(), "libraries": [version(name) for name in ("transformers", "tokenizers", "jinja2")],
        # A template that asks for the date renders other text tomorrow.
        "today": date.today().isoformat() if "strftime_now" in template else None}
    return hashlib.blake2b(json.dumps(state, default=str).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _code() -> str:
    """Hash of the code that renders, so that a block never outlives a change of it."""
    digest = hashlib.blake2b(digest_size=16)
    for name in _CODE:
        digest.update((Path(__file__).parents[1] / f"{name}.py").read_bytes())
    return digest.hexdigest()


@dataclass
class Encoder:
    """Renders a stream of rows.

    Args:
        renderer: turns rows into ids.
        cache: where full blocks are kept; None keeps them in memory.
        workers: processes that render, once there is enough to do; 0 renders here.
    """

    renderer: Renderer
    cache: Path | None = None
    workers: int = 0

    def blocks(self, rows: Iterable[Row]) -> Iterator[tuple[list[Row], Block]]:
        """Rows with their block, in order; only some blocks are on their way at any time.

        Raises:
            DataError: for a row that the chat template refuses.
            ModelError: as `Renderer.encode` does.
        """
        with ExitStack() as stack:
            waiting: deque[tuple[list[Row], Block | Future[Block]]] = deque()
            team: _Team | None = None
            misses = 0
            stream = iter(rows)
            while chunk := list(islice(stream, BLOCK_ROWS)):
                path = self._cache.path(chunk) if len(chunk) == BLOCK_ROWS and self._cache else None
                block: Block | Future[Block] | None = Block.open(path) if path else None
                if block is None:
                    misses += 1
                    if team is None and self.workers > 1 and misses > _BEFORE_HELP and self._portable:
                        team = stack.enter_context(_team(self._portable, self.workers))
                    block = team.render(chunk, path) if team else self._render(chunk, path)
                waiting.append((chunk, block))
                while len(waiting) > (2 * self.workers if team else 0):
                    yield self._arrived(*waiting.popleft())
            while waiting:
                yield self._arrived(*waiting.popleft())

    def _arrived(self, rows: list[Row], block: "Block | Future[Block]") -> tuple[list[Row], Block]:
        found = block if isinstance(block, Block) else block.result()
        self.renderer.stop_ids |= found.stop_ids
        self.renderer.saw_messages |= found.saw_messages
        return rows, found

    def _render(self, rows: list[Row], path: Path | None) -> Block:
        block = render_block(self.renderer, rows)
        if path is not None:
            BlockCache.keep(block, path)
            return Block.open(path) or block  # mapped, it takes no memory of ours
        return block

    @cached_property
    def _cache(self) -> BlockCache | None:
        known = self._of_library and getattr(self.renderer.text.tokenizer, "backend_tokenizer", None) is not None
        return BlockCache(self.cache, self.renderer) if self.cache is not None and known else None

    @property
    def _of_library(self) -> bool:
        """Whether the tokenizer's class is one of transformers; any other is code of which nothing can be said, and
        which another process may not find."""
        return type(self.renderer.text.tokenizer).__module__.startswith("transformers.")

    @cached_property
    def _portable(self) -> bytes | None:
        """The renderer for another process; None if it cannot travel."""
        try:
            return pickle.dumps(self.renderer) if self._of_library else None
        except Exception:  # pickling runs code of others, which fails in ways of its own
            return None


# --- several processes ------------------------------------------------------------------------------------------------
#
# Plain child processes and not multiprocessing, which would run a user's script again in each of them (spawn), or copy
# a process whose threads hold locks (fork).


class _Team:
    """Child processes that render."""

    def __init__(self, renderer: bytes, size: int, stack: ExitStack) -> None:
        self._threads = ThreadPoolExecutor(size)  # each waits for a child; they only pass bytes on
        self._idle: SimpleQueue[tuple[subprocess.Popen[bytes], bool]] = SimpleQueue()  # and whether it has the renderer
        self._renderer = renderer
        paths = os.pathsep.join(entry for entry in sys.path if entry)
        for _ in range(size):
            # Without the working directory on its path (-P), and out of reach of Ctrl-C: it ends when its input does.
            child = subprocess.Popen([sys.executable, "-P", "-m", "tropism.data.tokenization.encode"],
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                     env=os.environ | {"PYTHONPATH": paths}, start_new_session=True)
            stack.callback(_end, child)
            self._idle.put((child, False))
        stack.callback(self._threads.shutdown, cancel_futures=True)

    def render(self, rows: list[Row], path: Path | None) -> "Future[Block]":
        """The block of some rows, in a while."""
        return self._threads.submit(self._ask, rows, path)

    def _ask(self, rows: list[Row], path: Path | None) -> Block:
        child, ready = self._idle.get()
        try:
            with suppress(BrokenPipeError):  # it has died, and says nothing either
                if not ready:
                    _send(child.stdin, self._renderer)
                _send(child.stdin, pickle.dumps((rows, path)))
            message = _receive(child.stdout)
        finally:
            self._idle.put((child, True))
        if message is None:
            raise TropismError("a process that renders rows has died; if memory ran out, fewer --workers take less")
        answer = pickle.loads(message)
        if isinstance(answer, Exception):
            raise answer
        return Block(answer) if answer is not None else Block.open(path) or self._ask(rows, None)  # type: ignore[arg-type]


@contextmanager
def _team(renderer: bytes, size: int) -> Iterator[_Team]:
    with ExitStack() as stack:
        yield _Team(renderer, size, stack)


def _end(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        with suppress(OSError):
            stream.close()  # type: ignore[union-attr]


def _send(stream: Any, content: bytes) -> None:
    stream.write(len(content).to_bytes(8))
    stream.write(content)
    stream.flush()


def _receive(stream: Any) -> bytes | None:
    """The next message; None if the other side is gone."""
    length = stream.read(8)
    content = stream.read(int.from_bytes(length)) if len(length) == 8 else b""
    return content if len(length) == 8 and len(content) == int.from_bytes(length) else None


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Render what comes until nothing comes."""
    first = _receive(requests)
    if first is None:
        return
    renderer = pickle.loads(first)
    while request := _receive(requests):
        rows, path = pickle.loads(request)
        answer: Any
        try:
            block = render_block(renderer, rows)
            if path is not None:
                BlockCache.keep(block, path)
            answer = None if path is not None and path.exists() else block.batch
        except Exception as error:  # raised again where it was asked for
            answer = error
        try:
            message = pickle.dumps(answer)
        except Exception:  # an error of someone's that cannot travel
            message = pickle.dumps(TropismError(str(answer)))
        _send(answers, message)


def _main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed here must not stand among the answers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with suppress(BrokenPipeError):
        _serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    _main()
