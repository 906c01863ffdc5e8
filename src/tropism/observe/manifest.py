"""`manifest.json`: with what, from what and where a run was made."""

import hashlib
import importlib.metadata
import json
import platform
from datetime import UTC, datetime
from typing import Any

from tropism.observe.rundir import RunDirectory

SCHEMA_VERSION = 1
_LIBRARIES = ("tropism", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow")


def libraries() -> dict[str, str]:
    """Versions of what results depend on."""
    return {name: importlib.metadata.version(name) for name in _LIBRARIES}


class Manifest:
    """Facts of a run, written again whenever some are added.

    Args:
        directory: of the run.
        facts: known when it begins.
        earlier: the manifest of the sittings before, where the run goes on; what it says stays.
        step: the step that it goes on after.
    """

    def __init__(self, directory: RunDirectory, facts: dict[str, Any], earlier: dict[str, Any] | None = None,
                 step: int = 0) -> None:
        self.directory = directory
        begun = {"schema_version": SCHEMA_VERSION, "started": _now(), "python": platform.python_version(),
                 "libraries": libraries(), **facts}
        self.facts: dict[str, Any] = begun
        if earlier:
            gone = ("ended", "error", "steps", "planned_steps", "seconds", "reason", "stopped_by", "model_files")
            # From step 1 on nothing is left of what the sittings before did, nor of how they did it.
            stays = earlier.keys() - gone if step else {"started"}
            kept = {name: fact for name, fact in earlier.items() if name in stays}
            sitting = {"step": step, "time": begun["started"], "world_size": facts.get("world_size"),
                       "libraries": begun["libraries"]}
            self.facts = {**begun, **kept, "resumed": [*earlier.get("resumed", []), sitting]}
        self.add(status="running")

    def add(self, **facts: Any) -> None:
        """Add facts and write the file."""
        self.facts |= facts
        self.directory.write_json("manifest.json", self.facts)

    def end(self, status: str, **facts: Any) -> None:
        """The last word: `done`, `stopped`, `interrupted` or `failed`."""
        self.add(status=status, ended=_now(), **facts)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def text_fingerprints(tokenizer: Any) -> dict[str, str]:
    """Hashes of what decides token ids: tokenizer and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    template = json.dumps(getattr(tokenizer, "chat_template", None))
    return {name: hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
            for name, text in (("tokenizer", state), ("template", template))}
