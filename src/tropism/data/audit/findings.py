"""Findings about a set of rows: pure functions from rows to texts that say what is wrong and what to do."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tropism.data.class_weights import class_weights
from tropism.data.row_facts import Integers, RowFacts, evenly_spaced, facts_of, first_of, groups
from tropism.data.rows import Dropped, EncodedRow, Reason
from tropism.errors import count_of

Severity = Literal["info", "notice", "warning"]
Decode = Callable[[list[int]], str]

_ENOUGH = 20  # rows of each class that a share or an AUC needs
_LISTED = 10  # places that a finding names
_OPENING = 48  # tokens of a completion that are searched for a refusal
_READ = 20_000  # completions of each class that are read: enough for a share to within a third of a point
_REFUSAL = re.compile(
    r"\W*(i'?m (very )?sorry|i am (very )?sorry|sorry,|i apologi[sz]e|i cannot|i can'?t|i'?m (unable|not able)|"
    r"i am (unable|not able)|unfortunately, i )|.*\bas an? (ai|(large )?language model)\b", re.DOTALL)
ORIGINS = ("source", "dataset", "origin", "annotator", "annotator_id", "rater", "voter", "user_id", "worker_id")
"""Columns with the origin of a row."""

# Notes of rows, the share of rows above which one is a warning, and its text.
_NOTED: tuple[tuple[str, float, str], ...] = (
    ("prompt_cut", 0.1, "the prompt of {count} was truncated on the left ({share}, first {first}). Raise --max-length "
     "or --max-prompt-length if model and memory allow it."),
    ("completion_cut", 0.1, "a completion of {count} was truncated and has no terminator ({share}, first {first}). "
     "Raise --max-length, or drop these rows with --overlong drop: a truncated completion does not teach the model to "
     "stop."),
    ("eos_added", 1.0, "the chat template does not terminate the completions of {count} (first {first}). One EOS was "
     "added to each."),
    ("text_changed", 0.1, "the tokenizer or template changes the text of {count} (first {first}). Training uses the "
     "changed text. `tropism inspect` shows it."),
    ("unseen", 0.1, "a completion of {count} has only invisible characters (first {first}). Training uses it "
     "unchanged. Remove these rows if that is not intended."),
    ("earlier_marked", 1.0, "the messages of {count} say whether to train on them (first {first}), but --supervise "
     "last trains on the last one only. To train on every assistant message that is not excluded, use --supervise "
     "all."),
    ("others_marked", 1.0, "a message of {count} is marked to be trained on, but is not the assistant's (first "
     "{first}). Training is on assistant messages only."),
    ("control_spelled", 1.0, "the text of {count} contains control tokens (first {first}). They are encoded as plain "
     "characters."),
    ("control_kept", 1.0, "the text of {count} contains control tokens (first {first}), which stay control tokens "
     "(--control-tokens keep). They can open or end a turn."),
    ("turn_spelled", 0.0, "the text of {count} contains tokens with which the chat template marks turns (first "
     "{first}). The tokenizer does not list them as special, so they stay tokens, in training and in generation, and "
     "can open a turn. Remove them from the text, or stop at such rows with --control-tokens refuse."),
    ("thought_hidden", 0.0, "a thought of {count} is not trained, since the chat template does not show it (first "
     "{first}). Move it to the key that the template reads (reasoning_content, reasoning or thinking), or into the "
     "content as <think>...</think>. If the generation prompt closes the thought, set --chat-template-kwargs "
     "enable_thinking=true. Otherwise choose another --chat-template."),
    ("thought_open", 0.0, "a completion of {count} is inside a thought that it never closes (first {first}), so the "
     "model learns to answer within its thoughts. Begin these completions with a thought and </think>, or use a "
     "generation prompt without an open thought: --chat-template-kwargs enable_thinking=false if the template reads "
     "it, or another --chat-template."),
    ("thought_restored", 1.0, "the chat template removes the thought of {count} (first {first}), but its generation "
     "prompt opens one. These completions are trained with their thoughts, as generation writes them."),
    ("system_hidden", 0.0, "the chat template does not show a system message of {count} as it is written (first "
     "{first}). Put its text into the first user message, or choose another template with --chat-template."),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact about the data, for engineers who decide what to fix.

    Args:
        name: stable name, for programs.
        severity: `info` needs no action, `notice` may need one, `warning` probably harms the result.
        text: the count, its consequence, and the remedy.
        places: of the first rows concerned.
        figures: the numbers behind the text.
    """

    name: str
    severity: Severity
    text: str
    places: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def word(self) -> str:
        """The word before it in the log of a run."""
        return "warning" if self.severity == "warning" else "note"

    def to_json(self) -> dict[str, Any]:
        """As in `audit.json`."""
        return {**asdict(self), "places": list(self.places), "figures": dict(self.figures)}


