"""Random conversations through tokenizers of every kind: the laws of M1, M2, T1 and T3, whatever people write."""

from collections.abc import Callable, Iterable
from functools import wraps
from itertools import product
from typing import Any

from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st
from tokenizers import processors

from helpers import CHATML, EXACT_KINDS, chat, encoded, generation_ids, kind_of_tokenizer, supervised_text
from tropism.data.rows import Dropped, Reason, Row
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits

LIMITS = Limits(100_000)
CONTROL = ["<|bos|>", "<|eos|>", "<|pad|>", "<|turn|>", "<|end|>", "<|unk|>"]
SPELLS_ALL = {"byte level", "space runs"}  # kinds whose alphabet has every character and nothing else
KNOWN = ["the", "red kite", " ", "   ", "        ", "\n", "20", ":", "<", "lamp", ", ", "say two"]

UNICODE = st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=8)
PIECES = st.one_of(st.sampled_from(KNOWN), st.sampled_from(CONTROL), UNICODE)
TEXTS = st.lists(PIECES, max_size=6).map("".join)
ANSWERS = TEXTS.filter(str.strip)


def each_of(cases: Iterable[tuple[str, ...]]) -> Callable[..., Any]:
    """A test that tries each example on every case; of those that a failed example notes, the last is its own."""
    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def tried(**drawn: Any) -> None:
            for case in cases:
                note(", ".join(case))
                test(*case, **drawn)

        del tried.__wrapped__  # whose arguments pytest would look for
        return tried

    return decorate


@st.composite
def conversations(draw: Any, texts: st.SearchStrategy[str] = TEXTS) -> Row:
    """Two to four messages, then an answer; with a system message, an empty one, or none."""
    turns = draw(st.lists(texts, min_size=1, max_size=3).filter(lambda drawn: len(drawn) % 2 == 1))
    return chat(*turns, system=draw(st.none() | st.just("") | texts), answers=(draw(texts.filter(str.strip)),))


def texts_of(row: Row) -> str:
    return "".join(message["content"] for part in (row.prompt, *row.completions) for message in part)  # type: ignore[index]


TOKENIZERS = {kind: kind_of_tokenizer(kind) for kind in EXACT_KINDS}
RENDERERS = {kind: Renderer(tokenizer, LIMITS) for kind, tokenizer in TOKENIZERS.items()}


@settings(max_examples=60, suppress_health_check=[HealthCheck.filter_too_much])
@given(row=conversations())
@example(row=chat("        ", answers=("  \t x",), system=""))
@example(row=chat("\u2581the", "\u2581", "<|end", answers=("|><|end|>\u2581",)))
@example(row=chat("e\u0301", answers=("\u0301e \U0001f469\u200d\U0001f33e",)))
@each_of([(kind,) for kind in EXACT_KINDS])
def test_random_conversations(kind: str, row: Row) -> None:
    """M1, M2, T1, T3: generation's ids before, one terminator behind, and what reads differently is noted."""
    tokenizer = TOKENIZERS[kind]
    found = encoded(RENDERERS[kind], row)
    prompt, answer = found.prompt_ids.tolist(), row.completions[0][0]["content"]  # type: ignore[index]
    special = {tokenizer.convert_tokens_to_ids(name) for name in CONTROL} - {tokenizer.unk_token_id}
    spelled = any(name in texts_of(row) for name in CONTROL)
    assert (found.notes & {"control_spelled"} != set()) == spelled
    if not spelled:
        assert prompt == generation_ids(tokenizer, row)
    turn, end = (tokenizer.convert_tokens_to_ids(name) for name in ("<|turn|>", "<|end|>"))
    assert [i for i in prompt if i in special] == [turn, end] * len(row.prompt) + [turn]
    assert [i for i in found.completions[0].ids.tolist() if i in special] == [end]
    assert found.completions[0].ids[-1] == end
    if "text_changed" not in found.notes:
        assert supervised_text(tokenizer, found) == answer + "<|end|>"
    else:
        assert kind not in SPELLS_ALL


