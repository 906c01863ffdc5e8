"""What the data says about itself: each finding where it belongs, with places and figures, and nowhere else."""

import json
from typing import Any

import pytest

from helpers import chat, row
from tropism.data.findings import Finding, by_severity, histogram, layout_savings, leakage, of_rows, refuses
from tropism.data.render import Renderer
from tropism.data.rows import Dropped, EncodedRow, Reason
from tropism.data.truncate import Limits


def by_name(found: list[Finding]) -> dict[str, Finding]:
    names = {finding.name: finding for finding in found}
    assert len(names) == len(found), "a name twice"
    return names


def many(count: int, lengths: tuple[int, int] = (3, 3)) -> list[EncodedRow]:
    """`count` desirable and as many undesirable rows with answers of these lengths, all different."""
    return [row([1, 2, 100 + n], [1000 + 2 * n + side] * lengths[side], desirable=side == 0, id=f"f:{2 * n + side + 1}")
            for n in range(count) for side in (0, 1)]


def test_nothing_odd() -> None:
    """K3: balanced data without oddities gives facts only, the weights that `auto` chooses among them."""
    found = of_rows(many(30))
    assert {finding.severity for finding in found} == {"info"}
    assert by_name(found)["balance"].figures == {"desirable": 30, "undesirable": 30, "auto_desirable_weight": 1.0,
                                                 "auto_undesirable_weight": 1.0}
    assert by_name(found)["length"].figures["auc"] == 0.5
    assert json.loads(json.dumps([finding.to_json() for finding in found]))


def test_balance() -> None:
    """K3, K4: the implied weights; one class alone, and a class that is too small."""
    found = by_name(of_rows([row([1], [2, 3], desirable=True)] * 3))
    assert found["one_class"].severity == "warning"
    assert "3 desirable / 0 undesirable" in found["one_class"].text
    found = by_name(of_rows(many(2)[:3]))
    assert (found["balance"].severity, found["balance"].figures["auto_undesirable_weight"]) == ("info", 2.0)
    lopsided = [*(row([n], [n, 3], desirable=True) for n in range(50)), row([1], [2, 3], desirable=False)]
    assert by_name(of_rows(lopsided))["balance"].severity == "notice"


def test_left_out() -> None:
    """D3: reasons with counts, and a warning where it is more than a tenth."""
    dropped = [Dropped("f:1", Reason.EMPTY_COMPLETION), Dropped("f:5", Reason.EMPTY_COMPLETION),
               Dropped("f:9", Reason.MISSING_FIELD)]
    finding = by_name(of_rows(many(2), dropped))["left_out"]
    assert finding.severity == "warning"
    assert "3 (43 %), 2 empty_completion, 1 missing_field" in finding.text
    assert finding.places == ("f:1", "f:5", "f:9")
    assert by_name(of_rows(many(30), dropped))["left_out"].severity == "notice"


def test_duplicates_and_conflicts() -> None:
    """DESIGN 6: rows that repeat, completions with both labels, pairs that contradict each other."""
    rows = [row([1], [2, 3], desirable=True, id="f:1"), row([1], [2, 3], desirable=True, id="f:2"),
            row([1], [2, 3], desirable=False, id="f:3"), row([2], [2, 3], desirable=False, id="f:4")]
    found = by_name(of_rows(rows))
    assert found["duplicates"].places == ("f:2",)
    assert found["both_labels"].places == ("f:3",)
    assert found["both_labels"].severity == "warning"
    pairs = [row([1], [2, 3], [4, 5], id="f:1"), row([1], [4, 5], [2, 3], id="f:2"), row([2], [4, 5], [2, 3], id="f:3")]
    found = by_name(of_rows(pairs))
    assert found["both_orders"].places == ("f:2",)
    assert "duplicates" not in found
    assert "both_labels" not in found


def test_answers_of_one_token() -> None:
    """D1: an answer of which nothing is left but its end."""
    assert by_name(of_rows([row([1], [2, 3]), row([1], [1], id="f:2")]))["one_token"].places == ("f:2",)


@pytest.mark.parametrize(("lengths", "severity", "auc"), [
    ((9, 3), "warning", 1.0), ((3, 9), "warning", 0.0), ((3, 3), "info", 0.5)])
def test_length_tells_the_label(lengths: tuple[int, int], severity: str, auc: float) -> None:
    finding = by_name(of_rows(many(25, lengths)))["length"]
    assert (finding.severity, finding.figures["auc"]) == (severity, auc)
    pairs = [row([n], [n] * lengths[0], [n + 1] * lengths[1]) for n in range(25)]
    finding = by_name(of_rows(pairs))["length"]
    assert (finding.severity, finding.figures["auc"]) == (severity, auc)
    assert "length" not in by_name(of_rows(pairs[:10]))  # too few to say anything


