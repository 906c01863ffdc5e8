"""What was read, kept, cut, dropped and why; balance, lengths, repetition, conflicts, weights."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from tropism.data.rows import Dropped, EncodedRow

_LISTED = 1000  # dropped rows listed one by one in audit.json; all are counted


@dataclass
class Audit:
    """The account of one data source, written to `audit.json` and shown before training."""

    source: str
    read: int = 0
    dropped: list[Dropped] = field(default_factory=list)
    rows: list[EncodedRow] = field(default_factory=list)

    def summary(self) -> str:
        """One line: `6 read, 1 kept: 3 empty_completion, 1 missing_field, 1 empty_prompt`."""
        text = f"{self.read} read, {len(self.rows)} kept"
        reasons = self._reasons()
        return text + (": " + ", ".join(f"{count} {reason}" for reason, count in reasons.items()) if reasons else "")

    def _reasons(self) -> dict[str, int]:
        return dict(Counter(str(drop.reason) for drop in self.dropped).most_common())

    def labels(self) -> dict[str, int]:
        """Kept units of each class; empty for pairs."""
        if not self.rows or self.rows[0].desirable is None:
            return {}
        desirable = sum(bool(row.desirable) for row in self.rows)
        return {"desirable": desirable, "undesirable": len(self.rows) - desirable}

    def to_json(self) -> dict[str, Any]:
        """The content of `audit.json` for this source."""
        notes = Counter(note for row in self.rows for note in row.notes)
        keys = Counter((row.prompt_key, tuple(c.key for c in row.completions)) for row in self.rows)
        report: dict[str, Any] = {
            "source": self.source,
            "rows": {"read": self.read, "kept": len(self.rows), "dropped": self._reasons(),
                     "prompt_cut": notes["prompt_cut"], "completion_cut": notes["completion_cut"],
                     "text_changed": notes["text_changed"],
                     "control_spelt": notes["control_spelt"], "eos_added": notes["eos_added"]},
            "labels": self.labels(),
            "prompts": len({row.prompt_key for row in self.rows}),
            "duplicates": sum(count - 1 for count in keys.values()),
            "conflicts": len(self._conflicts()),
            "tokens": self._tokens(),
            "lengths": {"prompt": _quantiles([len(row.prompt_ids) for row in self.rows]),
                        "completion": _quantiles([len(c.ids) for row in self.rows for c in row.completions])},
            "dropped_rows": [{"place": drop.place, "reason": str(drop.reason), "detail": drop.detail}
                        for drop in self.dropped[:_LISTED]],
            "changed_rows": [{"place": row.place, "notes": sorted(row.notes)}
                             for row in self.rows if row.notes][:_LISTED],
        }
        return report

    def _conflicts(self) -> set[tuple[bytes, bytes]]:
        """(prompt, completion) pairs that carry both labels."""
        seen: dict[tuple[bytes, bytes], bool | None] = {}
        conflicts = set()
        for row in self.rows:
            if row.desirable is not None:
                key = (row.prompt_key, row.completions[0].key)
                if seen.setdefault(key, row.desirable) != row.desirable:
                    conflicts.add(key)
        return conflicts

    def _tokens(self) -> dict[str, int]:
        """Tokens of an epoch as if flat, and the share of them that are repeated prompts."""
        flat = sum(row.flat_tokens for row in self.rows)
        prompts = {row.prompt_key: len(row.prompt_ids) for row in self.rows}
        all_prompts = sum(len(row.prompt_ids) * len(row.completions) for row in self.rows)
        return {"flat": flat, "repeated_prompt": all_prompts - sum(prompts.values())}

    def notices(self) -> list[str]:
        """Sentences a person should read before training."""
        notes = Counter(note for row in self.rows for note in row.notes)
        said = []
        if notes["eos_added"]:
            said.append(f"the chat template does not end the answers of {notes['eos_added']} rows: one eos was added "
                        "to each")
        if notes["text_changed"]:
            first = next(row.place for row in self.rows if "text_changed" in row.notes)
            said.append(f"{notes['text_changed']} rows do not read back as written (first {first}): "
                        "tokenizer or template changes their text")
        if notes["control_spelt"]:
            first = next(row.place for row in self.rows if "control_spelt" in row.notes)
            said.append(f"{notes['control_spelt']} rows spell control tokens in their text (first {first}): they are "
                        "trained as plain characters")
        for note, what in (("prompt_cut", "prompts were cut from the left"),
                           ("completion_cut", "completions were cut and have no terminator")):
            if notes[note]:
                said.append(f"{notes[note]} {what}")
        if conflicts := len(self._conflicts()):
            said.append(f"{conflicts} completions carry both labels")
        return said


def _quantiles(values: Sequence[int]) -> dict[str, int]:
    if not values:
        return {}
    p50, p90, top = np.percentile(values, [50, 90, 100], method="higher")
    return {"p50": int(p50), "p90": int(p90), "max": int(top)}


def class_weights(
    desirable: int, undesirable: int, desirable_weight: float | Literal["auto"],
    undesirable_weight: float | Literal["auto"],
) -> tuple[float, float]:
    """Numbers for the class weights: under `auto` the larger class has 1 and the other n_major / n_minor."""
    major = max(desirable, undesirable)
    auto = (major / desirable if desirable else 1.0, major / undesirable if undesirable else 1.0)
    given = (desirable_weight, undesirable_weight)
    return (auto[0] if given[0] == "auto" else float(given[0]),
            auto[1] if given[1] == "auto" else float(given[1]))
