"""The account of a data source: what was kept, what was not and why."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers import CASES, build_tokenizer, case_rows, case_yaml, expected, row
from tropism.data.audit.audit import Audit
from tropism.data.class_weights import class_weights
from tropism.data.read_rows import check_embedding, read_rows
from tropism.data.rows import Dropped, EncodedRow, Reason
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits
from tropism.errors import DataError


@pytest.fixture
def renderer(fixture_tokenizer) -> Renderer:
    return Renderer(fixture_tokenizer, Limits(200))


def labeled(prompt: str, completion: str, label: Any) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, "label": label}


def test_case_10(renderer: Renderer) -> None:
    """D3: the summary, the counts, and each dropped row with its line."""
    audit = read_rows(CASES / "10-empty-completions.jsonl", renderer, "paired")
    assert audit.summary() == "6 read, 1 kept: 3 empty_completion, 1 missing_field, 1 empty_prompt"
    assert [r.id for r in audit.rows] == ["e6"]
    report = audit.to_json()
    wanted = expected("10")
    assert {key: report["rows"][key] for key in ("read", "kept", "dropped")} == {
        key: wanted[key] for key in ("read", "kept", "dropped")}
    assert [(drop["place"].split(":")[1], drop["reason"]) for drop in report["dropped_rows"]] == [
        ("1", "empty_completion"), ("2", "empty_completion"), ("3", "empty_completion"), ("4", "missing_field"),
        ("5", "empty_prompt")]
    assert json.loads(json.dumps(report)) == report


def test_summary_puts_the_commonest_reason_first(renderer: Renderer) -> None:
    """D3: not the first one met."""
    records = [{"prompt": "p", "label": True}, labeled("p", "", True), labeled("p", " ", True), labeled("p", "c", 1)]
    assert read_rows(records, renderer, "unpaired").summary() == "4 read, 1 kept: 2 empty_completion, 1 missing_field"


def test_case_10_with_a_bos() -> None:
    """D3: an empty prompt is kept where the model adds a BOS to predict from."""
    audit = read_rows(CASES / "10-empty-completions.jsonl", Renderer(build_tokenizer(auto_bos=True), Limits(200)),
                      "paired")
    assert audit.summary() == "6 read, 2 kept: 3 empty_completion, 1 missing_field"


def test_strict_stops_at_the_first(renderer: Renderer) -> None:
    """D3: `--strict` refuses instead, with place and reason."""
    with pytest.raises(DataError, match=r"^10-empty-completions.jsonl:1: empty_completion: 'rejected' is empty"):
        read_rows(CASES / "10-empty-completions.jsonl", renderer, "paired", strict=True)


def test_no_row_left(renderer: Renderer, tmp_path: Path) -> None:
    """D1: a file whose rows are all dropped, or that has none, stops with the summary."""
    with pytest.raises(DataError, match="no row is left to train on: 1 read, 0 kept: 1 empty_completion"):
        read_rows([labeled("p", "", True)], renderer, "unpaired")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"empty.jsonl: no rows"):
        read_rows(tmp_path / "empty.jsonl", renderer, "unpaired")


def test_bad_label_names_its_line(renderer: Renderer, tmp_path: Path) -> None:
    """K3: file, line and value."""
    path = tmp_path / "f.jsonl"
    path.write_text("".join(json.dumps(labeled("p", "c", label)) + "\n" for label in [True] * 6 + ["good"]))
    with pytest.raises(DataError, match=r"^f.jsonl:7: label 'good' is not a boolean"):
        read_rows(path, renderer, "unpaired")


@pytest.mark.parametrize("workers", [0, 3])
def test_workers_change_nothing(fixture_tokenizer, workers: int) -> None:
    """Promise 1: rows come in file order with the same ids, whoever renders them."""
    records = [labeled([{"role": "user", "content": f"q{n} <|end|>"[: 2 + n % 9]}], f"a{n}" if n % 7 else "", n % 2)
               for n in range(200)]
    audit = read_rows(records, Renderer(fixture_tokenizer, Limits(200)), "unpaired", workers=workers)
    assert [r.place for r in audit.rows] == [f"row {n + 1}" for n in range(200) if n % 7]
    assert [drop.place for drop in audit.dropped] == [f"row {n + 1}" for n in range(0, 200, 7)]
    for r in audit.rows:
        number = int(r.place.split()[1]) - 1
        text = fixture_tokenizer.decode(r.prompt_ids.tolist())
        assert text.startswith("<|bos|><|turn|>user\n" + f"q{number} <|end|>"[: 2 + number % 9] + "<|end|>")


def test_labels_duplicates_and_conflicts() -> None:
    """K3: kept units by class; rows that repeat, and completions that carry both labels."""
    rows = [row([1], [2], desirable=True), row([1], [2], desirable=True), row([1], [2], desirable=False),
            row([1], [3], desirable=False), row([4], [2], desirable=False), row([4], [5], desirable=True)]
    audit = Audit("f", read=7, rows=rows, dropped=[Dropped("f:7", Reason.EMPTY_COMPLETION)])
    report = audit.to_json()
    assert report["labels"] == audit.labels() == {"desirable": 3, "undesirable": 3}
    assert report["duplicates"] == 2
    assert report["conflicts"] == 1
    assert report["prompts"] == 2
    assert any("1 completion both desirable and undesirable (first r)" in said for said in audit.notices())
    pairs = Audit("f", read=2, rows=[row([1], [2], [3]), row([1], [3], [2])])
    assert pairs.labels() == {}
    assert (pairs.to_json()["duplicates"], pairs.to_json()["conflicts"]) == (0, 0)


def test_a_million_bad_rows_are_counted_and_some_are_listed() -> None:
    """D3: every reason is counted; places and details of the first 1000 are kept."""
    audit = Audit("f", read=3001, rows=[row([1], [2, 3])])
    for number in range(3000):
        audit.drop(Dropped(f"f:{number + 1}", Reason.UNPAIRED if number % 3 == 0 else Reason.EMPTY_PROMPT))
    assert len(audit.dropped) == len(audit.to_json()["dropped_rows"]) == 1000
    assert audit.to_json()["rows"]["dropped"] == audit.reasons == {"empty_prompt": 2000, "unpaired": 1000}
    assert audit.summary() == "3001 read, 1 kept: 2000 empty_prompt, 1000 unpaired"
    left_out, = (finding for finding in audit.findings() if finding.name == "left_out")
    assert "3,000 rows (100%): 2000 empty_prompt, 1000 unpaired" in left_out.text
    assert left_out.places[:2] == ("f:1", "f:2")


def test_origins_are_looked_at() -> None:
    """DESIGN 6: a run's audit knows where its rows come from, too."""
    rows = [row([n], [n, 3], desirable=n % 2 == 0) for n in range(40)]
    audit = Audit("f", read=40, rows=rows, origins={"source": ["gold" if r.desirable else "bot" for r in rows]})
    assert "label_from_source" in {finding["name"] for finding in audit.to_json()["findings"]}
    assert any("source alone predicts 100% of the labels" in said for said in audit.notices())


