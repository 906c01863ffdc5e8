"""What the same prompt is: the rendered prompt before truncation, wherever prompts are compared."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from helpers import build_tokenizer, chat, encoded, row, said
from tropism.config import KTOOptions
from tropism.data.audit.audit import Audit
from tropism.data.audit.findings import leakage
from tropism.data.audit.layout_savings import layout_savings
from tropism.data.batching.pack import build_trees, mismatched_trees, partners
from tropism.data.row_blocks import Block, TableBuilder
from tropism.data.row_facts import facts_of
from tropism.data.rows import EncodedRow, Row
from tropism.data.schedule import GivenSchedule
from tropism.data.split import split_by_prompt
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits
from tropism.data.tree import prompt_key
from tropism.errors import UsageError
from tropism.methods.build import build_method
from tropism.train.setup.data import PreparedData, data_fingerprint, make_schedule
from tropism.train.step_packs import all_trees, check_partners, has_partners

TOKENIZER = build_tokenizer()
END = " and the same long ending of every prompt: what is this?"
PROMPTS = [f"{name}{END}" for name in ("an oak", "an elm", "a yew tree", "a lone old pine on a hill")]
LIMITS = st.builds(Limits, st.integers(20, 160), st.sampled_from([None, 3, 10, 19]))
ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60), st.booleans()), min_size=2, max_size=14)
KTO = build_method("unpaired", {"loss": "kto"}, [True, False])


def read(drawn: list[tuple[int, int, bool]], limits: Limits,
         messages: bool = False) -> tuple[list[str], list[EncodedRow]]:
    """Prompts and rows of (prompt, length of the completion, label). A completion tells which row it is from."""
    renderer, rows, texts = Renderer(TOKENIZER, limits), [], []
    for number, (prompt, length, label) in enumerate(drawn):
        text = chr(ord("a") + number) * length
        given = Row(f"r{number}", f"f:{number + 1}", PROMPTS[prompt], (text,), label)
        if messages:
            given = replace(given, prompt=(said("user", PROMPTS[prompt]),), completions=((said("assistant", text),),))
        found = renderer.encode(given)
        assert isinstance(found, EncodedRow)
        rows.append(found)
        texts.append(PROMPTS[prompt])
    return texts, rows


def options(**changes: Any) -> KTOOptions:
    return KTOOptions(model="m", data="d", output="o", **{"batch_size": 2, **changes})


@given(ROWS, LIMITS, st.booleans())
def test_keys_are_those_of_the_full_prompt(drawn: Any, limits: Limits, messages: bool) -> None:
    """T2: at any limit, equal keys are equal prompts; ids after truncation are neither."""
    texts, rows = read(drawn, limits, messages)
    whole = read(drawn, Limits(10_000), messages)[1]
    assert [one.prompt_key for one in rows] == [one.prompt_key for one in whole]
    numbers = facts_of(rows).prompt_numbers
    for i, text in enumerate(texts):
        for j, other in enumerate(texts):
            assert (text == other) == (rows[i].prompt_key == rows[j].prompt_key) == (numbers[i] == numbers[j])
    assert all(one.prompt_key == prompt_key(one.prompt_ids) for one in whole)


@given(ROWS, LIMITS, st.booleans())
def test_no_partner_has_the_prompt_of_its_row(drawn: Any, limits: Limits, messages: bool) -> None:
    """K1: at any limit, and the partners are those of untruncated rows."""
    texts, rows = read(drawn, limits, messages)
    indices = range(len(rows))
    assert has_partners(rows, indices) == (len(set(texts)) > 1)
    assume(len(set(texts)) > 1)
    partner_of = partners([one.prompt_key for one in rows])
    assert all(texts[own] != texts[other] for own, other in enumerate(partner_of))
    assert partner_of == partners(texts)
    # The completions that the trees hold are those of the partners, as often as they are.
    wanted: Counter[tuple[bytes, int]] = Counter()
    for own, other in enumerate(partner_of):
        wanted[rows[own].tree_key, int(rows[other].completions[0].ids[0])] += 1
    found: Counter[tuple[bytes, int]] = Counter()
    entries = mismatched_trees(rows, indices, limits.max_length)
    for entry in entries:
        for completion, count in zip(entry.tree.completions, entry.counts, strict=True):
            found[entry.tree.prompt_ids.tobytes(), int(completion.ids[0])] += count
    assert found == wanted
    # Layout stays as it is: one tree for equal ids, in the same order.
    assert [entry.tree.prompt_ids.tobytes() for entry in entries] == [
        entry.tree.prompt_ids.tobytes() for entry in build_trees(rows, indices)]


@given(ROWS, LIMITS, st.integers(2, 6), st.booleans())
def test_steps_do_not_depend_on_truncation(drawn: Any, limits: Limits, batch_size: int, grouped: bool) -> None:
    """K4: neither which rows complete a step, nor the groups of --group-prompts, nor the refusal."""
    given_options = options(batch_size=batch_size, group_prompts=grouped)
    whole, cut = (read(drawn, entry)[1] for entry in (Limits(10_000), limits))
    if len({prompt for prompt, _, _ in drawn}) < 2:
        for rows in (whole, cut):
            with pytest.raises(UsageError, match=f"all {len(drawn)} rows have the same prompt"):
                make_schedule(given_options, given_options, rows, needs_partners=True)
        return
    one, other = (make_schedule(given_options, given_options, rows, needs_partners=True) for rows in (whole, cut))
    assert [one.step(step) for step in range(1, one.total_steps + 1)] == [
        other.step(step) for step in range(1, other.total_steps + 1)]


def two_cuts() -> list[EncodedRow]:
    """Two rows of one prompt that are cut to different ids."""
    rows = read([(0, 5, True), (0, 40, False)], Limits(60))[1]
    assert rows[0].tree_key != rows[1].tree_key
    return rows


def equal_cuts() -> list[EncodedRow]:
    """Two rows of two prompts that are cut to the same ids."""
    rows = read([(0, 40, True), (1, 40, False)], Limits(60))[1]
    assert rows[0].tree_key == rows[1].tree_key
    return rows


def test_given_steps_are_checked_by_the_full_prompt() -> None:
    """K4: rows that Python cut are judged by their own ids, since nobody else knows more."""
    steps = GivenSchedule(((0, 1),), 2)
    with pytest.raises(UsageError, match="step 1: all 2 rows have the same prompt"):
        check_partners(steps, two_cuts(), KTO)
    assert check_partners(steps, equal_cuts(), KTO) is steps
    ids = [row([1, 2], [3], desirable=True), row([2], [4], desirable=False)]
    assert check_partners(steps, ids, KTO) is steps
    with pytest.raises(UsageError, match="the same prompt"):
        check_partners(steps, [ids[0], ids[0]], KTO)


def test_evaluation_rows_of_one_prompt_have_no_partners() -> None:
    """K1: their trees hold no mismatched completion, however they were cut."""
    assert len(all_trees(two_cuts(), range(2), KTO, 60)) == 2
    found = all_trees(equal_cuts(), range(2), KTO, 60)
    assert [len(tree.completions) for tree in found] == [2, 2]  # one tree of their own, one with each other's


def test_the_fingerprint_tells_prompts_apart_that_are_cut_to_the_same_ids() -> None:
    """C1: they decide steps and partners, so a run on other prompts is another run. Without a cut nothing changes."""
    same = replace(equal_cuts()[1], prompt_key=equal_cuts()[0].prompt_key)
    assert data_fingerprint([equal_cuts()[0], same]) != data_fingerprint(equal_cuts())
    assert data_fingerprint([row([1, 2], [3], desirable=True)]) == "c90831313466cf3333128e37928f993c"


def table(rows: list[EncodedRow], path: Path) -> Any:
    """Rows as they come back from a file of the cache."""
    Block.of(rows, set(), saw_messages=False).write(path)
    block = Block.open(path)
    assert block is not None
    builder = TableBuilder()
    builder.add(block, [one.id for one in rows], [one.place for one in rows], [one.desirable for one in rows])
    return builder.table()


@pytest.mark.parametrize("make", [two_cuts, equal_cuts])
def test_stored_rows_keep_their_prompt(make: Any, tmp_path: Path) -> None:
    """H1: a row from the cache is compared as one that was just rendered."""
    rows = make()
    found = table(rows, tmp_path / "a.arrow")
    assert [one.prompt_key for one in found] == [one.prompt_key for one in rows]
    for name in ("prompt_numbers", "tree_numbers", "row_numbers"):
        assert getattr(found.facts, name).tolist() == getattr(facts_of(rows), name).tolist()
    assert data_fingerprint(found) == data_fingerprint(rows)
    assert data_fingerprint(found[:1]) == data_fingerprint(rows[:1])


def test_the_audit_counts_full_prompts() -> None:
    """Prompts and duplicates; tokens are counted by what the layout computes."""
    for rows, prompts in ((two_cuts(), 1), (equal_cuts(), 2)):
        assert Audit("f", rows=rows).to_json()["prompts"] == prompts
    twice = [replace(one, completions=equal_cuts()[0].completions) for one in equal_cuts()]
    report = Audit("f", rows=twice).to_json()
    assert (report["duplicates"], report["conflicts"]) == (0, 0)
    assert report["tokens"]["repeated_prompt"] == len(twice[0].prompt_ids)
    assert Audit("f", rows=[twice[0], twice[0]]).to_json()["duplicates"] == 1


@given(ROWS, LIMITS)
def test_savings_are_those_of_the_trees(drawn: Any, limits: Limits) -> None:
    """A prompt that is cut in two ways is computed twice, and two that are cut to the same ids once."""
    rows = read(drawn, limits)[1]
    figures = layout_savings(rows, len(rows)).figures
    tokens = sum(entry.tree.tokens for entry in build_trees(rows, range(len(rows))))
    assert figures["tree_tokens"] == figures["grouped_tokens"] == tokens


def test_overlap_is_found_by_the_full_prompt() -> None:
    """An evaluation row of a prompt that is trained on is found, however either was cut."""
    train, held = ([one] for one in two_cuts())
    (finding,) = leakage(train, held)
    assert finding.figures["same_prompt"] == 1
    assert PreparedData(train, held, Audit("f"), None, None, 60).prompts_on_both_sides() == 1  # type: ignore[arg-type]
    train, held = ([one] for one in equal_cuts())
    assert leakage(train, held) == []
    assert PreparedData(train, held, Audit("f"), None, None, 60).prompts_on_both_sides() == 0  # type: ignore[arg-type]


# --- what the rendered prompt is --------------------------------------------------------------------------------------

TRIMMING = build_tokenizer(chat_template=(
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"))


@pytest.mark.parametrize(("one", "other", "same"), [
    (chat("Hi"), chat(" Hi\n"), True),  # this template trims
    (chat("Hi"), chat("Hi", system=""), False),
    (chat("Hi", system="Be brief."), chat("Hi", system="Be kind."), False),
    (chat("Hi", answers=("a <|end|>",)), chat("Hi", answers=("a <|bos|>",)), True),
    (chat("Hi <|end|>", answers=("a <|bos|>",)), chat("Hi <|end|>", answers=("b",)), True),
    (Row("r", "f:1", "Hi", ("a",)), Row("r", "f:2", "Hi ", ("a",)), False)])
@pytest.mark.parametrize("limit", [8, 500])
def test_the_rendered_prompt_decides(one: Row, other: Row, same: bool, limit: int) -> None:
    """T2: white space, system messages and the completion count as far as they reach the prompt's tokens."""
    renderer = Renderer(TRIMMING, Limits(limit))
    assert (encoded(renderer, one).prompt_key == encoded(renderer, other).prompt_key) == same


