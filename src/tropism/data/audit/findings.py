"""What a set of rows is like, and what that means for training: pure functions from rows to sentences."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tropism.data.class_weights import class_weights
from tropism.data.row_facts import Integers, RowFacts, evenly_spaced, facts_of, first_of, groups
from tropism.data.rows import Dropped, EncodedRow

Severity = Literal["info", "notice", "warning"]
Decode = Callable[[list[int]], str]

_ENOUGH = 20  # rows of each kind below which a share or an AUC says nothing
_LISTED = 10  # places that a finding names
_OPENING = 48  # tokens of an answer in which a refusal is looked for
_READ = 20_000  # answers of each kind that are read: a share of them is known to a third of a point
_REFUSAL = re.compile(
    r"\W*(i'?m (very )?sorry|i am (very )?sorry|sorry,|i apologi[sz]e|i cannot|i can'?t|i'?m (unable|not able)|"
    r"i am (unable|not able)|unfortunately, i )|.*\bas an? (ai|(large )?language model)\b", re.DOTALL)
ORIGINS = ("source", "dataset", "origin", "annotator", "annotator_id", "rater", "voter", "user_id", "worker_id")
"""Columns that say where a row comes from."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about the data that a person should know.

    Args:
        name: for programs; it does not change.
        severity: `info` is a fact, a `notice` deserves a look, a `warning` most likely spoils the result.
        text: what is so, and what to do about it.
        places: some of the rows that it is about.
        figures: the numbers behind it.
    """

    name: str
    severity: Severity
    text: str
    places: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As `audit.json` holds it."""
        return {**asdict(self), "places": list(self.places), "figures": dict(self.figures)}


def find_in_rows(
    rows: Sequence[EncodedRow], dropped: Sequence[Dropped] = (), *, decode: Decode | None = None,
    origins: Mapping[str, Sequence[str | None]] | None = None, reasons: Mapping[str, int] | None = None,
    facts: RowFacts | None = None,
) -> list[Finding]:
    """Everything that one set of rows says about itself; warnings first.

    Args:
        rows: after truncation.
        dropped: those that were left out.
        decode: ids to text, to look into the answers; without it they are not looked into.
        origins: for columns of `ORIGINS`, the value of each row; None where a row has no plain one.
        reasons: how many were left out and why, commonest first, where `dropped` lists only some of them.
        facts: of the rows, if they are known already.
    """
    facts = facts_of(rows) if facts is None else facts
    if reasons is None:
        reasons = dict(Counter(str(drop.reason) for drop in dropped).most_common())
    found = [*_tokens(facts), *_balance(facts), *_left_out(len(rows), dropped, reasons), *_cuts(rows, facts),
             *_texts(rows, facts), *_duplicates(rows, facts), *_both_labels(rows, facts), *_both_orders(rows, facts),
             *_nothing_said(rows, facts), *_length(facts)]
    if decode is not None:
        found += _refusals(rows, facts, decode)
    for column, values in (origins or {}).items():
        found += _origins(column, values, facts)
    return by_severity(found)


def by_severity(found: Sequence[Finding]) -> list[Finding]:
    """Warnings, then notices, then facts."""
    order = ("warning", "notice", "info")
    return sorted(found, key=lambda finding: order.index(finding.severity))


def leakage(train: Sequence[EncodedRow], evaluation: Sequence[EncodedRow]) -> list[Finding]:
    """Evaluation rows whose prompt, or whose conversation's beginning, is trained on."""
    if not len(train) or not len(evaluation):
        return []
    seen, held = facts_of(train), facts_of(evaluation)
    asked = np.isin(held.prompt, seen.prompt)
    same, begun = np.flatnonzero(asked), np.flatnonzero(np.isin(held.split, seen.split) & ~asked)
    if not len(same) and not len(begun):
        return []
    # Completions of the training rows that matter, then of the evaluation rows, in one numbering with their prompts.
    known = np.flatnonzero(np.isin(seen.prompt, held.prompt))
    row, side = np.nonzero(np.concatenate([seen.tokens[known], held.tokens[same]]))
    answers = groups(np.concatenate([seen.prompt[known], held.prompt[same]])[row],
                     np.concatenate([seen.completion[known], held.completion[same]])[row, side])
    ours = row < len(known)
    copied = len(np.unique(row[~ours][np.isin(answers[~ours], answers[ours])]))
    return [Finding(
        "leakage", "warning",
        f"evaluation rows that ask what training rows ask: {len(same)} ({copied} with the same answer), and "
        f"{len(begun)} more that begin like one. Figures on them are not held out: take them out of one of the files, "
        "or use --eval-fraction, which never splits a prompt", _places(evaluation, np.concatenate([same, begun])),
        {"same_prompt": len(same), "same_answer": copied, "same_beginning": len(begun)})]