def test_tokens_and_lengths() -> None:
    """DESIGN 6: tokens as if flat, the share that is repeated prompts, and quantiles of lengths."""
    rows = [row([1, 1, 1], [2, 2], [3]), row([1, 1, 1], [4], [5]), row([9], [9], [8, 8, 8, 8])]
    report = Audit("f", read=3, rows=rows).to_json()
    assert report["tokens"] == {"flat": 5 * 0 + (3 + 2) + (3 + 1) + (3 + 1) * 2 + (1 + 1) + (1 + 4),
                                "repeated_prompt": 3 * 3 + 1}
    assert report["lengths"]["prompt"] == {"p50": 3, "p90": 3, "max": 3}
    assert report["lengths"]["completion"] == {"p50": 1, "p90": 4, "max": 4}


def test_cuts_and_changes_are_listed(fixture_tokenizer) -> None:
    """D1, M1: counts of cut rows, and the first row whose text does not read back."""
    records = [labeled("p" * 40, "c", True), labeled("p", "c" * 60, False), labeled("q", "naïve", True)]
    audit = read_rows(records, Renderer(fixture_tokenizer, Limits(20)), "unpaired")
    report = audit.to_json()
    assert [report["rows"][key] for key in ("prompt_cut", "completion_cut", "text_changed")] == [1, 1, 1]
    assert report["changed_rows"] == [
        {"place": "row 1", "notes": ["prompt_cut"]}, {"place": "row 2", "notes": ["completion_cut"]},
        {"place": "row 3", "notes": ["text_changed"]}]
    said = " / ".join(audit.notices())
    assert "the prompt of 1 row was truncated on the left (33%, first row 1)" in said
    assert "a completion of 1 row was truncated and has no terminator (33%, first row 2)" in said
    assert "(first row 3)" in said


