"""Encodes rows in blocks, in this process or in workers, with a cache by content. Rows stay in order."""

import hashlib
import json
import marshal
import os
import pickle
import secrets
import shlex
import stat
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

from tropism import store
from tropism.data.row_blocks import BLOCK_ROWS, Block
from tropism.data.rows import Dropped, EncodedRow, Row
from tropism.data.tokenization.render import Renderer
from tropism.errors import DataError, OutputError, TropismError

_BLOCKS_BEFORE_WORKERS = 4  # rendered in this process first, since starting workers takes as long as some blocks
_MOST_WORKERS = 8
_SAMPLE = 16  # rows of the first stored block that are rendered again; one of each other block
_RENDERING_CODE = (
    "row_facts", "row_blocks", "rows", "tree", "formats/turn_marks", *(f"tokenization/{name}" for name in (
        "apply_template", "conversation", "encode", "render", "spelled", "template_limits", "thoughts", "tokenizer",
        "tool_arguments", "truncate", "turns")))


def default_workers() -> int:
    """Default number of worker processes: one per CPU, at most eight."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, _MOST_WORKERS)


def render_block(renderer: Renderer, rows: Iterable[Row]) -> Block:
    """Encode some rows as a block."""
    stop_ids, saw = renderer.stop_ids, renderer.saw_messages
    renderer.stop_ids, renderer.saw_messages = set(), False
    try:
        results: list[EncodedRow | Dropped] = [renderer.encode(row) for row in rows]
        return Block.of(results, renderer.stop_ids, renderer.saw_messages)
    finally:
        renderer.stop_ids, renderer.saw_messages = stop_ids, saw


class BlockCache:
    """Cache of blocks, by the settings of the renderer and the content of the rows.

    Args:
        root: directory of the cache.
        renderer: of the blocks.
    """

    def __init__(self, root: Path, renderer: Renderer) -> None:
        self.directory = root / fingerprint(renderer)

    def path(self, rows: Sequence[Row]) -> Path | None:
        """The path of the block of these rows; None if they contain values without a canonical form."""
        try:
            content = marshal.dumps([(row.prompt, row.completions, row.tools) for row in rows], 2)
        except ValueError:
            return None
        return self.directory / f"{hashlib.blake2b(content, digest_size=16).hexdigest()}.arrow"

    @staticmethod
    def open(path: Path) -> Block | None:
        """The block of a file, which this process uses from now on; None if it is missing or corrupted."""
        if not store.is_file(path):
            return None
        store.use(path.parent)
        store.touch(path)
        return Block.open(path)

    @staticmethod
    def save(block: Block, path: Path) -> None:
        """Write a block. If that fails, the block is rendered again next time."""
        with suppress(OutputError):
            block.write(path)


def fingerprint(renderer: Renderer) -> str:
    """Hash of all that determines ids besides the row: tokenizer, template, options, limits, code."""
    tokenizer = renderer.text.tokenizer
    template = str(getattr(tokenizer, "chat_template", None))
    text = renderer.text
    state = {
        "tokenizer": tokenizer.backend_tokenizer.to_str(), "class": type(tokenizer).__name__,
        # Settings outside the tokenizer's own file that determine ids too.
        "ends": [text.bos_id, text.eos_id, sorted(text.control), sorted(text.added.items())],
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "splits_special": bool(getattr(tokenizer, "split_special_tokens", False)),
        "template": template, "kwargs": renderer.template_kwargs, "system_prompt": renderer.system_prompt,
        "supervise": renderer.supervise, "control_tokens": renderer.control_tokens,
        "as_messages": renderer.as_messages,
        "limits": [renderer.limits.max_length, renderer.limits.max_prompt_length, renderer.limits.overlong],
        "code": _code(), "libraries": [version(name) for name in ("transformers", "tokenizers", "jinja2")],
        # A template with the date renders other text tomorrow.
        "today": date.today().isoformat() if "strftime_now" in template else None}
    return hashlib.blake2b(json.dumps(state, default=str).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _code() -> str:
    """Hash of the rendering code, so that a change of it invalidates the cache."""
    digest = hashlib.blake2b(digest_size=16)
    for name in _RENDERING_CODE:
        digest.update((Path(__file__).parents[1] / f"{name}.py").read_bytes())
    return digest.hexdigest()


@dataclass
class Encoder:
    """Encodes a stream of rows in blocks.

    Args:
        renderer: turns rows into ids.
        cache: directory for full blocks; None keeps them in memory.
        workers: worker processes, started for large data only; 0 renders in this process.
    """

    renderer: Renderer
    cache: Path | None = None
    workers: int = 0
    _sampled: bool = field(default=False, init=False)

    def blocks(self, rows: Iterable[Row]) -> Iterator[tuple[list[Row], Block]]:
        """Yield rows with their block, in order. The number of unfinished blocks is limited.

        Raises:
            DataError: for a row that the chat template rejects.
            ModelError: see `Renderer.encode`.
        """
        with ExitStack() as stack:
            waiting: deque[tuple[list[Row], Block | Future[Block]]] = deque()
            pool: _WorkerPool | None = None
            misses = 0
            stream = iter(rows)
            while chunk := list(islice(stream, BLOCK_ROWS)):
                path = self._cache.path(chunk) if len(chunk) == BLOCK_ROWS and self._cache else None
                block: Block | Future[Block] | None = self._stored(chunk, path) if path else None
                if block is None:
                    misses += 1
                    if (pool is None and self.workers > 1 and misses > _BLOCKS_BEFORE_WORKERS
                            and self._pickled_renderer):
                        pool = stack.enter_context(_worker_pool(self._pickled_renderer, self.workers))
                    block = pool.render(chunk, path) if pool else self._render(chunk, path)
                waiting.append((chunk, block))
                while len(waiting) > (2 * self.workers if pool else 0):
                    yield self._finished(*waiting.popleft())
            while waiting:
                yield self._finished(*waiting.popleft())

    def _stored(self, rows: list[Row], path: Path) -> Block | None:
        """The block of a file, after some of its rows were rendered again: whoever can write to the store can write
        other rows.

        Raises:
            DataError: for a row that is stored with other ids than it has.
        """
        block = BlockCache.open(path)
        if block is None or len(block) != len(rows):
            return None
        random = secrets.SystemRandom()  # nobody can know which
        numbers = random.sample(range(len(rows)), min(len(rows), 1 if self._sampled else _SAMPLE))
        self._sampled = True
        for number in numbers:
            if not block.same_rows([number], render_block(self.renderer, [rows[number]])):
                root = path.parents[2]
                raise DataError(f"{path}: {rows[number].place}: the stored tokens of this row are not its own. Another "
                                "user may have changed the store. Remove the stored rows with: "
                                f"tropism store clean --store {shlex.quote(str(root))}")
        return block

    def _finished(self, rows: list[Row], block: "Block | Future[Block]") -> tuple[list[Row], Block]:
        found = block if isinstance(block, Block) else block.result()
        self.renderer.stop_ids |= found.stop_ids
        self.renderer.saw_messages |= found.saw_messages
        return rows, found

    def _render(self, rows: list[Row], path: Path | None) -> Block:
        block = render_block(self.renderer, rows)
        if path is not None:
            BlockCache.save(block, path)
            return BlockCache.open(path) or block  # a mapped block takes no memory of this process
        return block

    @cached_property
    def _cache(self) -> BlockCache | None:
        has_backend = getattr(self.renderer.text.tokenizer, "backend_tokenizer", None) is not None
        hashable = self._is_transformers_tokenizer and has_backend
        return BlockCache(self.cache, self.renderer) if self.cache is not None and hashable else None

    @property
    def _is_transformers_tokenizer(self) -> bool:
        """True for a tokenizer class of transformers. Other code cannot be hashed, and workers may not find it."""
        return type(self.renderer.text.tokenizer).__module__.startswith("transformers.")

    @cached_property
    def _pickled_renderer(self) -> bytes | None:
        """The renderer for workers; None if it cannot be pickled."""
        try:
            return pickle.dumps(self.renderer) if self._is_transformers_tokenizer else None
        except Exception:  # pickling runs third-party code, which may raise anything
            return None


# --- worker processes -------------------------------------------------------------------------------------------------
#
# Plain child processes instead of multiprocessing, which would run the user's script again in each of them (spawn), or
# copy a process whose threads hold locks (fork).
#
# They exchange pickles, since a tokenizer has no other form that keeps all of it. Both ends are this program, and the
# pipes between them have no name: no file and no other program can write into them.


class _WorkerPool:
    """Child processes that render blocks."""

    def __init__(self, renderer: bytes, size: int, stack: ExitStack) -> None:
        self._threads = ThreadPoolExecutor(size)  # each waits for one child
        self._idle: SimpleQueue[tuple[subprocess.Popen[bytes], bool]] = SimpleQueue()  # and True if it has the renderer
        self._renderer = renderer
        paths = os.pathsep.join(entry for entry in sys.path if entry)
        for _ in range(size):
            # -P keeps the working directory off its path. Ctrl-C does not reach a new session; it ends with its input.
            child = subprocess.Popen([sys.executable, "-P", "-m", "tropism.data.tokenization.encode"],
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                     env=os.environ | {"PYTHONPATH": paths}, start_new_session=True)
            stack.callback(_stop, child)
            self._idle.put((child, False))
        stack.callback(self._threads.shutdown, cancel_futures=True)

    def render(self, rows: list[Row], path: Path | None) -> "Future[Block]":
        """Start rendering some rows."""
        return self._threads.submit(self._request, rows, path)

    def _request(self, rows: list[Row], path: Path | None) -> Block:
        child, ready = self._idle.get()
        try:
            with suppress(BrokenPipeError):  # it died; then there is no reply either
                if not ready:
                    _send(child.stdin, self._renderer)
                _send(child.stdin, pickle.dumps((rows, path)))
            message = _receive(child.stdout)
        finally:
            self._idle.put((child, True))
        if message is None:
            raise TropismError("a worker process that encodes rows died. If it ran out of memory, lower --workers.")
        reply = pickle.loads(message)  # noqa: S301  from our own child, see above
        if isinstance(reply, Exception):
            raise reply
        return Block(reply) if reply is not None else BlockCache.open(path) or self._request(rows, None)  # type: ignore[arg-type]


@contextmanager
def _worker_pool(renderer: bytes, size: int) -> Iterator[_WorkerPool]:
    with ExitStack() as stack:
        yield _WorkerPool(renderer, size, stack)


def _stop(child: "subprocess.Popen[bytes]") -> None:
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
    """The next message; None if the other side has closed the stream."""
    length = stream.read(8)
    content = stream.read(int.from_bytes(length)) if len(length) == 8 else b""
    return content if len(length) == 8 and len(content) == int.from_bytes(length) else None


def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Render requests until there are no more."""
    first = _receive(requests)
    if first is None:
        return
    renderer = pickle.loads(first)  # noqa: S301  from the parent
    while request := _receive(requests):
        rows, path = pickle.loads(request)  # noqa: S301  from the parent
        reply: Any
        try:
            block = render_block(renderer, rows)
            if path is not None:
                BlockCache.save(block, path)
            reply = None if path is not None and path.exists() else block.batch
        except Exception as error:  # raised again in the parent process
            reply = error
        try:
            message = pickle.dumps(reply)
        except Exception:  # an error that cannot be pickled
            message = pickle.dumps(TropismError(str(reply)))
        _send(replies, message)


def _main() -> None:
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        sys.exit("tropism starts this module itself, with a pipe as its input")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # other output must not mix with the replies
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with suppress(BrokenPipeError):
        _serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    _main()
