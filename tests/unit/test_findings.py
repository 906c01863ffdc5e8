"""What the data says about itself: each finding where it belongs, with places and figures, and nowhere else."""

import json
from collections.abc import Sequence

import numpy as np
import pytest

from helpers import chat, row
from tropism.data.audit import findings
from tropism.data.audit import layout_savings as savings
from tropism.data.audit.audit import Audit
from tropism.data.audit.findings import Finding, by_severity, find_in_rows, histogram, leakage, refuses
from tropism.data.audit.layout_savings import layout_savings
from tropism.data.batching.pack import build_trees
from tropism.data.row_facts import RowFacts
from tropism.data.rows import Dropped, EncodedRow, Reason
from tropism.data.schedule import Schedule
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits


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
    found = find_in_rows(many(30))
    assert {finding.severity for finding in found} == {"info"}
    assert by_name(found)["balance"].figures == {"desirable": 30, "undesirable": 30, "auto_desirable_weight": 1.0,
                                                 "auto_undesirable_weight": 1.0}
    assert by_name(found)["length"].figures["auc"] == 0.5
    assert json.loads(json.dumps([finding.to_json() for finding in found]))


def test_balance() -> None:
    """K3, K4: the implied weights; one class alone, and a class that is too small."""
    found = by_name(find_in_rows([row([1], [2, 3], desirable=True)] * 3))
    assert found["one_class"].severity == "warning"
    assert "3 desirable / 0 undesirable" in found["one_class"].text
    found = by_name(find_in_rows(many(2)[:3]))
    assert (found["balance"].severity, found["balance"].figures["auto_undesirable_weight"]) == ("info", 2.0)
    lopsided = [*(row([n], [n, 3], desirable=True) for n in range(50)), row([1], [2, 3], desirable=False)]
    assert by_name(find_in_rows(lopsided))["balance"].severity == "notice"


def test_left_out() -> None:
    """D3: reasons with counts, and a warning where it is more than a tenth."""
    dropped = [Dropped("f:1", Reason.EMPTY_COMPLETION), Dropped("f:5", Reason.EMPTY_COMPLETION),
               Dropped("f:9", Reason.MISSING_FIELD)]
    finding = by_name(find_in_rows(many(2), dropped))["left_out"]
    assert finding.severity == "warning"
    assert "3 rows (43%): 2 empty_completion, 1 missing_field" in finding.text
    assert finding.places == ("f:1", "f:5", "f:9")
    assert by_name(find_in_rows(many(30), dropped))["left_out"].severity == "notice"


def test_duplicates_and_conflicts() -> None:
    """DESIGN 6: rows that repeat, completions with both labels, pairs that contradict each other."""
    rows = [row([1], [2, 3], desirable=True, id="f:1"), row([1], [2, 3], desirable=True, id="f:2"),
            row([1], [2, 3], desirable=False, id="f:3"), row([2], [2, 3], desirable=False, id="f:4")]
    found = by_name(find_in_rows(rows))
    assert found["duplicates"].places == ("f:2",)
    assert found["both_labels"].places == ("f:3",)
    assert found["both_labels"].severity == "warning"
    pairs = [row([1], [2, 3], [4, 5], id="f:1"), row([1], [4, 5], [2, 3], id="f:2"), row([2], [4, 5], [2, 3], id="f:3")]
    found = by_name(find_in_rows(pairs))
    assert found["both_orders"].places == ("f:2",)
    assert "duplicates" not in found
    assert "both_labels" not in found


def test_answers_of_one_token() -> None:
    """D1: an answer of which nothing is left but its end."""
    assert by_name(find_in_rows([row([1], [2, 3]), row([1], [1], id="f:2")]))["one_token"].places == ("f:2",)


@pytest.mark.parametrize(("lengths", "severity", "auc"), [
    ((9, 3), "warning", 1.0), ((3, 9), "warning", 0.0), ((3, 3), "info", 0.5)])
def test_length_tells_the_label(lengths: tuple[int, int], severity: str, auc: float) -> None:
    finding = by_name(find_in_rows(many(25, lengths)))["length"]
    assert (finding.severity, finding.figures["auc"]) == (severity, auc)
    pairs = [row([n], [n] * lengths[0], [n + 1] * lengths[1]) for n in range(25)]
    finding = by_name(find_in_rows(pairs))["length"]
    assert (finding.severity, finding.figures["auc"]) == (severity, auc)
    assert "length" not in by_name(find_in_rows(pairs[:10]))  # too few to say anything


