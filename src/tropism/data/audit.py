"""What was read, kept, cut, dropped and why; balance, lengths, repetition, conflicts, weights."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tropism.data.findings import Decode, Finding, both_labels, class_weights, of_rows
from tropism.data.rows import Dropped, EncodedRow

__all__ = ["Audit", "class_weights"]

_LISTED = 1000  # dropped rows listed one by one in audit.json; all are counted


@dataclass
class Audit:
    """The account of one data source, written to `audit.json` and shown before training."""

    source: str
    read: int = 0
    dropped: list[Dropped] = field(default_factory=list)
    rows: list[EncodedRow] = field(default_factory=list)
    format: str = ""

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

    def to_json(self, decode: Decode | None = None) -> dict[str, Any]:
        """The content of `audit.json` for this source; `decode` as in `findings`."""
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
            "conflicts": len(both_labels(self.rows)),
            "tokens": self._tokens(),
            "lengths": {"prompt": _quantiles([len(row.prompt_ids) for row in self.rows]),
                        "completion": _quantiles([len(c.ids) for row in self.rows for c in row.completions])},
            "findings": [finding.to_json() for finding in self.findings(decode)],
            "dropped_rows": [{"place": drop.place, "reason": str(drop.reason), "detail": drop.detail}
                        for drop in self.dropped[:_LISTED]],
            "changed_rows": [{"place": row.place, "notes": sorted(row.notes)}
                             for row in self.rows if row.notes][:_LISTED],
        }
        return report

    def _tokens(self) -> dict[str, int]:
        """Tokens of an epoch as if flat, and the share of them that are repeated prompts."""
        flat = sum(row.flat_tokens for row in self.rows)
        prompts = {row.prompt_key: len(row.prompt_ids) for row in self.rows}
        all_prompts = sum(len(row.prompt_ids) * len(row.completions) for row in self.rows)
        return {"flat": flat, "repeated_prompt": all_prompts - sum(prompts.values())}

    def findings(self, decode: Decode | None = None) -> list[Finding]:
        """What the rows say about themselves.

        Args:
            decode: ids to text; without it nobody looks into the answers.
        """
        return of_rows(self.rows, self.dropped, decode=decode)

    def notices(self) -> list[str]:
        """Sentences a person should read before training; what was left out is in `summary`."""
        return [finding.text for finding in self.findings() if finding.severity != "info"
                and finding.name != "left_out"]


def _quantiles(values: Sequence[int]) -> dict[str, int]:
    if not values:
        return {}
    p50, p90, top = np.percentile(values, [50, 90, 100], method="higher")
    return {"p50": int(p50), "p90": int(p90), "max": int(top)}