def find_in_rows(
    rows: Sequence[EncodedRow], dropped: Sequence[Dropped] = (), *, decode: Decode | None = None,
    origins: Mapping[str, Sequence[str | None]] | None = None, reasons: Mapping[str, int] | None = None,
    facts: RowFacts | None = None,
) -> list[Finding]:
    """All findings about one set of rows, warnings first.

    Args:
        rows: after truncation.
        dropped: dropped rows, or the first of them.
        decode: ids to text; None skips the findings that need text.
        origins: for columns of `ORIGINS`, the value of each row; None for a row without one.
        reasons: number of dropped rows by reason, most frequent first; by default counted from `dropped`.
        facts: of the rows, if they are known already.
    """
    facts = facts_of(rows) if facts is None else facts
    if reasons is None:
        reasons = dict(Counter(str(drop.reason) for drop in dropped).most_common())
    found = [*_tokens(facts), *_weights(facts), *_balance(facts), *_dropped(len(rows), dropped, reasons),
             *_noted(rows, facts), *_duplicates(rows, facts), *_both_labels(rows, facts), *_both_orders(rows, facts),
             *_one_token(rows, facts), *_length(facts)]
    if decode is not None:
        found += _refusals(rows, facts, decode)
    for column, values in (origins or {}).items():
        found += _origins(column, values, facts)
    return by_severity(found)


def by_severity(found: Sequence[Finding]) -> list[Finding]:
    """Warnings first, then notices, then facts."""
    order = ("warning", "notice", "info")
    return sorted(found, key=lambda finding: order.index(finding.severity))


def leakage(train: Sequence[EncodedRow], evaluation: Sequence[EncodedRow], divisible: bool = True) -> list[Finding]:
    """Evaluation rows whose prompt before truncation, or whose first turns, are trained on.

    Args:
        divisible: `eval_fraction` could hold rows out.
    """
    if not len(train) or not len(evaluation):
        return []
    seen, held = facts_of(train), facts_of(evaluation)
    known_prompt = np.isin(held.prompt, seen.prompt)
    same, begun = np.flatnonzero(known_prompt), np.flatnonzero(np.isin(held.split, seen.split) & ~known_prompt)
    if not len(same) and not len(begun):
        return []
    # Completions of the training rows with such a prompt, then of the evaluation rows, numbered with their prompts.
    known = np.flatnonzero(np.isin(seen.prompt, held.prompt))
    row, side = np.nonzero(np.concatenate([seen.tokens[known], held.tokens[same]]))
    completions = groups(np.concatenate([seen.prompt[known], held.prompt[same]])[row],
                         np.concatenate([seen.completion[known], held.completion[same]])[row, side])
    trained = row < len(known)
    copied = len(np.unique(row[~trained][np.isin(completions[~trained], completions[trained])]))
    return [Finding(
        "leakage", "warning",
        f"the training data contains the prompt of {count_of(len(same), 'evaluation row')} ({copied} with the same "
        f"completion), and the beginning of {len(begun)} more. Metrics on these rows are not held-out metrics. Remove "
        + ("them from one of the files, or use --eval-fraction, which never splits a prompt." if divisible else
           "them from one of the two."),
        _places(evaluation, np.concatenate([same, begun])),
        {"same_prompt": len(same), "same_answer": copied, "same_beginning": len(begun)})]