def histogram(values: npt.ArrayLike) -> list[tuple[int, int, int]]:
    """(from, up to and including, count) in bins that double, from the shortest to the longest."""
    lengths = np.asarray(values)
    if not len(lengths):
        return []
    powers = np.frexp(np.maximum(lengths - 1, 0))[1]  # bits of a whole number
    bins = np.bincount(powers)
    return [(1 if power == 0 else 2 ** (power - 1) + 1, 2**power, int(bins[power]))
            for power in range(int(powers.min()), len(bins))]


# --- one function per finding -----------------------------------------------------------------------------------------


def _tokens(facts: RowFacts) -> Iterator[Finding]:
    flat = facts.flat_tokens
    if not flat:
        return
    repeated, prompts = facts.repeated_tokens, int(facts.prompt_numbers.max()) + 1
    text = f"an epoch has {flat:,} tokens; {percent(repeated / flat)} of them repeat a prompt"
    yield Finding("tokens", "info", text, (), {"flat": flat, "repeated_prompt": repeated, "prompts": prompts})


def _balance(facts: RowFacts) -> Iterator[Finding]:
    good, bad = facts.classes
    if not good and not bad:
        return
    weights = class_weights(good, bad, "auto", "auto")
    figures = {"desirable": good, "undesirable": bad, "auto_desirable_weight": weights[0],
               "auto_undesirable_weight": weights[1]}
    if not good or not bad:
        yield Finding("one_class", "warning", f"{good} desirable / {bad} undesirable: KTO needs both. With answers you "
                      "like only, supervised fine-tuning is the method", (), figures)
        return
    text = (f"{good} desirable / {bad} undesirable; --desirable-weight auto --undesirable-weight auto would weigh them "
            f"{weights[0]:.3g} and {weights[1]:.3g}")
    lopsided = max(good, bad) > 10 * min(good, bad)
    if lopsided:
        text += ". The small class is below a tenth: look whether its rows are enough to learn from"
    yield Finding("balance", "notice" if lopsided else "info", text, (), figures)


def _left_out(kept: int, dropped: Sequence[Dropped], reasons: Mapping[str, int]) -> Iterator[Finding]:
    total = sum(reasons.values())
    if not total:
        return
    share = total / (kept + total)
    yield Finding("left_out", "warning" if share > 0.1 else "notice",
                  f"rows left out: {total} ({percent(share)}), "
                  + ", ".join(f"{count} {reason}" for reason, count in reasons.items())
                  + ". Mend them, or take them out of the file", tuple(drop.place for drop in dropped[:_LISTED]),
                  dict(reasons))


def _cuts(rows: Sequence[EncodedRow], facts: RowFacts) -> Iterator[Finding]:
    for note, what, remedy in (
        ("prompt_cut", "prompts that were cut from the left",
         "raise --max-length or --max-prompt-length where the model and the memory allow it"),
        ("completion_cut", "completions that were cut and have no terminator",
         "raise --max-length, or leave them out: a cut answer teaches no end"),
    ):
        if len(cut := facts.notes.get(note, ())):
            places = _places(rows, cut)
            yield Finding(note, "warning" if len(cut) > 0.1 * len(rows) else "notice",
                          f"{what}: {len(cut)} ({percent(len(cut) / len(rows))}, first {places[0]}); {remedy}",
                          places, {"rows": len(cut)})


def _texts(rows: Sequence[EncodedRow], facts: RowFacts) -> Iterator[Finding]:
    for note, bad, text in (
        ("eos_added", 2.0, "the chat template does not end the answers of {rows}: one eos was added to each"),
        ("text_changed", 0.1, "rows that do not read back as written: {count} (first {first}). Tokenizer or template "
         "changes their text; `tropism inspect` shows how"),
        ("unseen", 0.1, "rows with an answer that nobody sees, of zero width or control characters: {count} (first "
         "{first}). They are trained as they are; take them out if they are not meant"),
        ("control_spelled", 2.0, "rows that spell control tokens in their text: {count} (first {first}). These are "
         "trained as plain characters"),
    ):
        if len(noted := facts.notes.get(note, ())):
            places = _places(rows, noted)
            yield Finding(note, "warning" if len(noted) > bad * len(rows) else "notice",
                          text.format(rows=_n(len(noted), "row"), count=len(noted), first=places[0]), places,
                          {"rows": len(noted)})


