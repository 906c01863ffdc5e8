"""The borders to other libraries and to files that anybody may have written: bounded reading, and one kind of error.

Libraries that parse models, tokenizers and data raise exceptions of every class, and one that is no `Exception`. Only
their calls belong inside `border`: a bug of Tropism must not look like a corrupted file.
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tropism.errors import ModelError, TropismError, UsageError, clause, first_line

CONFIG_BYTES = 64 * 2**20
"""Largest config that is read. An index of the weights of the largest models has 20 MiB."""
TOKENIZER_BYTES = 2**28
"""Largest file of a tokenizer that is read."""
_YAML_BYTES, _YAML_VALUES = 2**18, 10_000
"""Largest YAML file, and number of values in it with its aliases written out."""
_DEEPEST = 64
_LONGEST = 400
_EXHAUSTED = ("can't allocate memory", "DefaultCPUAllocator: not enough memory", "out of memory", "bad_alloc",
              "STATUS_ALLOC_FAILED")
"""Signs of exhausted memory in a RuntimeError: torch's allocators, std::bad_alloc, cuBLAS and cuDNN."""
_SPEAKING = (OSError, ValueError, ImportError, RuntimeError, EOFError)
"""Errors whose text is a sentence. Others are shown with their type."""


@contextmanager
def border(what: str, kind: type[TropismError] = ModelError, advice: str = "") -> Iterator[None]:
    """Turn whatever the block raises into an error for users. Errors of Tropism pass unchanged.

    Args:
        what: first part of the message, such as `DIR: the tokenizer could not be loaded`.
        kind: class of the error.
        advice: what to do, the end of the message.
    """
    try:
        yield
    except TropismError:
        raise
    except BaseException as error:
        # The panics of Rust libraries are no `Exception`, and their class cannot be imported.
        if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
            raise
        raise kind(f"{what}: {reason(error)}" if not advice else f"{what}: {clause(reason(error))}. {advice}"
                   ) from error


def reason(error: BaseException) -> str:
    """What another library's error says, in one line of bounded length."""
    if is_out_of_memory(error):
        return "there is not enough memory for it"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = getattr(error, "strerror", None) or first_line(error)
    name = type(error).__name__
    if not isinstance(error, _SPEAKING) and name not in ("Exception", "error", text):
        text = f"{name}: {text}"
    text = text.encode("utf-8", "backslashreplace").decode()  # what the error quotes may be no text
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is exhausted: Python's, or that of torch, its libraries or pyarrow."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _EXHAUSTED))


def read_bytes(path: Path, most: int = CONFIG_BYTES, kind: type[TropismError] = ModelError) -> bytes:
    """The content of a regular file. Fifos and devices are refused without waiting for them.

    Args:
        most: largest number of bytes.

    Raises:
        TropismError: of class `kind`, if it is no regular file, too large or cannot be read.
    """
    with border(f"{path}: cannot be read", kind):
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(number, "rb") as file:
            check_regular(path, os.fstat(number), kind)
            content = file.read(most + 1)
    if len(content) > most:
        raise kind(f"{path}: too large: at most {most / 2**20:g} MiB are read")
    return content


def check_regular(path: Path, found: os.stat_result, kind: type[TropismError] = ModelError) -> None:
    """Refuse anything but a regular file."""
    if stat.S_ISDIR(found.st_mode):
        raise kind(f"{path}: is a directory, not a file")
    if not stat.S_ISREG(found.st_mode):
        raise kind(f"{path}: is not a regular file")


def read_object(path: Path, most: int = CONFIG_BYTES, kind: type[TropismError] = ModelError, nan: bool = False,
                ) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        most: largest number of bytes.
        kind: class of the error.
        nan: accept NaN.

    Raises:
        TropismError: of class `kind`, if it is anything else, nested too deeply, contains NaN, or sets a key to two
            different values.
    """
    content = read_bytes(path, most, kind)
    with border(f"{path}: not valid JSON", kind):
        value = json.loads(content, object_pairs_hook=_unambiguous, parse_constant=float if nan else _constant)
    if not isinstance(value, dict):
        raise kind(f"{path}: not a JSON object")
    if _depth(value) > _DEEPEST:
        raise kind(f"{path}: the JSON is nested too deeply: more than {_DEEPEST} levels")
    return value


def read_mapping(path: Path) -> tuple[dict[str, Any], yaml.Node | None]:
    """The mapping in a YAML file, and its tree of nodes, which have line numbers. Both are empty if the file is.

    Raises:
        UsageError: if it is anything else, too large, not UTF-8, or its aliases expand to too many values.
    """
    try:
        text = read_bytes(path, _YAML_BYTES, UsageError).decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None
    return parse_mapping(text, path)


def parse_mapping(text: str, path: Path) -> tuple[dict[str, Any], yaml.Node | None]:
    """The mapping in a YAML text; see `read_mapping`.

    Args:
        path: of its file, for errors.
    """
    with border(f"{path}: not valid YAML", UsageError):
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            if _expanded(node, {}) > _YAML_VALUES:
                raise UsageError(f"{path}: the aliases in it expand to more than {_YAML_VALUES:,} values")
            values = yaml.safe_load(text) or {}
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from error
    if not isinstance(values, dict):
        raise UsageError(f"{path}: not a mapping. Write one `option: value` per line.")
    return values, node


def _expanded(node: Any, known: dict[int, int]) -> int:
    """Number of values in a node with its aliases written out.

    Raises:
        ValueError: for an alias inside of what it stands for.
    """
    if id(node) in known:
        if not known[id(node)]:
            raise ValueError("an alias refers to a value that contains it")
        return known[id(node)]
    known[id(node)] = 0
    inner = node.value if isinstance(node, yaml.CollectionNode) else ()
    children = [child for entry in inner for child in (entry if isinstance(entry, tuple) else (entry,))]
    known[id(node)] = 1 + sum(_expanded(child, known) for child in children)
    return known[id(node)]


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ValueError(f"the key {key!r} has two values")
        found[key] = value
    return found


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("it contains NaN")
    return float(name)


def _depth(value: Any) -> int:
    """Levels of nesting, without recursion; stops soon after the deepest that is accepted."""
    level, depth = [value], 0
    while level and depth <= _DEEPEST:
        level = [inner for outer in level if isinstance(outer, dict | list)
                 for inner in (outer.values() if isinstance(outer, dict) else outer)]
        depth += 1
    return depth
