"""What a set of rows is like, and what that means for training: pure functions from rows to sentences."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from tropism.data.pack import plant
from tropism.data.rows import Dropped, EncodedRow
from tropism.data.schedule import Schedule

Severity = Literal["info", "notice", "warning"]
Decode = Callable[[list[int]], str]

_ENOUGH = 20  # rows of each kind below which a share or an AUC says nothing
_LISTED = 10  # places that a finding names
_OPENING = 48  # tokens of an answer in which a refusal is looked for
_REFUSAL = re.compile(
    r"\W*(i'?m (very )?sorry|i am (very )?sorry|sorry,|i apologi[sz]e|i cannot|i can'?t|i'?m (unable|not able)|"
    r"i am (unable|not able)|unfortunately, i )|.*\bas an? (ai|(large )?language model)\b", re.DOTALL)
_ORIGINS = ("source", "dataset", "origin", "annotator", "annotator_id", "rater", "voter", "user_id", "worker_id")


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


def of_rows(rows: Sequence[EncodedRow], dropped: Sequence[Dropped] = (), *, decode: Decode | None = None,
            records: Mapping[str, Mapping[str, Any]] | None = None) -> list[Finding]:
    """Everything that one set of rows says about itself; warnings first.

    Args:
        rows: after truncation.
        dropped: those that were left out.
        decode: ids to text, to look into the answers; without it they are not looked into.
        records: the records as they were read, by place, to see where rows come from.
    """
    found = [*_tokens(rows), *_balance(rows), *_left_out(rows, dropped), *_cuts(rows), *_texts(rows),
             *_duplicates(rows), *_both_labels(rows), *_both_orders(rows), *_nothing_said(rows), *_length(rows)]
    if decode is not None:
        found += _refusals(rows, decode)
    if records is not None:
        found += _origins(rows, records)
    return by_severity(found)


def by_severity(found: Sequence[Finding]) -> list[Finding]:
    """Warnings, then notices, then facts."""
    order = ("warning", "notice", "info")
    return sorted(found, key=lambda finding: order.index(finding.severity))


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


def leakage(train: Sequence[EncodedRow], evaluation: Sequence[EncodedRow]) -> list[Finding]:
    """Evaluation rows whose prompt, or whose conversation's beginning, is trained on."""
    opened, asked = {row.split_key for row in train}, {row.prompt_key for row in train}
    answered = {(row.prompt_key, completion.key) for row in train for completion in row.completions}
    same = [row for row in evaluation if row.prompt_key in asked]
    begun = [row for row in evaluation if row.split_key in opened and row.prompt_key not in asked]
    if not same and not begun:
        return []
    copied = sum(any((row.prompt_key, completion.key) in answered for completion in row.completions) for row in same)
    return [Finding(
        "leakage", "warning",
        f"evaluation rows that ask what training rows ask: {len(same)} ({copied} with the same answer), and "
        f"{len(begun)} more that begin like one. Figures on them are not held out: take them out of one of the files, "
        "or use --eval-fraction, which never splits a prompt",
        _places([*same, *begun]), {"same_prompt": len(same), "same_answer": copied, "same_beginning": len(begun)})]


def layout_savings(rows: Sequence[EncodedRow], batch_size: int, *, seed: int = 0, shuffle: bool = True) -> Finding:
    """What one epoch computes: every completion with its own prompt, as trees, and as trees of whole prompts."""
    numbers: dict[bytes, int] = {}
    prompts = tuple(numbers.setdefault(row.prompt_key, len(numbers)) for row in rows)
    flat = sum(row.flat_tokens for row in rows)
    computed = []
    for group in (False, True):
        plan = Schedule(prompts, batch_size, seed, shuffle=shuffle, group_prompts=group)
        computed.append(sum(planted.tree.tokens for step in range(1, plan.total_steps + 1)
                            for planted in plant(rows, plan.step(step))))
    trees, grouped = computed
    text = (f"with steps of {batch_size} rows the tree layout computes {trees:,} of {flat:,} tokens an epoch "
            f"({_percent(1 - trees / flat)} saved); with --group-prompts {grouped:,} ({_percent(1 - grouped / flat)} "
            "saved)")
    worth = trees - grouped > 0.1 * flat
    if worth:
        text += ". --group-prompts is worth it here, if seeing all answers of a prompt in one step is fine for you"
    return Finding("layout", "notice" if worth else "info", text, (), {
        "batch_size": batch_size, "flat_tokens": flat, "tree_tokens": trees, "grouped_tokens": grouped})


