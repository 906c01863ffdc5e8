"""Puts what was found together, and prints it."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tropism.commands.doctor import software
from tropism.commands.doctor.places import places, shared_memory
from tropism.errors import count_of, first_line
from tropism.observe.console import Voice
from tropism.store import size_text


@dataclass(frozen=True, slots=True)
class Findings:
    """What `tropism doctor` found.

    Args:
        facts: by section; sizes in bytes, None for what is absent or unknown.
        faults: what is broken that a run needs, each with what to do.
        notes: what may matter to a run.
    """

    facts: dict[str, Any]
    faults: tuple[str, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return {"ok": not self.faults, "faults": [*self.faults], "notes": [*self.notes], **self.facts}


def examine(store: Path | None = None) -> Findings:
    """Look at the installation and the machine. No network is used, and nothing is left on the disk.

    Args:
        store: the cache directory; None for the default.
    """
    faults: list[str] = []
    notes: list[str] = []
    facts: dict[str, Any] = {"versions": software.versions(faults), "packages": software.optional_packages(notes)}
    devices: list[dict[str, Any]] = []
    try:
        hardware = import_module("tropism.commands.doctor.hardware")
    except Exception as error:  # torch or what it needs is broken
        if not faults:
            faults.append(f"torch and its libraries cannot be used: {first_line(error)}. Install Tropism again in a "
                          "new virtual environment.")
    else:
        devices = hardware.gpus(faults, notes)
        facts |= {"cpu": hardware.cpu(notes), "memory": hardware.memory(notes),
                  "cuda": hardware.cuda(faults, notes), "gpus": devices, "run": hardware.would_use(devices)}
    facts |= {"places": places(store, faults, notes), "shared_memory": shared_memory(len(devices), notes),
              "environment": software.environment()}
    return Findings(facts, tuple(faults), tuple(notes))


_TITLES = {"packages": "optional packages", "cpu": "CPU", "cuda": "CUDA", "gpus": "GPUs",
           "shared_memory": "shared memory (/dev/shm)", "run": "a run would use",
           "environment": "environment variables"}


def show(found: Findings, voice: Voice) -> None:
    """Print the facts, then notes, faults and a conclusion."""
    voice.preparing()
    for name, section in found.facts.items():
        voice.say(f"{_TITLES.get(name, name)}:")
        rows = {str(place): one for place, one in enumerate(section)} if isinstance(section, list) else section
        for key, value in rows.items():
            shown = key if name == "environment" else key.removesuffix("_bytes").replace("_", " ")
            voice.say(f"  {shown}: {_text(key, value)}")
        if not rows:
            voice.say("  none")
    for note in found.notes:
        voice.warn(note)
    for fault in found.faults:
        voice.styled(("fault:", "red"), (f" {fault}", ""), kind="error")
    voice.concluding()
    if found.faults:
        voice.say(f"{count_of(len(found.faults), 'fault')}: a run would fail here")
    else:
        use = found.facts["run"]
        voice.say(f"ready: a run would use {use['device']} in {use['precision']}")


def _text(key: str, value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        if "for" in value:  # of a package
            return f"{value['version']} ({value['for']})" if value["version"] else (
                f"not installed ({value['for']}): {value['install']}")
        if "path" in value:
            return (f"{value['path']}, {_text('free_bytes', value['free_bytes'])} free" if value["writable"] else
                    f"{value['path']}, not writable")
        return ", ".join(f"{name.removesuffix('_bytes')} {_text(name, one)}" for name, one in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if key.endswith("_bytes"):
        return size_text(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