def _duplicates(rows: Sequence[EncodedRow], facts: RowFacts) -> Iterator[Finding]:
    again = np.ones(len(facts), dtype=np.bool_)
    again[first_of(groups(facts.row_numbers, facts.desirable))] = False
    if count := int(again.sum()):
        places = _places(rows, np.flatnonzero(again))
        yield Finding("duplicates", "notice" if count > 0.01 * len(rows) else "info",
                      f"rows that repeat an earlier one in every token: {count} (first {places[0]}). They count as "
                      "often as they occur; take them out if that is not meant", places, {"rows": count})


def both_labels(facts: RowFacts) -> Integers:
    """For each completion of a prompt that carries both labels, the first row that contradicts an earlier one."""
    labeled = np.flatnonzero(facts.desirable >= 0)
    answers, labels = groups(facts.row_numbers[labeled]), facts.desirable[labeled]
    against = np.flatnonzero(labels != labels[first_of(answers)][answers])
    return labeled[np.sort(against[first_of(answers[against])])]


def _both_labels(rows: Sequence[EncodedRow], facts: RowFacts) -> Iterator[Finding]:
    if count := len(found := both_labels(facts)):
        places = _places(rows, found)
        yield Finding("both_labels", "warning" if count > 0.01 * len(rows) else "notice",
                      f"completions that carry both labels: {count} (first {places[0]}). They cancel out; "
                      "decide, or take them out", places, {"completions": count})


def _both_orders(rows: Sequence[EncodedRow], facts: RowFacts) -> Iterator[Finding]:
    pairs = np.flatnonzero((facts.desirable < 0) & (facts.tokens[:, 1] > 0))
    chosen, rejected = facts.completion[pairs].T
    # Two numbers for each prompt with two completions: one for either being the chosen one.
    both = 2 * groups(facts.prompt[pairs], np.minimum(chosen, rejected), np.maximum(chosen, rejected))
    first = np.full(2 * len(pairs), len(pairs))
    own = first_of(orders := both + (chosen > rejected))
    first[orders[own]] = own
    found = pairs[first[both + (chosen < rejected)] < np.arange(len(pairs))]
    if count := len(found):
        places = _places(rows, found)
        yield Finding("both_orders", "warning" if count > 0.01 * len(rows) else "notice",
                      f"pairs that prefer what another pair of the same prompt rejects: {count} (first {places[0]}). "
                      "They cancel out; decide, or take them out", places, {"pairs": count})


def _nothing_said(rows: Sequence[EncodedRow], facts: RowFacts) -> Iterator[Finding]:
    """Answers of one supervised token: a terminator, or as good as that."""
    if count := len(found := np.flatnonzero((facts.learned == 1).any(axis=1))):
        places = _places(rows, found)
        yield Finding("one_token", "warning" if count > 0.1 * len(rows) else "notice",
                      f"rows with an answer of a single token: {count} (first {places[0]}). It is nothing but an end, "
                      "or what truncation left; look at them", places, {"rows": count})


def _length(facts: RowFacts) -> Iterator[Finding]:
    """How well length alone tells the better answer: 0.5 is not at all."""
    one, other = (facts.learned[rows, sides] for rows, sides in _sides(facts))
    if min(len(one), len(other)) < _ENOUGH:
        return
    paired = not facts.labeled
    value = float(np.mean(np.sign(one - other) / 2 + 0.5)) if paired else _auc(one, other)
    strong = abs(value - 0.5)
    name = "chosen" if paired else "desirable"
    text = (f"{name} answers have {np.mean(one):.0f} tokens on average, the others {np.mean(other):.0f}: length alone "
            f"tells them apart with {'accuracy' if paired else 'AUC'} {value:.2f}")
    if strong > 0.1:
        text += (f". The model may learn to be {'long' if value > 0.5 else 'short'} instead of good: compare every "
                 "result with the length baseline")
    yield Finding("length", "warning" if strong > 0.25 else "notice" if strong > 0.1 else "info", text, (),
                  {"auc": value, "mean_good": float(np.mean(one)), "mean_bad": float(np.mean(other))})