def histogram(values: Sequence[int]) -> list[tuple[int, int, int]]:
    """(from, up to and including, count) in bins that double, from the shortest to the longest."""
    if not values:
        return []
    bins = Counter(max(value - 1, 0).bit_length() for value in values)
    return [(1 if power == 0 else 2 ** (power - 1) + 1, 2**power, bins[power])
            for power in range(min(bins), max(bins) + 1)]


# --- one function per finding -----------------------------------------------------------------------------------------


def _tokens(rows: Sequence[EncodedRow]) -> Iterator[Finding]:
    flat = sum(row.flat_tokens for row in rows)
    if not flat:
        return
    prompts = {row.prompt_key: len(row.prompt_ids) for row in rows}
    repeated = sum(len(row.prompt_ids) * len(row.completions[:2]) for row in rows) - sum(prompts.values())
    text = f"an epoch has {flat:,} tokens; {_percent(repeated / flat)} of them repeat a prompt"
    yield Finding("tokens", "info", text, (),
                  {"flat": flat, "repeated_prompt": repeated, "prompts": len(prompts)})


def _balance(rows: Sequence[EncodedRow]) -> Iterator[Finding]:
    labels = [row.desirable for row in rows if row.desirable is not None]
    if not labels:
        return
    good, bad = sum(labels), len(labels) - sum(labels)
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


def _left_out(rows: Sequence[EncodedRow], dropped: Sequence[Dropped]) -> Iterator[Finding]:
    if not dropped:
        return
    reasons = Counter(str(drop.reason) for drop in dropped)
    share = len(dropped) / (len(rows) + len(dropped))
    yield Finding("left_out", "warning" if share > 0.1 else "notice",
                  f"rows left out: {len(dropped)} ({_percent(share)}), "
                  + ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
                  + ". Mend them, or take them out of the file", tuple(drop.place for drop in dropped[:_LISTED]),
                  dict(reasons))


def _cuts(rows: Sequence[EncodedRow]) -> Iterator[Finding]:
    for note, what, remedy in (
        ("prompt_cut", "prompts that were cut from the left",
         "raise --max-length or --max-prompt-length where the model and the memory allow it"),
        ("completion_cut", "completions that were cut and have no terminator",
         "raise --max-length, or leave them out: a cut answer teaches no end"),
    ):
        if cut := [row for row in rows if note in row.notes]:
            yield Finding(note, "warning" if len(cut) > 0.1 * len(rows) else "notice",
                          f"{what}: {len(cut)} ({_percent(len(cut) / len(rows))}, first {cut[0].place}); {remedy}",
                          _places(cut), {"rows": len(cut)})


def _texts(rows: Sequence[EncodedRow]) -> Iterator[Finding]:
    for note, bad, text in (
        ("eos_added", 2.0, "the chat template does not end the answers of {rows}: one eos was added to each"),
        ("text_changed", 0.1, "rows that do not read back as written: {count} (first {first}). Tokenizer or template "
         "changes their text; `tropism inspect` shows how"),
        ("control_spelt", 2.0, "rows that spell control tokens in their text: {count} (first {first}). These are "
         "trained as plain characters"),
    ):
        if noted := [row for row in rows if note in row.notes]:
            yield Finding(note, "warning" if len(noted) > bad * len(rows) else "notice",
                          text.format(rows=_n(len(noted), "row"), count=len(noted), first=noted[0].place),
                          _places(noted), {"rows": len(noted)})