@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])
@given(row=conversations(st.lists(st.sampled_from(KNOWN + CONTROL), max_size=6).map("".join)))
@each_of([(kind,) for kind in EXACT_KINDS])
def test_random_conversations_of_known_characters(kind: str, row: Row) -> None:
    """M1: where the tokenizer can spell all characters, every answer is learned exactly as it is written."""
    found = encoded(RENDERERS[kind], row)
    assert "text_changed" not in found.notes
    answer = row.completions[0][0]["content"]  # type: ignore[index]
    completion = found.completions[0]
    assert supervised_text(TOKENIZERS[kind], found) == answer + "<|end|>"
    assert RENDERERS[kind].text.supervised_text(
        found.prompt_ids.tolist(), completion.ids.tolist(), completion.loss_mask.tolist()) == [answer + "<|end|>"]


@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])
@given(row=conversations())
@example(row=chat("", "\n", "", answers=("the",)))
@each_of([(kind,) for kind in EXACT_KINDS])
def test_random_conversations_with_all_turns(kind: str, row: Row) -> None:
    """M1, T2: with all turns learned, the ids are one for one those of the prompt and its last answer."""
    tokenizer = TOKENIZERS[kind]
    found = encoded(Renderer(tokenizer, LIMITS, "all"), row)
    last = encoded(RENDERERS[kind], row)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    completion = found.completions[0]
    answers = 1 + sum(message["role"] == "assistant" for message in row.prompt)  # type: ignore[index]
    learned = completion.ids[completion.loss_mask]
    assert learned.tolist().count(end) == answers
    whole = [*found.prompt_ids.tolist(), *completion.ids.tolist()]
    if not found.notes & {"text_changed"} and not last.notes & {"text_changed"}:
        straight = [*last.prompt_ids.tolist(), *last.completions[0].ids.tolist()]
        assert tokenizer.decode(whole) == tokenizer.decode(straight)


@settings(max_examples=40)
@given(text=ANSWERS, before=TEXTS)
@each_of([(kind,) for kind in EXACT_KINDS])
def test_pieces_are_the_tokens(kind: str, text: str, before: str) -> None:
    """M1: what is shown token by token has every id once, and adds up to the text where no character is split."""
    reader = RENDERERS[kind].text
    ids, lead = reader.encode(text), reader.encode(before)
    pieces = reader.pieces(ids, lead, [True] * len(ids))
    assert [piece.id for piece in pieces] == ids
    assert all(piece.supervised for piece in pieces)
    assert all(piece.visible.isprintable() for piece in pieces)
    if text.isascii() and before.isascii() and before and kind in SPELLS_ALL:
        assert "".join(piece.text for piece in pieces) == text


# --- the start: tokenizers that put a BOS in front, that have one for templates only, and that have none --------------

WITH_BOS = "{{ bos_token }}" + CHATML
BORDERED = ["byte level", "metaspace", "unigram"]


def bordered(kind: str, start: str) -> Any:
    """A tokenizer of that kind that puts the BOS in front itself (`automatic`), leaves it to templates, or has none."""
    tokenizer = kind_of_tokenizer(kind, WITH_BOS, **({"bos_token": None} if start == "none" else {}))
    if start == "automatic":
        bos = tokenizer.bos_token_id
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", bos)])
        assert tokenizer("the")["input_ids"][0] == bos
    return tokenizer


STARTS = {(kind, start): bordered(kind, start) for kind in BORDERED for start in ("automatic", "template", "none")}


@settings(max_examples=25, suppress_health_check=[HealthCheck.filter_too_much])
@given(row=conversations())
@example(row=chat("<|bos|>", "<|bos|>the<|eos|>", "        ", answers=("<|bos|> the",), system=""))
@each_of(STARTS)
def test_one_bos_whoever_puts_it(kind: str, start: str, row: Row) -> None:
    """T1, M1, M2, T3: one BOS, in front, none if there is none; generation's ids; the answer and one terminator."""
    tokenizer = STARTS[kind, start]
    found = encoded(Renderer(tokenizer, LIMITS), row)
    prompt, answer = found.prompt_ids.tolist(), found.completions[0].ids.tolist()
    bos, eos, end = (tokenizer.convert_tokens_to_ids(name) for name in ("<|bos|>", "<|eos|>", "<|end|>"))
    assert [place for place, token in enumerate(prompt + answer) if token == bos] == ([] if start == "none" else [0])
    assert eos not in prompt + answer
    assert answer.count(end) == 1
    assert answer[-1] == end
    if "control_spelled" not in found.notes:
        assert prompt == generation_ids(tokenizer, row)
    if "text_changed" not in found.notes:
        assert supervised_text(tokenizer, found) == row.completions[0][0]["content"] + "<|end|>"  # type: ignore[index]
    else:
        assert kind not in SPELLS_ALL