def histogram(values: npt.ArrayLike) -> list[tuple[int, int, int]]:
    """Bins as (first, last, count). Their widths double from the shortest to the longest value."""
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
    text = f"an epoch has {flat:,} tokens, {percent(repeated / flat)} of them repeated prompts"
    yield Finding("tokens", "info", text, (), {"flat": flat, "repeated_prompt": repeated, "prompts": prompts})


def _weights(facts: RowFacts) -> Iterator[Finding]:
    if facts.weighted and facts.weight is not None:
        low, mean, high = (float(value) for value in (facts.weight.min(), facts.weight.mean(), facts.weight.max()))
        none = int((facts.weight == 0).sum())
        yield Finding("weights", "notice", "the rows have weights, by which training multiplies their loss: "
                      f"{low:g} to {high:g}, mean {mean:.3g}, {count_of(none, 'row')} with weight 0. To ignore them, "
                      "rename their column: --columns unused=weight", (),
                      {"min": low, "mean": mean, "max": high, "zero": none})


def _balance(facts: RowFacts) -> Iterator[Finding]:
    good, bad = facts.classes
    if not good and not bad:
        return
    weights = class_weights(good, bad, "auto", "auto")
    figures = {"desirable": good, "undesirable": bad, "auto_desirable_weight": weights[0],
               "auto_undesirable_weight": weights[1]}
    if not good or not bad:
        yield Finding("one_class", "warning", f"{good} desirable / {bad} undesirable rows: KTO needs both classes. To "
                      "train on desirable completions only, use `tropism sft`.", (), figures)
        return
    text = (f"{good} desirable / {bad} undesirable rows. --desirable-weight auto --undesirable-weight auto sets the "
            f"weights {weights[0]:.3g} and {weights[1]:.3g}.")
    lopsided = max(good, bad) > 10 * min(good, bad)
    if lopsided:
        text += " The smaller class is less than a tenth of the larger: check that its rows are enough to learn from."
    yield Finding("balance", "notice" if lopsided else "info", text, (), figures)


def _dropped(kept: int, dropped: Sequence[Dropped], reasons: Mapping[str, int]) -> Iterator[Finding]:
    total = sum(reasons.values())
    if not total:
        return
    share = (total - reasons.get(Reason.TOO_LONG, 0)) / (kept + total)  # which the user asked for
    yield Finding("left_out", "warning" if share > 0.1 else "notice",
                  f"training drops {count_of(total, 'row')} ({percent(total / (kept + total))}): "
                  + ", ".join(f"{count} {reason}" for reason, count in reasons.items())
                  + ". Fix or remove them.", tuple(drop.place for drop in dropped[:_LISTED]),
                  dict(reasons))


def _noted(rows: Sequence[EncodedRow], facts: RowFacts) -> Iterator[Finding]:
    for note, warn_above, text in _NOTED:
        yield from _about(note, rows, facts.notes.get(note, ()), warn_above, text)


def _about(name: str, rows: Sequence[EncodedRow], numbers: Sequence[int] | Integers, warn_above: float, text: str,
           noun: str = "row") -> Iterator[Finding]:
    """A finding about some rows, if there are any.

    Args:
        numbers: of the rows.
        warn_above: share of all rows above which it is a warning.
        text: with `{count}`, `{share}` and `{first}` (a place) to be filled in.
        noun: what is counted.
    """
    if count := len(numbers):
        places = _places(rows, numbers)
        filled = text.format(count=count_of(count, noun), share=percent(count / len(rows)), first=places[0])
        yield Finding(name, "warning" if count > warn_above * len(rows) else "notice", filled, places,
                      {f"{noun}s": count})


def _duplicates(rows: Sequence[EncodedRow], facts: RowFacts) -> Iterator[Finding]:
    again = np.ones(len(facts), dtype=np.bool_)
    again[first_of(groups(facts.row_numbers, facts.desirable))] = False
    if count := int(again.sum()):
        places = _places(rows, np.flatnonzero(again))
        yield Finding("duplicates", "notice" if count > 0.01 * len(rows) else "info",
                      f"the data contains {count_of(count, 'duplicate row')} with the prompt, completions and label of "
                      f"another (first {places[0]}). Each copy is used. Remove the copies if that is not intended.",
                      places, {"rows": count})