def _duplicates(rows: Sequence[EncodedRow]) -> Iterator[Finding]:
    seen: set[tuple[Any, ...]] = set()
    again = []
    for row in rows:
        key = (row.prompt_key, row.desirable, *(completion.key for completion in row.completions[:2]))
        if key in seen:
            again.append(row)
        seen.add(key)
    if again:
        yield Finding("duplicates", "notice" if len(again) > 0.01 * len(rows) else "info",
                      f"rows that repeat an earlier one in every token: {len(again)} (first {again[0].place}). They "
                      "count as often as they occur; take them out if that is not meant", _places(again),
                      {"rows": len(again)})


def both_labels(rows: Sequence[EncodedRow]) -> list[EncodedRow]:
    """For each completion of a prompt that carries both labels, the first row that contradicts an earlier one."""
    seen: dict[tuple[bytes, bytes], bool] = {}
    found: dict[tuple[bytes, bytes], EncodedRow] = {}
    for row in rows:
        if row.desirable is not None:
            key = (row.prompt_key, row.completions[0].key)
            if seen.setdefault(key, row.desirable) != row.desirable:
                found.setdefault(key, row)
    return list(found.values())


def _both_labels(rows: Sequence[EncodedRow]) -> Iterator[Finding]:
    if found := both_labels(rows):
        yield Finding("both_labels", "warning" if len(found) > 0.01 * len(rows) else "notice",
                      f"completions that carry both labels: {len(found)} (first {found[0].place}). They cancel out; "
                      "decide, or take them out", _places(found), {"completions": len(found)})


def _both_orders(rows: Sequence[EncodedRow]) -> Iterator[Finding]:
    seen: set[tuple[bytes, bytes, bytes]] = set()
    found = []
    for row in rows:
        if row.desirable is None and len(row.completions) >= 2:
            chosen, rejected = (completion.key for completion in row.completions[:2])
            if (row.prompt_key, rejected, chosen) in seen:
                found.append(row)
            seen.add((row.prompt_key, chosen, rejected))
    if found:
        yield Finding("both_orders", "warning" if len(found) > 0.01 * len(rows) else "notice",
                      f"pairs that prefer what another pair of the same prompt rejects: {len(found)} (first "
                      f"{found[0].place}). They cancel out; decide, or take them out", _places(found),
                      {"pairs": len(found)})


def _nothing_said(rows: Sequence[EncodedRow]) -> Iterator[Finding]:
    """Answers of one supervised token: a terminator, or as good as that."""
    found = [row for row in rows if any(completion.length == 1 for completion in row.completions[:2])]
    if found:
        yield Finding("one_token", "warning" if len(found) > 0.1 * len(rows) else "notice",
                      f"rows with an answer of a single token: {len(found)} (first {found[0].place}). It is nothing "
                      "but an end, or what truncation left; look at them", _places(found), {"rows": len(found)})


def _length(rows: Sequence[EncodedRow]) -> Iterator[Finding]:
    """How well length alone tells the better answer: 0.5 is not at all."""
    good, bad = _sides(rows)
    if min(len(good), len(bad)) < _ENOUGH:
        return
    paired = rows[0].desirable is None
    one, other = ([completion.length for _, completion in side] for side in (good, bad))
    value = float(np.mean(np.sign(np.subtract(one, other)) / 2 + 0.5)) if paired else _auc(one, other)
    strong = abs(value - 0.5)
    name = "chosen" if paired else "desirable"
    text = (f"{name} answers have {np.mean(one):.0f} tokens on average, the others {np.mean(other):.0f}: length alone "
            f"tells them apart with {'accuracy' if paired else 'AUC'} {value:.2f}")
    if strong > 0.1:
        text += (f". The model may learn to be {'long' if value > 0.5 else 'short'} instead of good: compare every "
                 "result with the length baseline")
    yield Finding("length", "warning" if strong > 0.25 else "notice" if strong > 0.1 else "info", text, (),
                  {"auc": value, "mean_good": float(np.mean(one)), "mean_bad": float(np.mean(other))})