def test_a_rendered_prompt_is_on_one_side() -> None:
    """Also if its messages differ before they are rendered; then their conversations stay together too."""
    renderer = Renderer(TRIMMING, Limits(500))
    rows = [encoded(renderer, chat(text)) for text in ("Hi", " Hi", "Hi ", "\nHi", "Ho", "Ha", "He", "Hu")]
    rows += [encoded(renderer, chat("Hi ", "Hello", "Bye"))]
    for share in (0.01, 0.3, 0.5, 0.8, 0.99):
        train, held = split_by_prompt(rows, share)
        for attribute in ("prompt_key", "split_key"):
            assert not {getattr(r, attribute) for r in train} & {getattr(r, attribute) for r in held}
        assert len(train)
        assert len(held)
    with pytest.raises(UsageError, match="all rows have the same prompt"):
        split_by_prompt(rows[:4], 0.5)


def test_without_a_user_message_the_completion_does_not_decide_the_side() -> None:
    """T3: control tokens in the completion change how those in the prompt are masked, but not the prompt."""
    renderer = Renderer(build_tokenizer(), Limits(500))
    rows = [encoded(renderer, Row("r", "f:1", (said("system", "say <|end|>"),), ((said("assistant", text),),)))
            for text in ("a", "a <|bos|>", "<|end|> <|eos|>")]
    assert len({(one.split_key, one.prompt_key) for one in rows}) == 1