def test_length_auc_counts_ties_as_one_half() -> None:
    """By hand: lengths 1, 2, 3 against 2, 2: (0 + 0.5 + 1) / 3."""
    good = [row([n], [7] * length, desirable=True) for n in range(10) for length in (1, 2, 3)]
    bad = [row([n, n], [7] * 2, desirable=False) for n in range(30)]
    assert by_name(find_in_rows([*good, *bad]))["length"].figures["auc"] == pytest.approx(0.5)
    good = [row([n], [7] * length, desirable=True) for n in range(10) for length in (2, 2, 3)]
    assert by_name(find_in_rows([*good, *bad]))["length"].figures["auc"] == pytest.approx(2 / 3)


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
    finding = by_name(find_in_rows(rows, decode=lambda ids: said[ids[0]]))["refusals"]
    assert finding.severity == "warning"
    assert finding.figures == {"desirable": 0.0, "undesirable": 1.0}
    assert "learn to refuse less" in finding.text
    assert "refusals" not in by_name(find_in_rows(rows))
    singles = [row([n], [8 if n == 3 else 7, 3], id=f"f:{n}") for n in range(10)]
    finding = by_name(find_in_rows(singles, decode=lambda ids: said[ids[0]]))["refusals"]
    assert (finding.severity, finding.places) == ("info", ("f:3",))


def test_one_source_dominates_and_tells_the_label() -> None:
    rows = many(30)
    found = by_name(find_in_rows(rows, origins={"source": ["gold" if r.desirable else "bot" for r in rows]}))
    assert found["label_from_source"].severity == "warning"
    assert found["label_from_source"].figures["told"] == 1.0
    assert "dominated_by_source" not in found
    voters = {"annotator": ["1" if n % 10 else "2" for n in range(60)], "source": ["one"] * 60}
    found = by_name(find_in_rows(rows, origins=voters))
    assert "90% of the rows have annotator '1'" in found["dominated_by_annotator"].text
    assert "label_from_annotator" not in found
    each = {"user_id": [str(n) for n in range(60)], "rater": [None] * 60}  # every value once; no plain value
    assert not [name for name in by_name(find_in_rows(rows, origins=each)) if "user_id" in name or "rater" in name]


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
    assert "Consider --group-prompts" in finding.text


