"""Plain text for a model with a chat template is a warning; `--as-messages` renders it as messages."""

from typing import Any

import pytest

from helpers import CHATML, build_tokenizer
from tropism.commands.scoring.options_in_use import _as_typed
from tropism.config import InspectOptions
from tropism.data.audit.audit import Audit
from tropism.data.read_rows import read_rows
from tropism.data.rows import View
from tropism.data.tokenization.chat_template import TemplateOptions, check_effect, make_renderer
from tropism.data.tokenization.encode import fingerprint
from tropism.data.tokenization.truncate import Limits
from tropism.errors import DataError, ModelError, UsageError

LIMITS = Limits(1000)
TRIMMED = CHATML.replace("m.content", "m.content | trim")


def said(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def read(rows: list[dict[str, Any]], view: View, template: str | None = CHATML, **options: Any) -> Audit:
    given = TemplateOptions(**options)
    renderer = make_renderer(build_tokenizer(chat_template=template), LIMITS, given)
    audit = read_rows(rows, renderer, view)
    check_effect(given, renderer, audit.plain_rows)
    return audit


def names(audit: Audit) -> list[str]:
    return [finding.name for finding in audit.findings() if finding.name in ("plain_text", "leading_space")]


ROWS: dict[View, tuple[str, ...]] = {"unpaired": ("completion",), "single": ("completion",),
                                     "paired": ("chosen", "rejected")}


@pytest.mark.parametrize("view", ROWS)
@pytest.mark.parametrize("template", [CHATML, TRIMMED])
@pytest.mark.parametrize("options", [{}, {"system_prompt": "Be brief."}, {"supervise": "all"},
                                     {"control_tokens": "keep"}])
def test_ids_of_messages(view: View, template: str, options: dict[str, Any]) -> None:
    """T1: wrapped rows have the ids, masks, labels and notes of the same rows written as messages."""
    texts = ["An oak.", " An oak.", "one\n\ntwo\n", "<|end|> oak"]
    plain, messages = [], []
    for number, text in enumerate(texts):
        sides = {name: text + "!" * side for side, name in enumerate(ROWS[view])}
        label = {"label": number % 2 == 0} if view == "unpaired" else {}
        prompt = f" Name tree <|turn|> {number}. "
        plain.append({"prompt": prompt, **sides, **label})
        messages.append({"prompt": said("user", prompt), **label,
                         **{name: said("assistant", side) for name, side in sides.items()}})
    wrapped, given = read(plain, view, template, as_messages=True, **options), read(messages, view, template, **options)
    assert len(wrapped.rows) == len(given.rows) == 4
    for one, other in zip(wrapped.rows, given.rows, strict=True):
        assert one.prompt_ids.tolist() == other.prompt_ids.tolist()
        assert [side.ids.tolist() for side in one.completions] == [side.ids.tolist() for side in other.completions]
        assert [side.key for side in one.completions] == [side.key for side in other.completions]
        assert (one.desirable, one.split_key, one.notes) == (other.desirable, other.split_key, other.notes)
    assert names(wrapped) == ["leading_space"]
    assert not names(given)


@pytest.mark.parametrize(("row", "view"), [
    ({"prompt": "a", "completion": "b"}, "single"), ({"input": "a", "output": "b"}, "single"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "paired"), ({"prompt": "a", "response": "b",
                                                                  "preference": "chosen"}, "unpaired")])
def test_warning(row: dict[str, Any], view: View) -> None:
    """It names both options, and is there only for plain text and a template."""
    (finding,) = (found for found in read([row], view).findings() if found.name == "plain_text")
    assert finding.severity == "warning"
    assert "--as-messages" in finding.text
    assert "--plain-text" in finding.text
    assert finding.text in read([row], view).notices()
    assert not names(read([row], view, template=None))
    assert not names(read([row], view, plain_text=True))
    assert not names(read([row], view, as_messages=True))


@pytest.mark.parametrize("row", [
    {"prompt": said("user", "a"), "completion": said("assistant", "b")}, {"instruction": "a", "output": "b"},
    {"messages": said("user", "a") + said("assistant", "b")}, {"prompt": "a", "completion": "b", "system": "c"},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}])
def test_messages_are_not_plain_text(row: dict[str, Any]) -> None:
    assert not names(read([row], "single"))
    for option in ("as_messages", "plain_text"):
        with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} has no effect on data with messages"):
            read([row], "single", **{option: True})


def test_mixed_file() -> None:
    """One row of plain text among messages is enough for the warning and for both options to have an effect."""
    rows = [{"prompt": said("user", "a"), "completion": said("assistant", "b")}, {"prompt": "c", "completion": "d"}]
    assert names(read(rows, "single")) == ["plain_text"]
    assert not names(read(rows, "single", plain_text=True))
    assert len(read(rows, "single", as_messages=True).rows) == 2


def test_refused() -> None:
    """H2: options that exclude each other or cannot work, before anything is read."""
    with pytest.raises(UsageError, match="--as-messages and --plain-text exclude each other"):
        make_renderer(build_tokenizer(), LIMITS, TemplateOptions(as_messages=True, plain_text=True))
    with pytest.raises(ModelError, match="--as-messages: the tokenizer has no chat template"):
        make_renderer(build_tokenizer(chat_template=None), LIMITS, TemplateOptions(as_messages=True))
    made = make_renderer(build_tokenizer(chat_template=None), LIMITS,
                         TemplateOptions(as_messages=True, chat_template="plain"))
    assert made.as_messages


def test_empty_prompts_and_completions() -> None:
    """Rows without a prompt or a completion are dropped as others are, never an error."""
    rows = [{"prompt": "", "completion": "b"}, {"prompt": "a", "completion": ""}, {"prompt": "a", "completion": "b"}]
    audit = read(rows, "single", as_messages=True)
    assert len(audit.rows) == 1
    assert audit.reasons == {"empty_prompt": 1, "empty_completion": 1}
    with pytest.raises(DataError, match="no row is left"):
        read(rows[1:2], "single", as_messages=True)


def test_cache_tells_them_apart() -> None:
    """The option decides ids, so it decides the place of cached blocks; the silent one does not."""
    neither, wrapped, silent = (
        fingerprint(make_renderer(build_tokenizer(), LIMITS, options))
        for options in (TemplateOptions(), TemplateOptions(as_messages=True), TemplateOptions(plain_text=True)))
    assert neither == silent != wrapped


def test_options_of_inspect_and_scores() -> None:
    assert InspectOptions(model="m", as_messages=True).as_messages
    assert _as_typed({"as_messages": True, "beta": 0.1}) == "--as-messages --beta 0.1"
    assert _as_typed({"as_messages": False, "beta": None}) == "no --as-messages, no --beta"