def _refusals(rows: Sequence[EncodedRow], decode: Decode) -> Iterator[Finding]:
    """How often an answer of each kind opens with a refusal."""
    sides = _sides(rows)
    hits = [[row for row, completion in side if refuses(decode(completion.ids[:_OPENING].tolist()))] for side in sides]
    if not any(hits):
        return
    rates = [len(hit) / max(len(side), 1) for hit, side in zip(hits, sides, strict=True)]
    names = ("chosen", "rejected") if rows[0].desirable is None else ("desirable", "undesirable")
    if not sides[1]:
        text, gap = f"answers that open with a refusal: {len(hits[0])} ({_percent(rates[0])})", 0.0
    else:
        text = (f"{_percent(rates[0])} of the {names[0]} and {_percent(rates[1])} of the {names[1]} answers open with "
                "a refusal (\"I'm sorry\", \"As an AI\", ...)")
        gap = abs(rates[0] - rates[1]) if min(map(len, sides)) >= _ENOUGH else 0.0
    if gap > 0.05:
        more = "more" if rates[0] > rates[1] else "less"
        text += f": the label is tied to it, so the model will learn to refuse {more}. Fine if that is the aim"
    yield Finding("refusals", "warning" if gap > 0.25 else "notice" if gap > 0.05 else "info", text,
                  _places([*hits[0], *hits[1]]), dict(zip(names, rates, strict=True)))


def refuses(text: str) -> bool:
    """Whether the beginning of an answer is a refusal, or says that an AI is speaking."""
    return _REFUSAL.match(text.replace("\u2019", "'").lower()) is not None


def _origins(rows: Sequence[EncodedRow], records: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Columns that say where a row comes from: one value that dominates, or values that tell the label."""
    for column in _ORIGINS:
        named = [(row, str(value)) for row in rows
                 if isinstance(value := records.get(row.place, {}).get(column), str | int)]
        counts = Counter(value for _, value in named)
        if len(named) < max(_ENOUGH, len(rows) / 2) or len(counts) < 2:
            continue
        (top, most), share = counts.most_common(1)[0], counts.most_common(1)[0][1] / len(named)
        if share > 0.5:
            yield Finding(f"dominated_by_{column}", "notice",
                          f"{_percent(share)} of the rows have {column} {top!r}, one of {len(counts)}: the result will "
                          "be its taste; take fewer of its rows if that is not meant", (),
                          {"rows": most, "values": len(counts)})
        verdicts: defaultdict[str, list[bool]] = defaultdict(list)
        for row, value in named:
            if row.desirable is not None:
                verdicts[value].append(row.desirable)
        if len(verdicts) < 2 or len(counts) > len(named) / 5:  # a value that occurs once tells its label always
            continue
        total = sum(map(len, verdicts.values()))
        likelier = max(sum(map(sum, verdicts.values())), total - sum(map(sum, verdicts.values())))
        told = sum(max(sum(labels), len(labels) - sum(labels)) for labels in verdicts.values())
        if (told - likelier) / total > 0.2:
            yield Finding(f"label_from_{column}", "warning",
                          f"{column} alone tells {_percent(told / total)} of the labels ({_percent(likelier / total)} "
                          "would be right by always saying the same): the model may learn whose answer it is instead "
                          "of how good", (), {"told": told / total, "always_the_same": likelier / total})


def _sides(rows: Sequence[EncodedRow]) -> tuple[list[tuple[EncodedRow, Any]], list[tuple[EncodedRow, Any]]]:
    """Better and worse answers with their rows; without labels all are on the better side."""
    good = [(row, row.completions[0]) for row in rows if row.desirable is not False]
    bad = [(row, row.completions[0]) for row in rows if row.desirable is False]
    bad += [(row, row.completions[1]) for row in rows if row.desirable is None and len(row.completions) >= 2]
    return good, bad


def _auc(good: Sequence[int], bad: Sequence[int]) -> float:
    """Chance that a good one is larger than a bad one; ties count one half."""
    ordered = np.sort(bad)
    below = np.searchsorted(ordered, good, "left") + np.searchsorted(ordered, good, "right")
    return float(below.mean() / 2 / len(ordered))


def _places(rows: Sequence[EncodedRow]) -> tuple[str, ...]:
    return tuple(row.place for row in rows[:_LISTED])


def _n(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 or share == 0 else f"{100 * share:.1f} %"