def tangled(count: int, sides: int) -> list[EncodedRow]:
    """Rows of few prompts whose completions begin, end like and repeat one another."""
    random = np.random.default_rng(7)
    answers = [random.integers(0, 2, random.integers(1, 5)).tolist() for _ in range(2 * count)]
    return [row([int(random.integers(count // 3 + 1))], *([answers[n], [9, *answers[n + count]]][:sides]), id=f"f:{n}")
            for n in range(count)]


@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("count", [2, 30, 200])
def test_layouts_are_counted_as_they_are_planted(count: int, sides: int) -> None:
    """The arithmetic against the trees of every step."""
    rows = tangled(count, sides)
    prompts = tuple(int(r.prompt_ids[0]) for r in rows)
    figures = layout_savings(rows, 8).figures
    for group, name in ((False, "tree_tokens"), (True, "grouped_tokens")):
        plan = Schedule(prompts, 8, 0, group_prompts=group)
        assert figures[name] == sum(planted.tree.tokens for step in range(1, plan.total_steps + 1)
                                    for planted in build_trees(rows, plan.step(step)))


def test_layouts_of_many_rows_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the trees in which a completion may begin another, a sample is planted, and the text says `about`."""
    rows = tangled(600, 2)
    exact = layout_savings(rows, 8)
    assert "about" not in exact.text
    monkeypatch.setattr(savings, "_ALL", 300)
    monkeypatch.setattr(savings, "_SAMPLE", 200)
    guess = layout_savings(rows, 8)
    assert guess.text.count("about") == 2
    for name in ("tree_tokens", "grouped_tokens"):
        assert guess.figures[name] == pytest.approx(exact.figures[name], rel=0.05)
    monkeypatch.setattr(savings, "_ALL", 0)  # no tree is small enough: what nobody saw saves nothing
    assert layout_savings(rows, 8).figures["grouped_tokens"] > exact.figures["grouped_tokens"]


def test_histogram() -> None:
    """Bins double; every value is in one of them, and none is missing between the first and the last."""
    assert histogram([]) == []
    assert histogram([1]) == [(1, 1, 1)]
    assert histogram([3, 4, 5, 8, 9, 40]) == [(3, 4, 2), (5, 8, 2), (9, 16, 1), (17, 32, 0), (33, 64, 1)]


def test_warnings_come_first() -> None:
    found = [Finding(name, severity, "") for name, severity in (("a", "info"), ("b", "warning"), ("c", "notice"))]  # type: ignore[arg-type]
    assert [finding.name for finding in by_severity(found)] == ["b", "c", "a"]


def test_no_rows() -> None:
    assert find_in_rows([]) == []


# --- many rows --------------------------------------------------------------------------------------------------------


class Table(Sequence[EncodedRow]):
    """Pairs or labeled completions that bring their facts, and count how often one is made an object."""

    def __init__(self, count: int, paired: bool) -> None:
        self.count, self.paired, self.touched = count, paired, 0
        numbers = np.arange(count, dtype=np.uint64)
        first, second = numbers % 5 + 2, (numbers % 3 + 2) * paired
        self.facts = RowFacts(
            prompt=numbers // 2, prompt_tokens=np.full(count, 3),
            completion=np.stack([2 * numbers + 1, (2 * numbers + 2) * paired], axis=1),
            tokens=np.stack([first, second], axis=1), learned=np.stack([first, second], axis=1),
            desirable=np.full(count, -1) if paired else numbers % 2, split=numbers // 2,
            notes={"prompt_cut": np.arange(0, count, 4)})

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> EncodedRow:  # type: ignore[override]
        self.touched += 1
        sides = [[100 + 2 * number + side] * int(length) for side, length in enumerate(self.facts.tokens[number])]
        label = int(self.facts.desirable[number])
        return row([number // 2, 0, 0], *(side for side in sides if side), desirable=None if label < 0 else label == 1,
                   id=f"f:{number + 1}")


@pytest.mark.parametrize("paired", [False, True])
def test_few_of_many_rows_are_looked_at(paired: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Findings and audit are made of columns: an object is made of a row that is named or read, and of no other."""
    for module, name, few in ((findings, "_READ", 2000), (savings, "_ALL", 5000), (savings, "_SAMPLE", 2000)):
        assert getattr(module, name) <= 50_000
        monkeypatch.setattr(module, name, few)
    rows = Table(200_000, paired)
    audit = Audit("f", read=200_000, rows=rows)
    found = by_name(audit.findings())
    assert found["prompt_cut"].figures == {"rows": 50_000}
    assert found["prompt_cut"].places[:2] == ("f:1", "f:5")
    assert found["tokens"].figures["prompts"] == 100_000
    assert rows.touched <= 10 * len(found)
    rows.touched = 0
    report = audit.to_json(lambda ids: "I'm sorry" if ids[0] % 1000 < 500 else "Sure")
    text, = (entry["text"] for entry in report["findings"] if entry["name"] == "refusals")
    sides = "2,000 of 200,000 and 2,000 of 200,000" if paired else "2,000 of 100,000 and 2,000 of 100,000"
    assert f"measured on {sides} completions" in text
    assert report["lengths"]["completion"]["max"] == 6
    assert len(report["changed_rows"]) == 1000
    assert rows.touched <= 4000 + 1000 + 10 * (len(found) + 1)
    rows.touched = 0
    assert leakage(rows, Table(20, paired))[0].figures == {"same_prompt": 20, "same_answer": 20, "same_beginning": 0}
    assert rows.touched == 0
    assert "grouped_tokens" in layout_savings(rows, 32).figures
    assert 0 < rows.touched <= 2 * 5000


def test_refusals_among_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share is that of the answers that were read, and the text says how many these are."""
    monkeypatch.setattr(findings, "_READ", 30)
    rows = [row([n], [n % 3, 3]) for n in range(90)]
    found = by_name(find_in_rows(rows, decode=lambda ids: "I'm sorry" if ids[0] == 0 else "Sure"))["refusals"]
    assert found.figures["chosen"] == 1.0  # every third row
    assert found.text.startswith("100% of the completions (30)")
    assert "30 of 90 completions" in found.text