def test_length_auc_counts_ties_as_one_half() -> None:
    """By hand: lengths 1, 2, 3 against 2, 2: (0 + 0.5 + 1) / 3."""
    good = [row([n], [7] * length, desirable=True) for n in range(10) for length in (1, 2, 3)]
    bad = [row([n, n], [7] * 2, desirable=False) for n in range(30)]
    assert by_name(of_rows([*good, *bad]))["length"].figures["auc"] == pytest.approx(0.5)
    good = [row([n], [7] * length, desirable=True) for n in range(10) for length in (2, 2, 3)]
    assert by_name(of_rows([*good, *bad]))["length"].figures["auc"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("text", [
    "I'm sorry, but I can't help with that.", " I\u2019m sorry", "As an AI, I", "Well, as a large language model I am",
    "I cannot do that", "Unfortunately, I have", "I apologize for", '"I am unable to'])
def test_refusals(text: str) -> None:
    assert refuses(text)


@pytest.mark.parametrize("text", ["", "Sure!", "She said: I'm sorry", "I candidly", "As an aid, take", "Sorry state"])
def test_what_is_no_refusal(text: str) -> None:
    assert not refuses(text)


def test_label_that_is_tied_to_refusals() -> None:
    """By class, where somebody reads the ids; not at all where nobody does."""
    said = {7: "Sure!", 8: "I'm sorry, no."}
    rows = [row([n], [8 if n % 2 else 7, 3], desirable=n % 2 == 0, id=f"f:{n + 1}") for n in range(60)]
    finding = by_name(of_rows(rows, decode=lambda ids: said[ids[0]]))["refusals"]
    assert finding.severity == "warning"
    assert finding.figures == {"desirable": 0.0, "undesirable": 1.0}
    assert "learn to refuse less" in finding.text
    assert "refusals" not in by_name(of_rows(rows))
    singles = [row([n], [8 if n == 3 else 7, 3], id=f"f:{n}") for n in range(10)]
    finding = by_name(of_rows(singles, decode=lambda ids: said[ids[0]]))["refusals"]
    assert (finding.severity, finding.places) == ("info", ("f:3",))


def test_one_source_dominates_and_tells_the_label() -> None:
    rows = many(30)
    records: dict[str, dict[str, Any]] = {r.place: {"source": "gold" if r.desirable else "bot"} for r in rows}
    found = by_name(of_rows(rows, records=records))
    assert found["label_from_source"].severity == "warning"
    assert found["label_from_source"].figures["told"] == 1.0
    assert "dominated_by_source" not in found
    voters = {r.place: {"annotator": 1 if n % 10 else 2, "source": "one"} for n, r in enumerate(rows)}
    found = by_name(of_rows(rows, records=voters))
    assert "90 % of the rows have annotator '1'" in found["dominated_by_annotator"].text
    assert "label_from_annotator" not in found
    each = {r.place: {"user_id": n, "rater": ["a"]} for n, r in enumerate(rows)}  # every value once; no plain value
    assert not [name for name in by_name(of_rows(rows, records=each)) if "user_id" in name or "rater" in name]


def test_leakage() -> None:
    """By prompt ids and by the beginning of the conversation, told apart; clean sets say nothing."""
    renderer_free = row([1, 2], [3, 4], id="e:1")
    train = [row([1, 2], [3, 4]), row([5], [6, 7])]
    begun = EncodedRow("e:3", "e:3", row([5, 6, 7], [1]).prompt_ids, row([5], [9, 9]).completions, None,
                       row([5], [1]).split_key)
    finding, = leakage(train, [renderer_free, row([1, 2], [9, 9], id="e:2"), begun, row([8], [1])])
    assert finding.severity == "warning"
    assert finding.figures == {"same_prompt": 2, "same_answer": 1, "same_beginning": 1}
    assert finding.places == ("e:1", "e:2", "e:3")
    assert leakage(train, [row([8], [1])]) == []


def test_a_later_turn_leaks_its_first(fixture_tokenizer) -> None:
    """DESIGN, Evaluation: multi-turn rows go by their first user message."""
    renderer = Renderer(fixture_tokenizer, Limits(1000))
    first, later = (renderer.encode(chat(*turns)) for turns in (("Hi",), ("Hi", "Hello", "Bye")))
    assert isinstance(first, EncodedRow)
    assert isinstance(later, EncodedRow)
    assert leakage([first], [later])[0].figures["same_beginning"] == 1


def test_what_layouts_save() -> None:
    """By hand: one prompt of 10 tokens with 4 answers of 3; a tree leaves out each answer's last token."""
    rows = [row(list(range(10)), [50 + n, 60, 61]) for n in range(4)]
    finding = layout_savings(rows, 4)
    assert finding.figures == {"batch_size": 4, "flat_tokens": 4 * 13, "tree_tokens": 10 + 4 * 2,
                               "grouped_tokens": 10 + 4 * 2}
    assert finding.severity == "info"
    finding = layout_savings(rows, 1)
    assert finding.figures["tree_tokens"] == 4 * 12
    assert finding.figures["grouped_tokens"] == 18
    assert finding.severity == "notice"
    assert "--group-prompts is worth it" in finding.text


def test_histogram() -> None:
    """Bins double; every value is in one of them, and none is missing between the first and the last."""
    assert histogram([]) == []
    assert histogram([1]) == [(1, 1, 1)]
    assert histogram([3, 4, 5, 8, 9, 40]) == [(3, 4, 2), (5, 8, 2), (9, 16, 1), (17, 32, 0), (33, 64, 1)]


def test_warnings_come_first() -> None:
    found = [Finding(name, severity, "") for name, severity in (("a", "info"), ("b", "warning"), ("c", "notice"))]  # type: ignore[arg-type]
    assert [finding.name for finding in by_severity(found)] == ["b", "c", "a"]


def test_no_rows() -> None:
    assert of_rows([]) == []
