"""The truncation rule, in numbers and as a law."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import build_tokenizer, case_rows, chat, encoded, expected, fixture_parts, said, supervised_text
from tropism.data.rows import Dropped, Reason, Row
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits, PromptCutter, fit
from tropism.data.tree import Completion


def lengths(prompt: int, *completions: int, max_length: int, max_prompt_length: int | None = None) -> tuple:
    """Lengths of prompt and completions that `fit` leaves, for a prompt without borders."""
    ids, kept = fit(PromptCutter(list(range(prompt))), [Completion.supervised(list(range(c))) for c in completions],
                    Limits(max_length, max_prompt_length))
    return (len(ids), *(len(completion.ids) for completion in kept if completion is not None))


@pytest.mark.parametrize(("given_lengths", "max_length", "max_prompt_length", "wanted"), [
    pytest.param((10, 5), 15, None, (10, 5), id="fits exactly"),
    pytest.param((11, 5), 15, None, (10, 5), id="prompt loses one"),
    pytest.param((100, 5), 32, None, (27, 5), id="case 09 q1"),
    pytest.param((16, 4), 32, None, (16, 4), id="case 09 q2"),
    pytest.param((16, 40), 32, None, (16, 16), id="case 09 q3"),
    pytest.param((100, 40), 32, None, (16, 16), id="both too long"),
    pytest.param((7, 40), 32, None, (7, 25), id="a short prompt is not cut to half"),
    pytest.param((100, 40), 33, None, (16, 17), id="odd limit: half rounds down"),
    pytest.param((100, 5, 20), 32, None, (16, 5, 16), id="the longest completion decides"),
    pytest.param((100, 5), 200, 30, (30, 5), id="prompt limit of its own"),
    pytest.param((100, 5), 20, 30, (15, 5), id="both limits"),
    pytest.param((100, 50), 20, 30, (10, 10), id="both limits, all too long"),
    pytest.param((100, 50), 2, None, (1, 1), id="smallest limit"),
])
def test_lengths(given_lengths: tuple[int, ...], max_length: int, max_prompt_length: int | None,
                 wanted: tuple[int, ...]) -> None:
    """D1: DESIGN, Truncation, in numbers."""
    assert lengths(*given_lengths, max_length=max_length, max_prompt_length=max_prompt_length) == wanted


@given(st.integers(1, 60), st.lists(st.integers(1, 60), min_size=1, max_size=3), st.integers(2, 60),
       st.none() | st.integers(1, 60), st.integers(0, 1))
def test_fit_laws(prompt: int, sizes: list[int], max_length: int, max_prompt_length: int | None, bos: int) -> None:
    """D1: limits hold; prompts are cut left and completions right; a cut takes no more than it must."""
    ids, kept = fit(PromptCutter(list(range(prompt)), (bos,)),
                    [Completion.supervised(list(range(size))) for size in sizes],
                    Limits(max_length, max_prompt_length))
    assert len(ids) <= min(prompt, max_prompt_length or prompt)
    for size, completion in zip(sizes, kept, strict=True):
        assert completion is not None
        assert completion.ids.tolist() == list(range(size))[: max_length - len(ids)]
        assert len(ids) + len(completion.ids) <= max_length
    allowed = min(prompt, max_prompt_length or prompt)
    if allowed + max(sizes) <= max_length:
        assert len(ids) == allowed
    else:
        assert len(ids) == min(allowed, max(max_length - max(sizes), max_length // 2))
    # The end of the prompt is kept, and its first token in front of it where there is a BOS.
    head = bos if len(ids) < prompt else 0
    assert ids == [*range(head), *range(prompt - (len(ids) - head), prompt)]


def test_message_borders_come_first() -> None:
    """DESIGN, Truncation: the longest prompt that starts at a message border, not a cut inside a message."""
    shorter = [[0, 7, 8, 9, 10], [0, 9, 10], [0, 10]]
    cutter = PromptCutter(list(range(11)), (1,), lambda: shorter)
    assert cutter.to(11) == list(range(11))
    assert cutter.to(10) == [0, 7, 8, 9, 10]
    assert cutter.to(4) == [0, 9, 10]
    assert cutter.to(2) == [0, 10]
    assert cutter.to(1) == [0]  # only the BOS is left


def test_shorter_prompts_are_made_only_when_needed() -> None:
    """They cost a rendering each, and most rows fit."""
    def fail() -> list[list[int]]:
        raise AssertionError("not needed")

    assert PromptCutter([1, 2, 3], (1,), fail).to(3) == [1, 2, 3]


def test_head_is_kept_where_it_fits() -> None:
    """DESIGN, Truncation: BOS and system message stay while they leave half of the room to what comes last."""
    ids = list(range(20))
    assert PromptCutter(ids, (1, 4)).to(8) == [0, 1, 2, 3, 16, 17, 18, 19]
    assert PromptCutter(ids, (1, 4)).to(7) == [0, 14, 15, 16, 17, 18, 19]
    assert PromptCutter(ids, (0,)).to(3) == [17, 18, 19]
    assert PromptCutter(ids, (1,)).to(2) == [0, 19]


def test_a_cut_completion_has_no_terminator() -> None:
    """D2: the last label of a cut answer is not the end; a whole answer keeps its own."""
    whole = Completion.supervised([5, 6, 7, 1])
    _, (cut,) = fit(PromptCutter([2, 3]), [whole], Limits(5))
    assert cut is not None
    assert cut.ids.tolist() == [5, 6, 7]
    _, (kept,) = fit(PromptCutter([2, 3]), [whole], Limits(6))
    assert kept is whole


def test_nothing_supervised_left() -> None:
    """D1: None, for the row to be dropped with a reason."""
    whole = Completion.supervised([5, 6, 7, 1])
    late = Completion(whole.ids, whole.loss_mask & [False, False, False, True])
    _, kept = fit(PromptCutter([2, 3]), [whole, late], Limits(5))
    assert kept[0] is not None
    assert kept[1] is None


# --- truncation through the renderer ---------------------------------------------------------------------------------


def test_case_09_prompt_over_limit(fixture_tokenizer) -> None:
    """D1, D2: what is kept of prompts and completions, and whether the end is learned."""
    renderer = Renderer(fixture_tokenizer, Limits(expected("09")["max_length"]))
    for raw in case_rows("09-prompt-over-limit.jsonl"):
        record, wanted = raw.record, expected("09")[raw.record["id"]]
        row = encoded(renderer, Row(record["id"], raw.place, record["prompt"], (record["completion"],)))
        kept = row.completions[0]
        assert len(row.prompt_ids) == wanted["prompt_kept"]
        assert len(kept.ids) == wanted["completion_kept"]
        assert bool(kept.ids[-1] == 1) is wanted["terminator_label"]
        text = record["completion"] + "<|eos|>"
        assert text.startswith(supervised_text(fixture_tokenizer, row))
        assert record["prompt"].endswith(fixture_tokenizer.decode(row.prompt_ids.tolist()))
        assert ("prompt_cut" in row.notes) is (len(row.prompt_ids) < len(record["prompt"]))
        assert ("completion_cut" in row.notes) is not wanted["terminator_label"]


def test_both_sides_are_cut_alike(fixture_tokenizer) -> None:
    """D1, M2: one cut of the prompt for both sides; sides that no longer differ are dropped."""
    renderer = Renderer(fixture_tokenizer, Limits(20))
    row = encoded(renderer, Row("r", "f:1", "0123456789" * 3, ("abc", "abcdefghijklmno")))
    assert fixture_tokenizer.decode(row.prompt_ids.tolist()) == "0123456789"
    assert [len(completion.ids) for completion in row.completions] == [4, 10]
    dropped = Renderer(fixture_tokenizer, Limits(8)).encode(Row("r", "f:7", "Hi", ("abcdefgh1", "abcdefgh2")))
    assert isinstance(dropped, Dropped)
    assert (dropped.reason, dropped.place) == (Reason.IDENTICAL_PAIR, "f:7")


def test_nothing_supervised_left_is_named(fixture_tokenizer) -> None:
    """M5: a late answer of a long conversation: the sentence has both lengths."""
    answer = (said("assistant", "a"), said("user", "b" * 40), said("assistant", "c"))
    dropped = Renderer(fixture_tokenizer, Limits(32)).encode(Row("r", "f:17", (said("user", "Hi"),), (answer,)))
    assert isinstance(dropped, Dropped)
    assert dropped.reason == Reason.NO_SUPERVISED_TOKEN
    assert dropped.detail == "no supervised token after truncation to 32 tokens (the prompt has 22)"


def test_a_long_conversation_loses_its_oldest_turns(fixture_tokenizer) -> None:
    """DESIGN, Truncation: at message borders, keeping BOS and system message; the answer is whole."""
    row = chat("first " * 5, "one", "second", "two", "third", system="Be brief.", answers=("four",))
    whole = fixture_tokenizer.apply_chat_template(list(row.prompt), add_generation_prompt=True, tokenize=False)
    shorter = whole.replace("<|turn|>user\n" + "first " * 5 + "<|end|>\n<|turn|>assistant\none<|end|>\n", "")
    tokens = len(fixture_tokenizer(shorter)["input_ids"])
    for more in (0, len("#assistant\none#\n")):  # room for the answer before, without its question: not a border
        found = encoded(Renderer(fixture_tokenizer, Limits(tokens + 5 + more)), row)
        assert fixture_tokenizer.decode(found.prompt_ids.tolist()) == shorter
        assert supervised_text(fixture_tokenizer, found) == "four<|end|>"
        assert found.notes == {"prompt_cut"}


def test_a_system_message_that_does_not_fit(fixture_tokenizer) -> None:
    """DESIGN, Truncation: the BOS stays where the system message cannot, and then the end of the last turn."""
    row = chat("What is it?", system="very long " * 10, answers=("four",))
    found = encoded(Renderer(fixture_tokenizer, Limits(40)), row)
    whole = fixture_tokenizer.apply_chat_template(list(row.prompt), add_generation_prompt=True)["input_ids"]
    assert found.prompt_ids.tolist() == [0, *whole[-34:]]
    assert supervised_text(fixture_tokenizer, found) == "four<|end|>"


def test_a_system_message_that_a_template_renders_otherwise_alone() -> None:
    """DESIGN, Truncation: what is kept in front is the prompt's own beginning, never a length taken from elsewhere."""
    template = fixture_parts()["chat_template"] + "{% if not add_generation_prompt %}(the end){% endif %}"
    tokenizer = build_tokenizer(chat_template=template)
    row = chat("What is it? " * 9, system="Short.", answers=("four",))
    found = encoded(Renderer(tokenizer, Limits(105)), row)
    whole = tokenizer.apply_chat_template(list(row.prompt), add_generation_prompt=True)["input_ids"]
    assert found.prompt_ids.tolist() == [0, *whole[-99:]]


def test_a_system_message_stays_in_front_of_a_cut_turn(fixture_tokenizer) -> None:
    """DESIGN, Truncation: the system message, where it fits, and the end of the last turn."""
    row = chat("What is it? " * 9, system="Short.", answers=("four",))
    found = encoded(Renderer(fixture_tokenizer, Limits(105)), row)
    whole = fixture_tokenizer.apply_chat_template(list(row.prompt), add_generation_prompt=True)["input_ids"]
    head = fixture_tokenizer("<|bos|><|turn|>system\nShort.<|end|>\n")["input_ids"]
    assert found.prompt_ids.tolist() == [*head, *whole[-(100 - len(head)):]]


def test_a_border_that_leaves_too_little_is_not_taken() -> None:
    """DESIGN, Truncation: what completions need takes the prompt to no fewer than half of max_length."""
    cutter = PromptCutter(list(range(90)), shorter=lambda: [list(range(20))])
    ids, _ = fit(cutter, [Completion.supervised(list(range(80)))], Limits(100))
    assert ids == list(range(40, 90))
    ids, _ = fit(cutter, [Completion.supervised(list(range(30)))], Limits(100, max_prompt_length=40))
    assert ids == list(range(20))  # a limit of the prompt's own has no floor
