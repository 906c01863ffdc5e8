"""Checksums of the files in a directory, and a check for changes."""

import hashlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Files = dict[str, dict[str, Any]]
"""Size in `bytes` and `blake2b` in hexadecimal by path, relative to the directory, with forward slashes."""

_DIGEST_BYTES = 16


def file_hash(path: Path, digest_bytes: int = _DIGEST_BYTES) -> str:
    """BLAKE2b hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=digest_bytes)).hexdigest()


def checksum(path: Path) -> dict[str, Any]:
    """Size and hash of a file."""
    return {"bytes": path.stat().st_size, "blake2b": file_hash(path)}


def checksums(directory: Path, leave_out: Collection[str] = ()) -> Files:
    """Size and hash of every file below a directory. Hashing releases the interpreter lock, so threads help.

    Args:
        leave_out: relative paths to omit.
    """
    names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    names = [name for name in names if name not in leave_out]
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(checksum, (directory / name for name in names)), strict=True))


def differences(directory: Path, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Files that differ from their checksums, one sentence each; empty if all are intact. Ignores further files."""
    def one(name: str) -> str | None:
        path = directory / name
        try:
            known, size = files[name], path.stat().st_size
            if not path.is_file():  # opening a named pipe would wait forever
                return f"{name} is not a regular file"
            if size != known["bytes"]:
                return f"{name} has {size} bytes instead of {known['bytes']}"
            if file_hash(path, len(known["blake2b"]) // 2) != known["blake2b"]:
                return f"{name} has changed"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        except (KeyError, TypeError, ValueError):
            return f"{name} has an invalid checksum"
        return None

    with ThreadPoolExecutor() as pool:
        return [found for found in pool.map(one, files) if found is not None]
