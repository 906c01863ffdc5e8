"""Turns a row into token ids: chat template, border of prompt and completion, terminator, truncation."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from tropism.data.formats.turn_marks import is_trained, without_marks
from tropism.data.rows import Dropped, EncodedRow, Message, Reason, Row
from tropism.data.tokenization import turns
from tropism.data.tokenization.template_limits import TemplateTimeout, limited
from tropism.data.tokenization.tokenizer import TextTokenizer, is_invisible
from tropism.data.tokenization.truncate import Limits, PromptCutter, fit
from tropism.data.tree import Completion, prompt_key, token_ids
from tropism.errors import DataError, ModelError

TEMPLATE_S = 30.0
"""Longest time in which a chat template may render one text. Usual ones need less than a millisecond."""
TEMPLATE_BYTES = 2**31
TEMPLATE_CHARACTERS = 10**8

_SYSTEM = ("system", "developer")
_TOOLS = re.compile(r"\btools\b")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_PRIVATE = "\U000f0000"  # first of the private-use characters that replace control tokens in user text


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

    Attributes:
        stop_ids: terminators of the completions rendered so far.
        saw_messages: True if any row had messages. Plain text uses no template.
    """

    def __init__(self, tokenizer: Any, limits: Limits, supervise: Literal["last", "all"] = "last", *,
                 template_kwargs: Mapping[str, Any] = MappingProxyType({}), system_prompt: str | None = None,
                 template_name: str = "the chat template") -> None:
        self.text = TextTokenizer(tokenizer)
        self.limits = limits
        self.supervise = supervise
        self.template_kwargs = dict(template_kwargs)
        self.system_prompt = system_prompt
        self.template_name = template_name
        self.stop_ids: set[int] = set()
        self.saw_messages = False
        self._last_prompt: tuple[str, dict[str, str], list[int]] | None = None

    def encode(self, row: Row) -> EncodedRow | Dropped:
        """Token ids of a row after truncation, or the reason for dropping it.

        Raises:
            DataError: if the chat template rejects the messages of the row.
            ModelError: if the row has messages and the tokenizer has no chat template.
        """
        try:
            return self._encode(row)
        except turns.NothingToLearn as why:
            return Dropped(row.place, Reason.NO_SUPERVISED_TOKEN, str(why))
        except RecursionError:
            raise DataError(f"{row.place}: messages or tools are nested too deeply") from None

    def _encode(self, row: Row) -> EncodedRow | Dropped:
        notes: set[str] = set()
        turns.check_marks(row, self.supervise, notes)
        if isinstance(row.prompt, str):
            cutter, split = self._plain_prompt(row.prompt)
            encoded = [self._plain_completion(row.prompt, cutter.ids, str(text), notes) for text in row.completions]
        else:
            self.saw_messages = True
            conversation = _Conversation(self, row)
            cutter, split = conversation.cutter, conversation.split_text
            encoded = [conversation.completion(tuple(messages), notes)  # type: ignore[arg-type]
                       for messages in row.completions if cutter.ids]
            if conversation.spelled:
                notes.add("control_spelled")
        if any(is_invisible(given if isinstance(given, str) else given[-1].get("content") or " ")
               and not (isinstance(given, tuple) and given[-1].get("tool_calls")) for given in row.completions):
            notes.add("unseen")
        if not cutter.ids:
            return Dropped(row.place, Reason.EMPTY_PROMPT, "the prompt has no tokens")
        completions = [completion for completion in encoded if completion is not None]
        if len(completions) < len(encoded):
            return Dropped(row.place, Reason.EMPTY_COMPLETION, "a completion has no tokens besides its terminator")
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

    def template(self, messages: Sequence[Message], row: Row, *, generate: bool) -> str:
        """The chat template's text for messages, with the generation prompt if `generate`.

        Raises:
            DataError: if the template rejects the messages or does not use the row's tools.
            ModelError: if there is no template.
        """
        tokenizer = self.text.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError("the data has messages, but the tokenizer has no chat template. Set --chat-template, or "
                             "use an instruct model or plain text prompts.")
        if row.tools and _TOOLS.search(str(tokenizer.chat_template)) is None:
            raise DataError(f"{row.place}: the row has tools, but {self.template_name} does not use them. Choose "
                            "another with --chat-template, or remove the column 'tools'.")
        # Without null values: some releases of transformers let templates write the word None.
        given = [{key: value for key, value in without_marks(message).items() if value is not None}
                 for message in messages]
        try:
            text = str(limited(lambda: tokenizer.apply_chat_template(
                given, tools=list(row.tools) if row.tools else None,
                add_generation_prompt=generate, tokenize=False, **self.template_kwargs), TEMPLATE_S, TEMPLATE_BYTES))
        except TemplateTimeout:
            raise self._endless(row, f"did not end within {TEMPLATE_S:g} s") from None
        except (MemoryError, OverflowError):
            raise self._endless(row, f"needs more than {TEMPLATE_BYTES / 2**30:g} GiB of memory") from None
        except Exception as error:  # templates may raise anything
            raise DataError(f"{row.place}: {self.template_name} rejects these messages: {error}") from error
        if len(text) > TEMPLATE_CHARACTERS:
            raise self._endless(row, f"renders {len(text):,} characters, more than {TEMPLATE_CHARACTERS:,}")
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:  # in a role or a key of a tool; contents were checked before
                raise DataError(f"{row.place}: a message or tool has a lone surrogate, which tokenizers do not "
                                "accept. Fix the text's encoding.") from None
        return text

    def _endless(self, row: Row, problem: str) -> DataError:
        return DataError(f"{row.place}: {self.template_name} {problem}. Fix the template, or choose another with "
                         "--chat-template.")

    def prompt(self, text: str, spelled: dict[str, str]) -> list[int]:
        """Ids of a rendered prompt. The last one is cached, since neighboring rows often share it."""
        last = self._last_prompt
        if last is None or last[:2] != (text, spelled):
            last = self._last_prompt = (text, spelled, self.encode_text(text, spelled))
        return last[2]

    def encode_text(self, text: str, spelled: dict[str, str]) -> list[int]:
        """Ids of rendered text, in which the keys of `spelled` replace control tokens in user text."""
        return self.text.encode_spelled(text, spelled) if spelled else self.text.encode(text)


