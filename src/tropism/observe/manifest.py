"""`manifest.json`: the inputs, library versions and machine of a run."""

import hashlib
import importlib.metadata
import json
import platform
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from tropism.borders import read_object
from tropism.errors import UsageError, first_line
from tropism.observe.rundir import RunDirectory

SCHEMA_VERSION = 1
PACKAGE = Path(__file__).parents[1]
"""Directory of Tropism's own code."""

_KINDS: dict[str, Any] = {
    "status": str, "fingerprints": dict, "libraries": dict, "steps": int, "planned_steps": int, "seconds": (int, float),
    "resumed": list, "model_files": dict, "device": str, "precision": str, "policy": str, "reference": str,
    "teacher": str, "layout": str, "given": dict, "adapter_config": dict, "stop_ids": list,
    "files": dict, "held_out_prompts": int, "class_weights": list, "reward_sums": list,
    "layout_error_nats_per_root_token": (int, float)}
"""Types of the facts that a resumed run and an export rely on."""
_LIBRARIES = ("tropism", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "peft")


def libraries() -> dict[str, str]:
    """Versions of the libraries that results depend on."""
    return {name: importlib.metadata.version(name) for name in _LIBRARIES}


@cache
def code_hash() -> str:
    """Hash of Tropism's own source files, which may be edited without a new version."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(PACKAGE).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def read_manifest(file: Path) -> dict[str, Any]:
    """The facts in a manifest.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: with the reason, if it cannot be read or is not the manifest of a run.
    """
    try:
        file.stat()
        found = read_object(file, kind=UsageError)
    except FileNotFoundError:
        raise
    except (OSError, UsageError) as error:
        raise ValueError(first_line(error).removeprefix(f"{file}: ")) from error
    needed = ("steps", "seconds") if found.get("status") == "done" else ()
    for name, kinds in _KINDS.items():
        if name in found or name in needed:
            value = found.get(name)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise ValueError(f"invalid {name!r}")
    texts = [value for name in ("fingerprints", "libraries") for value in found.get(name, {}).values()]
    if not all(isinstance(value, str) for value in texts):
        raise ValueError("invalid 'fingerprints' or 'libraries'")
    return found


class Manifest:
    """Facts of a run. Adding some rewrites the file.

    Args:
        directory: of the run.
        facts: known at the start.
        earlier: manifest of the resumed run, whose facts are kept.
        step: last step before the resume.
    """

    def __init__(self, directory: RunDirectory, facts: dict[str, Any], earlier: dict[str, Any] | None = None,
                 step: int = 0) -> None:
        self.directory = directory
        begun = {"schema_version": SCHEMA_VERSION, "started": _now(), "python": platform.python_version(),
                 "libraries": libraries(), "code": code_hash(), **facts}
        self.facts: dict[str, Any] = begun
        if earlier or step:
            earlier = earlier or {}
            gone = ("ended", "error", "steps", "planned_steps", "seconds", "reason", "stopped_by", "verdict",
                    "model_files", "files", "reward_sums")
            # A run that starts again from step 1 keeps nothing of the earlier attempts but their start time.
            stays = earlier.keys() - gone if step else {"started"}
            kept = {name: fact for name, fact in earlier.items() if name in stays}
            sitting = {"step": step, "time": begun["started"], "world_size": facts.get("world_size"),
                       "libraries": begun["libraries"]}
            if step:  # an edited manifest may lack some; those of this resume were compared with the checkpoint's
                kept["fingerprints"] = {**facts.get("fingerprints", {}), **earlier.get("fingerprints", {})}
            self.facts = {**begun, **kept, "resumed": [*earlier.get("resumed", []), sitting]}
        self.add(status="running")

    def add(self, **facts: Any) -> None:
        """Add facts and write the file."""
        self.facts |= facts
        self.directory.write_json("manifest.json", self.facts)

    def end(self, status: str, **facts: Any) -> None:
        """Record the final status: `done`, `stopped`, `interrupted` or `failed`."""
        self.add(status=status, ended=_now(), **facts)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def text_fingerprints(tokenizer: Any) -> dict[str, str]:
    """Hashes of tokenizer and chat template, which determine token ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    template = json.dumps(getattr(tokenizer, "chat_template", None))
    return {name: hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
            for name, text in (("tokenizer", state), ("template", template))}
