"""The audit of one data source: rows read, kept and dropped with reasons, balance, lengths, duplicates, conflicts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from tropism.data.audit.findings import Decode, Finding, both_labels, by_severity, find_in_rows
from tropism.data.audit.unused_columns import name_columns
from tropism.data.row_facts import Integers, RowFacts, facts_of
from tropism.data.rows import Dropped, EncodedRow

_LISTED = 1000  # rows that audit.json lists; all are counted


@dataclass
class Audit:
    """The audit of one data source, written to `audit.json` and printed before training.

    Args:
        source: its name.
        read: number of its records.
        dropped: the first dropped rows.
        rows: kept rows; they must not change after the first use of `facts`.
        format: how the records were read, as one line.
        label_words: how labels were read, as one line; empty if they are true, false, 1 and 0.
        origins: for each column of `findings.ORIGINS` that occurs, its value in each kept row.
        unlisted: number of dropped rows that are not in `dropped`, by reason.
        columns_not_used: columns with values that nothing reads, in file order.
        plain_rows: number of rows of plain text.
        of_source: findings about the source as a whole.
        commits: of datasets on the Hub, by their names in the source.
        decided: names of findings that an option answers. They are no warnings.
    """

    source: str
    read: int = 0
    dropped: list[Dropped] = field(default_factory=list)
    rows: Sequence[EncodedRow] = field(default_factory=list)
    format: str = ""
    label_words: str = ""
    origins: dict[str, list[str | None]] = field(default_factory=dict)
    unlisted: Counter[str] = field(default_factory=Counter)
    columns_not_used: list[str] = field(default_factory=list)
    plain_rows: int = 0
    of_source: list[Finding] = field(default_factory=list)
    commits: dict[str, str] = field(default_factory=dict)
    decided: frozenset[str] = frozenset()

    def drop(self, dropped: Dropped) -> None:
        """Count a dropped row; list it if it is one of the first 1000."""
        if len(self.dropped) < _LISTED:
            self.dropped.append(dropped)
        else:
            self.unlisted[str(dropped.reason)] += 1

    @property
    def reasons(self) -> dict[str, int]:
        """Number of dropped rows by reason, most frequent reason first."""
        listed = Counter(str(drop.reason) for drop in self.dropped)
        return dict((listed + self.unlisted).most_common())

    @cached_property
    def facts(self) -> RowFacts:
        """The kept rows as columns."""
        return facts_of(self.rows)

    def summary(self) -> str:
        """One line: `6 read, 1 kept: 3 empty_completion, 1 missing_field, 1 empty_prompt`."""
        text = f"{self.read} read, {len(self.rows)} kept"
        reasons = self.reasons
        return text + (": " + ", ".join(f"{count} {reason}" for reason, count in reasons.items()) if reasons else "")

    @property
    def reading(self) -> list[str]:
        """How the source was read, as lines: its format, its labels, and the columns that were not used."""
        unused = f"columns not used: {name_columns(self.columns_not_used)}" if self.columns_not_used else ""
        return [line for line in (self.format, self.label_words, unused) if line]

    def labels(self) -> dict[str, int]:
        """Number of kept rows of each class; empty for pairs."""
        return dict(zip(("desirable", "undesirable"), self.facts.classes, strict=True)) if self.facts.labeled else {}

    def to_json(self, decode: Decode | None = None) -> dict[str, Any]:
        """The content of `audit.json` for this source; `decode` as in `findings`."""
        facts = self.facts
        noted = {note: len(facts.notes.get(note, ())) for note in (
            "prompt_cut", "completion_cut", "text_changed", "control_spelled", "control_kept", "thought_hidden",
            "thought_open", "eos_added")}
        changed = np.unique(np.concatenate([np.zeros(0, np.int64), *facts.notes.values()]))[:_LISTED].tolist()
        prompts = int(facts.prompt_numbers.max(initial=-1)) + 1
        distinct = int(facts.row_numbers.max(initial=-1)) + 1
        report: dict[str, Any] = {
            "source": self.source,
            **({"commits": self.commits} if self.commits else {}),
            "columns_not_used": self.columns_not_used[:_LISTED],
            "rows": {"read": self.read, "kept": len(self.rows), "dropped": self.reasons, **noted},
            "labels": self.labels(),
            "prompts": prompts,
            "duplicates": len(facts) - distinct,
            "conflicts": len(both_labels(facts)),
            "tokens": {"flat": facts.flat_tokens, "repeated_prompt": facts.repeated_tokens},
            "lengths": {"prompt": _quantiles(facts.prompt_tokens),
                        "completion": _quantiles(facts.tokens[facts.tokens > 0])},
            "findings": [finding.to_json() for finding in self.findings(decode)],
            "dropped_rows": [{"place": drop.place, "reason": str(drop.reason), "detail": drop.detail}
                             for drop in self.dropped[:_LISTED]],
            "changed_rows": [{"place": row.place, "notes": sorted(row.notes)}
                             for row in (self.rows[number] for number in changed)],
        }
        return report

    def findings(self, decode: Decode | None = None) -> list[Finding]:
        """Findings about the rows.

        Args:
            decode: ids to text; None skips the findings that need text.
        """
        found = [*self.of_source, *find_in_rows(
            self.rows, self.dropped, decode=decode, origins=self.origins, reasons=self.reasons, facts=self.facts)]
        return by_severity([replace(finding, severity="notice")
                            if finding.severity == "warning" and finding.name in self.decided else finding
                            for finding in found])

    def notable(self) -> list[Finding]:
        """The findings to print before training. Dropped rows are in `summary`."""
        return [finding for finding in self.findings() if finding.severity != "info" and finding.name != "left_out"]

    def notices(self) -> list[str]:
        """Texts of the notable findings."""
        return [finding.text for finding in self.notable()]


def _quantiles(values: Integers) -> dict[str, int]:
    if not len(values):
        return {}
    p50, p90, top = np.percentile(values, [50, 90, 100], method="higher")
    return {"p50": int(p50), "p90": int(p90), "max": int(top)}
