"""Turns a row into token ids: chat template, border of prompt and completion, terminator, truncation."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NoReturn

from tropism.data.rows import Dropped, EncodedRow, Message, Reason, Row
from tropism.data.tokenization import turns
from tropism.data.tokenization.apply_template import ChatTemplate
from tropism.data.tokenization.conversation import Conversation
from tropism.data.tokenization.spelled import Spelled, texts_in
from tropism.data.tokenization.thoughts import is_mark
from tropism.data.tokenization.tokenizer import TextTokenizer, is_invisible
from tropism.data.tokenization.tool_arguments import with_argument_objects
from tropism.data.tokenization.truncate import Limits, PromptCutter, fit
from tropism.data.tree import Completion, prompt_key, token_ids
from tropism.errors import DataError, ModelError

ControlTokens = Literal["plain", "keep", "refuse"]
_SYSTEM = ("system", "developer")


class Renderer:
    """Turns rows into token ids.

    Prompt ids are exactly the ids that generation would get. Completion ids are the text that the chat template
    renders for the completion, including its terminator, or one EOS if it has none.

    Args:
        tokenizer: a Hugging Face tokenizer.
        limits: token limits.
        supervise: supervised assistant messages: the `last`, or `all` of a conversation.
        template_kwargs: values for the chat template.
        system_prompt: system message for conversations without one.
        template_name: name of the chat template in errors.
        control_tokens: what becomes of control tokens in the text of messages and tools: plain characters, the tokens
            themselves, or an error.
        as_messages: render plain text as a user message and an assistant message with the same content.
        plain_text: plain text is intended, though the tokenizer has a chat template. Changes no ids.

    Attributes:
        stop_ids: terminators of the completions rendered so far.
        saw_messages: True if any row had messages. Plain text uses no template.
    """

    def __init__(self, tokenizer: Any, limits: Limits, supervise: Literal["last", "all"] = "last", *,
                 template_kwargs: Mapping[str, Any] = MappingProxyType({}), system_prompt: str | None = None,
                 template_name: str = "the chat template", control_tokens: ControlTokens = "plain",
                 as_messages: bool = False, plain_text: bool = False) -> None:
        self.text = TextTokenizer(tokenizer)
        self.limits = limits
        self.supervise = supervise
        self.template_kwargs = dict(template_kwargs)
        self.system_prompt = system_prompt
        self.template_name = template_name
        self.control_tokens = control_tokens
        self.as_messages = as_messages
        self.plain_text = plain_text
        self.stop_ids: set[int] = set()
        self.saw_messages = False
        self._other = [name for name in self.text.added if not (name in self.text.control or is_mark(name))]
        self._last_prompt: tuple[str, dict[str, str], list[int]] = ("", {}, [])

    def encode(self, row: Row) -> EncodedRow | Dropped:
        """Token ids of a row after truncation, or the reason for dropping it.

        Raises:
            DataError: if the chat template rejects the messages of the row.
            ModelError: if the row has messages and the tokenizer has no chat template.
        """
        if self.as_messages and isinstance(row.prompt, str):
            if not row.prompt:
                return Dropped(row.place, Reason.EMPTY_PROMPT, "the prompt is empty")
            row = _with_messages(row, row.prompt)
        try:
            return self._encode(with_argument_objects(row))
        except turns.NothingToLearn as why:
            return Dropped(row.place, Reason.NO_SUPERVISED_TOKEN, str(why))
        except RecursionError:
            raise DataError(f"{row.place}: messages or tools are nested too deeply") from None

    def prompt_ids(self, prompt: str | Sequence[Message], place: str) -> list[int]:
        """The ids that generation gets for a prompt, of any length.

        Args:
            place: where it comes from, for errors.

        Raises:
            DataError: if the chat template rejects the messages.
        """
        if isinstance(prompt, str):
            return self.text.encode_prompt(prompt)
        return self._conversation(Row("", place, tuple(prompt), ()), set()).cutter.ids

    @property
    def terminators(self) -> set[int]:
        """Ids with which an assistant message usually ends: the EOS, and the one of the chat template."""
        assert self.text.eos_id is not None
        found = self._usual[1] if self.text.tokenizer.chat_template else ""
        return {self.text.eos_id, *([self.text.added[found]] if found else [])}

    def _encode(self, row: Row) -> EncodedRow | Dropped:
        notes: set[str] = set()
        turns.check_marks(row, self.supervise, notes)
        if isinstance(row.prompt, str):
            if self.control_tokens == "refuse" and (found := self.text.control_pattern.search(
                    "\n".join([row.prompt, *map(str, row.completions)]))):
                self._refuse(row, found.group())
            cutter, split = self._plain_prompt(row.prompt)
            encoded = [self._plain_completion(row.prompt, cutter.ids, str(text), notes) for text in row.completions]
        else:
            self.saw_messages = True
            conversation = self._conversation(row, notes)
            cutter, split = conversation.cutter, conversation.split_text
            encoded = [conversation.completion(tuple(messages))  # type: ignore[arg-type]
                       for messages in row.completions if cutter.ids]
            self.stop_ids |= conversation.stop_ids
            notes |= conversation.notes
        if any(is_invisible(given if isinstance(given, str) else given[-1].get("content") or " ")
               and not (isinstance(given, tuple) and given[-1].get("tool_calls")) for given in row.completions):
            notes.add("unseen")
        if not cutter.ids:
            return Dropped(row.place, Reason.EMPTY_PROMPT, "the prompt has no tokens")
        completions = [completion for completion in encoded if completion is not None]
        if len(completions) < len(encoded):
            return Dropped(row.place, Reason.EMPTY_COMPLETION, "a completion has no tokens besides its terminator")
        longest = max(len(completion.ids) for completion in completions)
        if self.limits.overlong == "drop" and self.limits.exceeded_by(len(cutter.ids), longest):
            return Dropped(row.place, Reason.TOO_LONG, f"a prompt of {len(cutter.ids):,} tokens and a completion of "
                           f"{longest:,} exceed the limit (--overlong drop)")
        prompt_ids, kept = fit(cutter, completions, self.limits)
        if any(completion is None for completion in kept):
            return Dropped(row.place, Reason.NO_SUPERVISED_TOKEN,
                           f"no supervised token after truncation to {self.limits.max_length} tokens "
                           f"(the prompt has {len(cutter.ids)})")
        final = [completion for completion in kept if completion is not None]
        if len(final) == 2 and final[0].key == final[1].key:
            return Dropped(row.place, Reason.IDENTICAL_PAIR, "chosen and rejected are equal after truncation")
        key = b""
        if len(prompt_ids) < len(cutter.ids):
            notes.add("prompt_cut")
            key = prompt_key(token_ids(cutter.ids))
        if any(short is not full for short, full in zip(final, completions, strict=True)):
            notes.add("completion_cut")
        return EncodedRow(row.id, row.place, token_ids(prompt_ids), tuple(final), row.desirable,
                          hashlib.blake2b(split.encode("utf-8", "surrogatepass"), digest_size=16).digest(),
                          frozenset(notes), prompt_key=key)

    def _plain_prompt(self, text: str) -> tuple[PromptCutter, str]:
        ids = self.text.encode_prompt(text)
        bos = 1 if ids and ids[0] == self.text.bos_id else 0
        return PromptCutter(ids, head=(bos,)), text

    def _plain_completion(self, prompt: str, prompt_ids: list[int], text: str, notes: set[str]) -> Completion | None:
        ids, exact = self.text.continue_text(prompt, prompt_ids, text)
        if not exact:
            notes.add("text_changed")
        eos = self.text.eos_id
        assert eos is not None
        if not ids:  # a normalizer may remove everything
            return None
        self.stop_ids.add(eos)
        return Completion.supervised(ids if ids[-1] == eos else [*ids, eos])

    @property
    def chat_template(self) -> ChatTemplate:
        """The tokenizer's chat template."""
        return ChatTemplate(self.text.tokenizer, self.template_kwargs, self.template_name)

    def template(self, messages: Sequence[Message], row: Row, *, generate: bool) -> str:
        """`ChatTemplate.render` with the tools and the place of a row."""
        return self.chat_template.render(messages, row.tools, row.place, generate=generate)

    def _conversation(self, row: Row, notes: set[str]) -> Conversation:
        prompt: list[Message] = [dict(message) for message in row.prompt]  # type: ignore[arg-type]
        if self.system_prompt is not None and not any(message["role"] in _SYSTEM for message in prompt):
            prompt.insert(0, {"role": "system", "content": self.system_prompt})
        text = "\n".join(texts_in([prompt, row.completions, row.tools]))
        names = {match.group() for match in self.text.control_pattern.finditer(text)}
        spoken = [name for name in self._other if name in text and name in self._usual[0]]
        if self.control_tokens == "refuse" and (names or spoken):
            self._refuse(row, min([*names, *spoken], key=text.index))
        if names:
            notes.add("control_spelled" if self.control_tokens == "plain" else "control_kept")
        if spoken:  # the template marks turns with them, but the tokenizer does not call them special
            notes.add("turn_spelled")
        spelled = Spelled(self.text.control_pattern, names if self.control_tokens == "plain" else (), text)
        return Conversation(self.chat_template, self.text, row, prompt, spelled, supervise=self.supervise,
                            terminator=lambda: self._usual[1], encode_prompt=self._prompt)

    def _refuse(self, row: Row, name: str) -> NoReturn:
        raise DataError(f"{row.place}: the text contains the control token '{name}' (--control-tokens refuse). Remove "
                        "it, or use --control-tokens plain.")

    @cached_property
    def _usual(self) -> tuple[str, str]:
        """A short conversation as the template renders it, and the control token that ends it."""
        spoken: list[Message] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
        try:
            text = self.chat_template.render(spoken, None, "", generate=False)
        except (DataError, ModelError):  # a template that wants other messages
            return "", ""
        end = self.text.terminator(text, text.rfind("Yes") + 3, content_shown="Yes" in text)
        return text, end.group() if end else ""

    def _prompt(self, text: str, names: dict[str, str], encode: Callable[[str], list[int]]) -> list[int]:
        """Ids of a rendered prompt. The last one is cached, since neighboring rows often share it."""
        if self._last_prompt[:2] != (text, names):
            self._last_prompt = (text, names, encode(text))
        return self._last_prompt[2]


def _with_messages(row: Row, prompt: str) -> Row:
    """A row of plain text as messages, their content unchanged."""
    return replace(row, prompt=({"role": "user", "content": prompt},), completions=tuple(
        ({"role": "assistant", "content": completion},) for completion in row.completions))