def _refusals(rows: Sequence[EncodedRow], facts: RowFacts, decode: Decode) -> Iterator[Finding]:
    """How often an answer of each kind opens with a refusal."""
    sides = _sides(facts)
    read = [[(int(found[i]), int(side[i])) for i in evenly_spaced(len(found), _READ)] for found, side in sides]
    hits = [[row for row, side in some if refuses(decode(rows[row].completions[side].ids[:_OPENING].tolist()))]
            for some in read]
    if not any(hits):
        return
    rates = [len(hit) / max(len(some), 1) for hit, some in zip(hits, read, strict=True)]
    names = ("desirable", "undesirable") if facts.labeled else ("chosen", "rejected")
    if not read[1]:
        text, gap = f"answers that open with a refusal: {len(hits[0])} ({percent(rates[0])})", 0.0
    else:
        text = (f"{percent(rates[0])} of the {names[0]} and {percent(rates[1])} of the {names[1]} answers open with "
                "a refusal (\"I'm sorry\", \"As an AI\", ...)")
        gap = abs(rates[0] - rates[1]) if min(map(len, read)) >= _ENOUGH else 0.0
    if any(len(some) < len(found) for some, (found, _) in zip(read, sides, strict=True)):
        text += ", going by " + " and ".join(f"{len(some):,} of {len(found):,}" for some, (found, _) in
                                             zip(read, sides, strict=True) if some) + " answers, evenly spread"
    if gap > 0.05:
        more = "more" if rates[0] > rates[1] else "less"
        text += f": the label is tied to it, so the model will learn to refuse {more}. Fine if that is the aim"
    yield Finding("refusals", "warning" if gap > 0.25 else "notice" if gap > 0.05 else "info", text,
                  _places(rows, [*hits[0], *hits[1]]), dict(zip(names, rates, strict=True)))


def refuses(text: str) -> bool:
    """Whether the beginning of an answer is a refusal, or says that an AI is speaking."""
    return _REFUSAL.match(text.replace("\u2019", "'").lower()) is not None


def _origins(column: str, values: Sequence[str | None], facts: RowFacts) -> Iterator[Finding]:
    """Columns that say where a row comes from: one value that dominates, or values that tell the label."""
    met = Counter(zip(values, facts.desirable.tolist(), strict=True))
    counts: Counter[str] = Counter()
    verdicts: dict[str, list[int]] = {}  # of each value: undesirable rows, desirable rows
    for (value, label), count in met.items():
        if value is not None:
            counts[value] += count
            if label >= 0:
                verdicts.setdefault(value, [0, 0])[label] += count
    named = counts.total()
    if named < max(_ENOUGH, len(facts) / 2) or len(counts) < 2:
        return
    top, most = counts.most_common(1)[0]
    if (share := most / named) > 0.5:
        yield Finding(f"dominated_by_{column}", "notice",
                      f"{percent(share)} of the rows have {column} {top!r}, one of {len(counts)}: the result will "
                      "be its taste; take fewer of its rows if that is not meant", (),
                      {"rows": most, "values": len(counts)})
    if len(verdicts) < 2 or len(counts) > named / 5:  # a value that occurs once tells its label always
        return
    total = sum(map(sum, verdicts.values()))
    likelier = max(sum(labels[side] for labels in verdicts.values()) for side in (0, 1))
    told = sum(map(max, verdicts.values()))
    if (told - likelier) / total > 0.2:
        yield Finding(f"label_from_{column}", "warning",
                      f"{column} alone tells {percent(told / total)} of the labels ({percent(likelier / total)} "
                      "would be right by always saying the same): the model may learn whose answer it is instead "
                      "of how good", (), {"told": told / total, "always_the_same": likelier / total})


def _sides(facts: RowFacts) -> tuple[tuple[Integers, Integers], tuple[Integers, Integers]]:
    """Better and worse answers, as row and side of each; without labels all are on the better side."""
    good, bad = np.flatnonzero(facts.desirable != 0), np.flatnonzero(facts.desirable == 0)
    others = np.flatnonzero((facts.desirable < 0) & (facts.tokens[:, 1] > 0))
    return ((good, np.zeros_like(good)),
            (np.concatenate([bad, others]), np.repeat(np.array([0, 1]), [len(bad), len(others)])))


def _auc(good: Integers, bad: Integers) -> float:
    """Chance that a good one is larger than a bad one; ties count one half."""
    ordered = np.sort(bad)
    below = np.searchsorted(ordered, good, "left") + np.searchsorted(ordered, good, "right")
    return float(below.mean() / 2 / len(ordered))


def _places(rows: Sequence[EncodedRow], numbers: Sequence[int] | Integers) -> tuple[str, ...]:
    return tuple(rows[int(number)].place for number in numbers[:_LISTED])


def _n(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def percent(share: float) -> str:
    """A share as people read it: two digits below a tenth."""
    return f"{100 * share:.0f} %" if share >= 0.1 or share == 0 else f"{100 * share:.1f} %"