def both_labels(facts: RowFacts) -> Integers:
    """For each completion with both labels, the first row that contradicts an earlier one."""
    labeled = np.flatnonzero(facts.desirable >= 0)
    completions, labels = groups(facts.row_numbers[labeled]), facts.desirable[labeled]
    against = np.flatnonzero(labels != labels[first_of(completions)][completions])
    return labeled[np.sort(against[first_of(completions[against])])]


def _both_labels(rows: Sequence[EncodedRow], facts: RowFacts) -> Iterator[Finding]:
    yield from _about("both_labels", rows, both_labels(facts), 0.01,
                      "the data labels {count} both desirable and undesirable (first {first}). The labels cancel out. "
                      "Correct one, or remove the rows.", "completion")


def _both_orders(rows: Sequence[EncodedRow], facts: RowFacts) -> Iterator[Finding]:
    pairs = np.flatnonzero((facts.desirable < 0) & (facts.tokens[:, 1] > 0))
    chosen, rejected = facts.completion[pairs].T
    # Two numbers for each prompt with two completions, one for each of them as the chosen one.
    both = 2 * groups(facts.prompt[pairs], np.minimum(chosen, rejected), np.maximum(chosen, rejected))
    first = np.full(2 * len(pairs), len(pairs))
    own = first_of(orders := both + (chosen > rejected))
    first[orders[own]] = own
    yield from _about("both_orders", rows, pairs[first[both + (chosen < rejected)] < np.arange(len(pairs))], 0.01,
                      "the data contains {count} with the opposite preference of another pair (first {first}). The "
                      "preferences cancel out. Correct one, or remove the rows.", "pair")


def _one_token(rows: Sequence[EncodedRow], facts: RowFacts) -> Iterator[Finding]:
    yield from _about("one_token", rows, np.flatnonzero((facts.learned == 1).any(axis=1)), 0.1,
                      "a completion of {count} has a single token (first {first}). It is only a terminator, or "
                      "what truncation left. Check these rows.")


def _length(facts: RowFacts) -> Iterator[Finding]:
    """How well length alone predicts the better completion: 0.5 is not at all."""
    one, other = (facts.learned[rows, sides] for rows, sides in _sides(facts))
    if min(len(one), len(other)) < _ENOUGH:
        return
    paired = not facts.labeled
    value = float(np.mean(np.sign(one - other) / 2 + 0.5)) if paired else _auc(one, other)
    strong = abs(value - 0.5)
    names = _class_names(facts)
    text = (f"{names[0]} completions have {np.mean(one):.0f} tokens on average, {names[1]} ones {np.mean(other):.0f}. "
            f"Length alone separates them with {'accuracy' if paired else 'AUC'} {value:.2f}.")
    if strong > 0.1:
        text += (f" The model may learn to be {'long' if value > 0.5 else 'short'} instead of good: compare its "
                 "metrics with this baseline.")
    yield Finding("length", "warning" if strong > 0.25 else "notice" if strong > 0.1 else "info", text, (),
                  {"auc": value, "mean_good": float(np.mean(one)), "mean_bad": float(np.mean(other))})