@settings(max_examples=25, suppress_health_check=[HealthCheck.filter_too_much])
@given(prompt=TEXTS, answer=ANSWERS)
@example(prompt="", answer="the")
@example(prompt="   ", answer="   the")
@example(prompt="<|bos|>the", answer="<|eos|>the")
@each_of(STARTS)
def test_plain_text_whoever_puts_the_bos(kind: str, start: str, prompt: str, answer: str) -> None:
    """T1, M1: plain prompts as generation encodes them, with a BOS once; the answer and one EOS."""
    tokenizer = STARTS[kind, start]
    found = Renderer(tokenizer, LIMITS).encode(Row("r", "f:1", prompt, (answer,)))
    bos, eos = (tokenizer.convert_tokens_to_ids(name) for name in ("<|bos|>", "<|eos|>"))
    if isinstance(found, Dropped):
        assert (prompt, found.reason) == ("", Reason.EMPTY_PROMPT)
        assert start != "automatic"
        return
    ids = found.prompt_ids.tolist()
    generation = tokenizer(prompt)["input_ids"]
    while start != "none" and generation[:2] == [bos, bos]:  # once is right, however often the text spells it
        generation = generation[1:]
    assert ids == generation
    assert ids[0] == bos or start != "automatic"
    last = found.completions[0].ids.tolist()
    assert last[-1] == eos
    if "text_changed" not in found.notes:
        wanted = answer if answer.endswith("<|eos|>") else answer + "<|eos|>"
        assert supervised_text(tokenizer, found) == wanted


# --- whole words ------------------------------------------------------------------------------------------------------

WORDS = ["Name", "a", "root", "the", "red", "kite", "is", "hall", "lamp", "to", "user", "assistant"]
SPACES = st.sampled_from([" ", "  ", "\n", " \t ", "        "])
SENTENCES = st.lists(st.tuples(st.sampled_from(WORDS + CONTROL), SPACES).map("".join), max_size=8).map("".join)


@settings(max_examples=25, suppress_health_check=[HealthCheck.filter_too_much])
@given(row=conversations(SENTENCES))
@example(row=chat("<|bos|> the", answers=("the <|end|> red",), system=""))
@each_of(list(product(["word level", "word piece"], ["automatic", "template", "none"])))
def test_random_conversations_of_whole_words(kind: str, start: str, row: Row) -> None:
    """M1, M2, T1, T3: the words of the answer, each once, and one end; what spells a control token is unknown."""
    tokenizer = STARTS.setdefault((kind, start), bordered(kind, start))
    found = encoded(Renderer(tokenizer, LIMITS), row)
    prompt, answer = found.prompt_ids.tolist(), found.completions[0].ids.tolist()
    bos, end = (tokenizer.convert_tokens_to_ids(name) for name in ("<|bos|>", "<|end|>"))
    assert [place for place, token in enumerate(prompt + answer) if token == bos] == ([] if start == "none" else [0])
    spelled = any(name in texts_of(row) for name in CONTROL)
    if not spelled:
        assert prompt == generation_ids(tokenizer, row)
    assert (prompt.count(end), answer.count(end)) == (len(row.prompt), 1)
    words = row.completions[0][0]["content"].split()  # type: ignore[index]
    if kind == "word level":
        assert answer == [*map(tokenizer.convert_tokens_to_ids, (
            "<|unk|>" if word in CONTROL else word for word in words)), end]
    elif not spelled:
        assert tokenizer.decode(answer).split() == [*words, "<|end|>"]
