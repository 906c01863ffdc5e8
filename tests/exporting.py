"""Run directories made by hand, and what their exports say: what the tests of exporting share."""

import json
from pathlib import Path
from typing import Any

import torch
import yaml

from tropism.observe.checksums import checksums

IDS = torch.arange(20)[None] % 90 + 3
SETTINGS: dict[str, Any] = {
    "method": "kto", "batch_size": 8, "epochs": 1, "learning_rate": 1e-4, "schedule": "linear", "optimizer": "adamw",
    "seed": 5, "export_dtype": "float32", "loss": "kto", "beta": 0.1, "trust_remote_code": False, "teacher": None,
    "temperature": None, "chat_template": None, "lora": {"rank": None, "adapter": None}}


def filled_run(path: Path, base: Path, **changes: Any) -> Path:
    """The files of a run that is done beside those that are there; `changes` to its options."""
    path.mkdir(parents=True, exist_ok=True)
    options = {**SETTINGS, "model": str(base), **changes}
    (path / "config.yaml").write_text(yaml.safe_dump(options))
    manifest = {"schema_version": 1, "status": "done", "steps": 4, "planned_steps": 4, "seconds": 12.3, "seed": 5,
                "method": "kto", "model": str(base), "device": "cpu", "world_size": 1, "precision": "fp32",
                "layout": "tree", "python": "3.11.7", "libraries": {"tropism": "0.1.0", "torch": "2.13.0"},
                "policy": "c" * 32, "fingerprints": {"data": "a" * 32, "tokenizer": "b" * 32}}
    if (path / "model").is_dir():
        manifest["model_files"] = checksums(path / "model")
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def logits(path: Path) -> torch.Tensor:
    """Of a model directory, on some ids, as plain transformers has them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found