def _refusals(rows: Sequence[EncodedRow], facts: RowFacts, decode: Decode) -> Iterator[Finding]:
    """How many completions of each class begin with a refusal."""
    sides = _sides(facts)
    read = [[(int(found[i]), int(side[i])) for i in evenly_spaced(len(found), _READ)] for found, side in sides]
    hits = [[row for row, side in some if refuses(decode(rows[row].completions[side].ids[:_OPENING].tolist()))]
            for some in read]
    if not any(hits):
        return
    rates = [len(hit) / max(len(some), 1) for hit, some in zip(hits, read, strict=True)]
    names = _class_names(facts)
    if not read[1]:
        text, gap = f"{percent(rates[0])} of the completions ({len(hits[0])}) begin with a refusal", 0.0
    else:
        text = (f"{percent(rates[0])} of the {names[0]} and {percent(rates[1])} of the {names[1]} completions begin "
                "with a refusal")
        gap = abs(rates[0] - rates[1]) if min(map(len, read)) >= _ENOUGH else 0.0
    if any(len(some) < len(found) for some, (found, _) in zip(read, sides, strict=True)):
        text += ", measured on " + " and ".join(f"{len(some):,} of {len(found):,}" for some, (found, _) in
                                                zip(read, sides, strict=True) if some) + " completions"
    text += " (\"I'm sorry\", \"As an AI\", ...)"
    if gap > 0.05:
        more = "more" if rates[0] > rates[1] else "less"
        text += f". The model will learn to refuse {more}. Balance the refusals if that is not intended."
    yield Finding("refusals", "warning" if gap > 0.25 else "notice" if gap > 0.05 else "info", text,
                  _places(rows, [*hits[0], *hits[1]]), dict(zip(names, rates, strict=True)))


def refuses(text: str) -> bool:
    """True if the beginning of a completion is a refusal or says that an AI writes it."""
    return _REFUSAL.match(text.replace("\u2019", "'").lower()) is not None


def _origins(column: str, values: Sequence[str | None], facts: RowFacts) -> Iterator[Finding]:
    """A column of origins: one value that dominates, or values that predict the label."""
    occurrences = Counter(zip(values, facts.desirable.tolist(), strict=True))
    counts: Counter[str] = Counter()
    verdicts: dict[str, list[int]] = {}  # of each value: undesirable rows, desirable rows
    for (value, label), count in occurrences.items():
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
                      f"{percent(share)} of the rows have {column} {top!r}, one of {len(counts)} values. The model "
                      "will mostly learn its preferences. Use fewer of its rows if that is not intended.", (),
                      {"rows": most, "values": len(counts)})
    if len(verdicts) < 2 or len(counts) > named / 5:  # a value that occurs once always predicts its label
        return
    total = sum(map(sum, verdicts.values()))
    likelier = max(sum(labels[side] for labels in verdicts.values()) for side in (0, 1))
    told = sum(map(max, verdicts.values()))
    if (told - likelier) / total > 0.2:
        yield Finding(f"label_from_{column}", "warning",
                      f"{column} alone predicts {percent(told / total)} of the labels (the most frequent label: "
                      f"{percent(likelier / total)}). The model may learn the {column} instead of the quality. Balance "
                      f"the labels within each {column}.", (),
                      {"told": told / total, "always_the_same": likelier / total})


def _sides(facts: RowFacts) -> tuple[tuple[Integers, Integers], tuple[Integers, Integers]]:
    """Better and worse completions, as their rows and sides. Without labels all are better ones."""
    good, bad = np.flatnonzero(facts.desirable != 0), np.flatnonzero(facts.desirable == 0)
    others = np.flatnonzero((facts.desirable < 0) & (facts.tokens[:, 1] > 0))
    return ((good, np.zeros_like(good)),
            (np.concatenate([bad, others]), np.repeat(np.array([0, 1]), [len(bad), len(others)])))


def _class_names(facts: RowFacts) -> tuple[str, str]:
    return ("desirable", "undesirable") if facts.labeled else ("chosen", "rejected")


def _auc(good: Integers, bad: Integers) -> float:
    """Probability that a value of `good` exceeds one of `bad`; ties count one half."""
    ordered = np.sort(bad)
    below = np.searchsorted(ordered, good, "left") + np.searchsorted(ordered, good, "right")
    return float(below.mean() / 2 / len(ordered))


def _places(rows: Sequence[EncodedRow], numbers: Sequence[int] | Integers) -> tuple[str, ...]:
    return tuple(rows[int(number)].place for number in numbers[:_LISTED])


def percent(share: float) -> str:
    """A share in percent, with one decimal below 10%."""
    return f"{100 * share:.0f}%" if share >= 0.1 or share == 0 else f"{100 * share:.1f}%"