def _texts(value: Any) -> Iterator[str]:
    """Every text in messages or tools, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts(list(value))
        yield from _texts(list(value.values()))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _texts(entry)


def _tool_name(tool: Any) -> str:
    """Name of a tool in a schema or call; empty if there is none, or if a template may quote or escape it."""
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) and _PLAIN_NAME.fullmatch(name) else ""


class _Conversation:
    """The encoding of one row of messages."""

    def __init__(self, renderer: Renderer, row: Row) -> None:
        self.renderer = renderer
        prompt: list[Message] = [dict(message) for message in row.prompt]  # type: ignore[arg-type]
        if renderer.system_prompt is not None and not any(message["role"] in _SYSTEM for message in prompt):
            prompt.insert(0, {"role": "system", "content": renderer.system_prompt})
        self.spelled: dict[str, str] = {}
        self._masks = self._find_spelled(prompt, row.completions, row.tools)
        self.row = replace(row, tools=tuple(self._masked(row.tools)) if row.tools else None)
        self.prompt: list[Message] = self._masked(prompt)
        self.completions_start = len(self.prompt)
        if renderer.supervise == "all":
            # A greeting with which the assistant opens the conversation is context, not a completion.
            first = next((i for i, message in enumerate(self.prompt)
                          if i and message["role"] == "assistant" and is_trained(message)), None)
            self.completions_start = len(self.prompt) if first is None else first
        head = self.prompt[: self.completions_start]
        self.prompt_text = renderer.template(head, self.row, generate=True) if head else ""
        if head:
            self._check_tools()
        ids = renderer.prompt(self.prompt_text, self.spelled) if self.prompt_text else []
        self.cutter = PromptCutter(ids, self._head(head, ids), lambda: self._shorter(head))
        users = [message.get("content") or "" for message in prompt if message["role"] == "user"]
        # The first user message only: prompts of later turns contain the completions of earlier ones.
        self.split_text = str(users[0]) if users else self._unmasked(self.prompt_text)

    def _check_tools(self) -> None:
        """T4: a template that expects tool schemas of another form silently renders nothing."""
        for tool in self.row.tools or ():
            if (name := _tool_name(tool)) and name not in self.prompt_text:
                raise DataError(f"{self.row.place}: tool '{name}' is missing in the rendered prompt: "
                                f"{self.renderer.template_name} needs schemas in another form, probably "
                                '{"type": "function", "function": {"name": ...}}')

    def _check_calls(self, message: Message, rendered: str) -> None:
        """M5: a tool call that the template does not render would be trained as a terminator only."""
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if (name := _tool_name(call)) and name not in rendered:
                raise DataError(f"{self.row.place}: {self.renderer.template_name} does not render the call of "
                                f"'{name}'. Choose another with --chat-template.")

    def _find_spelled(self, *given: Any) -> dict[str, str]:
        """Map each control token in the text of messages or tools to a private-use character of its own."""
        text = "\n".join(_texts(given))
        names = sorted({match.group() for match in self.renderer.text.control_pattern.finditer(text)})
        masks: dict[str, str] = {}
        mark = ord(_PRIVATE)
        for name in names:
            while chr(mark) in text:
                mark += 1
            masks[name] = chr(mark)
            self.spelled[chr(mark)] = name
            mark += 1
        return masks

    def _masked(self, value: Any) -> Any:
        """Messages or tools with private-use characters instead of control tokens."""
        if not self._masks:
            return value
        if isinstance(value, str):
            return self.renderer.text.control_pattern.sub(lambda match: self._masks[match.group()], value)
        if isinstance(value, dict):
            return {self._masked(key): self._masked(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self._masked(entry) for entry in value]
        return value

    def _unmasked(self, text: str) -> str:
        """Rendered text with its control tokens again. Which characters replace them depends on the completions."""
        return "".join(self.spelled.get(character, character) for character in text)

    def _encode(self, text: str) -> list[int]:
        return self.renderer.encode_text(text, self.spelled)

    def _head(self, messages: Sequence[Message], ids: list[int]) -> tuple[int, ...]:
        """Numbers of first tokens that truncation keeps: the BOS, or BOS and system message."""
        bos = 1 if ids and ids[0] == self.renderer.text.bos_id else 0
        if not messages or messages[0]["role"] != "system":
            return (bos,)
        try:
            system = self._encode(self.renderer.template(messages[:1], self.row, generate=False))
        except DataError:  # the template needs a user message first
            return (bos,)
        return (bos, len(system)) if ids[: len(system)] == system else (bos,)

    def _shorter(self, messages: Sequence[Message]) -> list[list[int]]:
        """The prompt without its oldest turns, longest first. Each begins with the system and a user message."""
        lead = 1 if messages and messages[0]["role"] == "system" else 0
        starts = [i for i, message in enumerate(messages) if message["role"] == "user" and i > lead]
        shorter = []
        for start in starts:
            kept = [*messages[:lead], *messages[start:]]
            shorter.append(self._encode(self.renderer.template(kept, self.row, generate=True)))
        return shorter

    def completion(self, messages: Sequence[Message], notes: set[str]) -> Completion | None:
        """Ids after the prompt, with a mask of the supervised assistant messages; None if these are empty."""
        rest = [*self.prompt[self.completions_start :], *(self._masked(message) for message in messages)]
        head = self.prompt[: self.completions_start]
        assistant = [i for i, message in enumerate(rest) if message["role"] == "assistant" and is_trained(message)]
        supervised = assistant if self.renderer.supervise == "all" else assistant[-1:]
        ids: list[int] = []
        mask: list[bool] = []
        before, before_ids, content_tokens = self.prompt_text, self.cutter.ids, 0
        for i in supervised:
            start = self.prompt_text if i == 0 and head else self.renderer.template(
                [*head, *rest[:i]], self.row, generate=True)
            if start != before:  # turns between the last supervised message and this one
                between, exact = self._between(before, before_ids + ids, start)
                if not exact:
                    notes.add("text_changed")
                ids += between
                mask += [False] * len(between)
            text, stop = self._render_message([*head, *rest[: i + 1]], start, notes)
            new, exact = self._continue(start, self.cutter.ids + ids, text)
            if not exact:
                notes.add("text_changed")
            ids += [*new, stop]
            self.renderer.stop_ids.add(stop)
            content = self._unmasked(rest[i].get("content") or "")
            tokens, terminator = turns.learned(rest[i], content, new, self.renderer.text.decode, self.row.place)
            mask += [*tokens, terminator]
            content_tokens += len(new)
            before = start + text + self._spell(stop)
        if not content_tokens:
            return None
        if not any(mask):
            raise turns.NothingToLearn("no token lies in a trained span of 'train_detail'")
        array = Completion.supervised(ids)
        if all(mask):
            return array
        return Completion(array.ids, array.loss_mask & mask)

    def _spell(self, token_id: int) -> str:
        return self.renderer.text.decode([token_id])

    def _between(self, before: str, ids: list[int], start: str) -> tuple[list[int], bool]:
        """Ids of the text from the last terminator to the start of the next supervised message."""
        if not start.startswith(before):
            raise DataError(f"{self.row.place}: {self.renderer.template_name} renders earlier turns differently when "
                            "later ones follow, so --supervise all is unsupported. Use --supervise last.")
        return self._continue(before, ids, start[len(before) :])

    def _continue(self, before: str, ids: list[int], text: str) -> tuple[list[int], bool]:
        return self.renderer.text.continue_text(before, ids, text, self.spelled)

    def _render_message(self, conversation: Sequence[Message], start: str, notes: set[str]) -> tuple[str, int]:
        """The last message as the template renders it, without its terminator, and the terminator's id."""
        text, content = self.renderer.text, conversation[-1].get("content") or ""
        full = self.renderer.template(conversation, self.row, generate=False)
        if not full.startswith(start):
            # The generation prompt has text that finished messages lack, such as a thinking tag.
            found = text.without_control(full).rfind(content.strip())
            if found < 0 or not content.strip():
                raise DataError(f"{self.row.place}: {self.renderer.template_name} changes the text of the completion, "
                                "so its tokens cannot be located. Choose another with --chat-template.")
            start = full[:found]
        rendered = full[len(start) :]
        if content.strip() and not rendered.strip():
            raise DataError(f"{self.row.place}: {self.renderer.template_name} does not render the completion. Choose "
                            "another with --chat-template.")
        plain = text.without_control(rendered)
        self._check_calls(conversation[-1], rendered)
        if content not in plain:  # the template trims it, for example
            notes.add("text_changed")
        shown = content if content in plain else content.strip()
        # A tool call has no content, and white space alone would be found anywhere.
        end = plain.rfind(shown) + len(shown) if shown.strip() and shown in plain else 0
        if stop := text.terminator(rendered, end, content_shown=end > 0):
            return rendered[: stop.start()], text.control[stop.group()]
        notes.add("eos_added")
        assert text.eos_id is not None
        # White space after the content separates turns and is not part of the completion.
        tail = rendered[end:]
        return rendered[:end] + (tail if tail.strip() else ""), text.eos_id