def test_a_template_without_terminator_says_so() -> None:
    """T1: one EOS is added, with a message."""
    template = case_yaml("14-bos-eos-once.yaml")["templates"]["B_no_specials_at_all"]
    messages = case_yaml("14-bos-eos-once.yaml")["messages"]
    audit = read_rows([{"messages": messages, "label": True}],
                      Renderer(build_tokenizer(chat_template=template), Limits(200)), "unpaired")
    assert any("does not terminate the completions of 1 row (first row 1)" in said for said in audit.notices())


def test_class_weights() -> None:
    """K3: under `auto` the larger class has weight 1 and the other n_major / n_minor; a number stays a number."""
    assert class_weights(4, 1, "auto", "auto") == (1.0, 4.0)
    assert class_weights(2, 3, "auto", "auto") == (1.5, 1.0)
    assert class_weights(5, 5, "auto", "auto") == (1.0, 1.0)
    assert class_weights(4, 1, 1.0, "auto") == (1.0, 4.0)
    assert class_weights(1, 4, "auto", 0.5) == (4.0, 0.5)
    assert class_weights(4, 1, 2, 1.33) == (2.0, 1.33)
    assert class_weights(4, 0, "auto", "auto") == (1.0, 1.0)


def test_one_sided_counts(renderer: Renderer) -> None:
    """K4: counts of case 04's one-class data, from which it is refused."""
    rows = case_yaml("04-kto-degenerate-sizes.yaml")["a_single_class"]["rows"]
    assert read_rows(rows, renderer, "unpaired").labels() == {"desirable": 4, "undesirable": 0}
    assert len(case_rows("02-kto-one-sided-batches.jsonl")) == 8


def test_ids_beyond_the_embedding_are_found() -> None:
    """H5: the first such id, with token and row, in prompt or completion."""
    def check(*rows: EncodedRow) -> None:
        check_embedding(rows, 10, lambda token: f"<{token}>")

    check(row([9], [0, 9], [3]))
    with pytest.raises(DataError, match=r"f:3: token '<10>' has id 10, but the model embeds only 10 tokens"):
        check(row([1], [2]), row([3, 10], [2], id="f:3"))
    with pytest.raises(DataError, match=r"f:4: token '<12>'"):
        check(row([1], [2], [5, 12, 3], id="f:4"))


def test_rows_over_the_limits_are_dropped_or_truncated_as_told(fixture_tokenizer) -> None:
    """A decision is no warning; without one, truncation is. A row that fits exactly is kept."""
    records = [labeled("a" * 40, "b" * 10, True), labeled("a b", "c d", False), labeled("a c", "d e f g h", True)]

    def read(**limits: Any) -> Audit:
        return read_rows(records, Renderer(fixture_tokenizer, Limits(**limits)), "unpaired")

    longest = max(read(max_length=500).facts.prompt_tokens + read(max_length=500).facts.tokens.sum(1))
    assert len(read(max_length=int(longest), overlong="drop").rows) == 3
    undecided, truncated = (read(max_length=12, overlong=overlong) for overlong in (None, "truncate"))
    severities = [{finding.name: finding.severity for finding in audit.findings()} for audit in (undecided, truncated)]
    assert severities[0]["completion_cut"] == "warning"
    assert severities[1]["completion_cut"] == "notice"
    assert truncated.rows[0].completions[0].ids.tolist() == undecided.rows[0].completions[0].ids.tolist()
    for limits in ({"max_length": 20}, {"max_length": 100, "max_prompt_length": 20}):
        dropped = read(**limits, overlong="drop")
        assert dropped.reasons == {"too_long": 1}
        assert not [finding for finding in dropped.findings() if finding.severity == "warning" and
                    finding.name in ("left_out", "completion_cut", "prompt_cut")]
    with pytest.raises(DataError, match="--overlong drop"):
        read(max_length=2, overlong="drop")
