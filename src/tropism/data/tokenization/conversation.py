"""The encoding of one row of messages: the prompt, and the supervised messages behind it."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tropism.data.rows import Message, Row
from tropism.data.tokenization import thoughts
from tropism.data.tokenization.apply_template import ChatTemplate
from tropism.data.tokenization.spelled import Spelled
from tropism.data.tokenization.tokenizer import TextTokenizer
from tropism.data.tokenization.truncate import PromptCutter
from tropism.data.tree import Completion
from tropism.errors import DataError

_LONG = 1 << 14  # characters of a text that is encoded in chunks, which prompts of other lengths share
_MANY = 8  # supervised messages that are each rendered with all turns before them
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class _Turn:
    """A message as it is given, and with marks instead of control tokens."""

    message: Message
    marked: Message

    @property
    def role(self) -> str:
        return str(self.message["role"])


@dataclass(frozen=True, slots=True)
class _Span:
    """A supervised message in the rendered conversation.

    Args:
        before: the text up to the last supervised message, or only its end.
        between: from there to the message.
        text: the message, without its terminator.
        stop: id of the terminator.
    """

    before: str
    between: str
    text: str
    stop: int

    @property
    def start(self) -> str:
        """All before the message."""
        return self.before + self.between


class Conversation:
    """The encoding of one row of messages.

    The template sees the messages as they are. If control tokens are spelled in them, it also sees them with marks
    instead, which says where in its text they are.

    Args:
        template: the chat template.
        text: the tokenizer.
        row: the row.
        prompt: its prompt, with the system message.
        spelled: the control tokens in its text that become plain characters.
        supervise: `last` or `all`.
        terminator: gives the control token with which the template usually ends a message; empty if there is none.
        encode_prompt: a cache for the ids of prompts: text, marks, and the function that encodes it.

    Attributes:
        prompt_text: the rendered prompt.
        cutter: its ids.
        split_text: decides the side of the train/evaluation split.
        stop_ids: terminators of the completions encoded so far.
        notes: what the audit says of the row.
    """

    def __init__(self, template: ChatTemplate, text: TextTokenizer, row: Row, prompt: Sequence[Message],
                 spelled: Spelled, *, supervise: str, terminator: Callable[[], str],
                 encode_prompt: Callable[[str, dict[str, str], Callable[[str], list[int]]], list[int]]) -> None:
        self.template, self.text, self.row, self.spelled, self.supervise = template, text, row, spelled, supervise
        self._terminator = terminator
        self.stop_ids: set[int] = set()
        self.notes: set[str] = set()
        self._tools = (row.tools, spelled.mark(row.tools))
        self._chunk = cache(self._encode_chunk)
        self.prompt = self._turns(prompt)
        self.completions_start = len(self.prompt)
        if supervise == "all":
            # A greeting with which the assistant opens the conversation is context, not a completion.
            first = next((i for i, turn in enumerate(self.prompt) if i and turn.role == "assistant"), None)
            self.completions_start = len(self.prompt) if first is None else first
        head = self.prompt[: self.completions_start]
        self.prompt_text = self._render(head, generate=True) if head else ""
        if head:
            self._check_tools()
            self._note_hidden(head)
        ids = encode_prompt(self.prompt_text, spelled.names, self._encode) if self.prompt_text else []
        self.cutter = PromptCutter(ids, self._head(head, ids), lambda: _Shorter(self, head))
        users = [message.get("content") or "" for message in prompt if message["role"] == "user"]
        # The first user message only: prompts of later turns contain the completions of earlier ones.
        self.split_text = str(users[0]) if users else spelled.restore(self.prompt_text)

    def completion(self, messages: Sequence[Message]) -> Completion | None:
        """Ids after the prompt, with a mask of the supervised assistant messages; None if these are empty.

        Raises:
            DataError: if the template does not render a message, or renders it differently when others follow.
        """
        turns = [*self.prompt, *self._turns(messages)]
        ids: list[int] = []
        mask: list[bool] = []
        known, content_tokens = list(self.cutter.ids), 0
        for span in self._spans(turns):
            between = self._continue(span.before, known, span.between) if span.between else []
            known += between
            new = self._continue(span.start, known, span.text)
            known += [*new, span.stop]
            self.stop_ids.add(span.stop)
            ids += [*between, *new, span.stop]
            mask += [False] * len(between) + [True] * (len(new) + 1)
            content_tokens += len(new)
        if not content_tokens:
            return None
        array = Completion.supervised(ids)
        return array if all(mask) else Completion(array.ids, array.loss_mask & mask)

    def _supervised(self, turns: Sequence[_Turn]) -> list[int]:
        """The messages that are trained on."""
        assistant = [i for i, turn in enumerate(turns) if i >= self.completions_start and turn.role == "assistant"]
        return assistant if self.supervise == "all" else assistant[-1:]

    def _spans(self, turns: Sequence[_Turn]) -> Iterable[_Span]:
        """The supervised messages as the template renders them."""
        supervised = self._supervised(turns)
        if len(supervised) > _MANY:
            notes = set(self.notes)
            try:
                return self._spans_nearby(turns, supervised)
            except DataError:
                self.notes = notes
        return self._spans_in_full(turns, supervised)

    def _spans_in_full(self, turns: Sequence[_Turn], supervised: Sequence[int]) -> Iterator[_Span]:
        """Each message is rendered with all turns before it."""
        before = self.prompt_text
        for i in supervised:
            start = self.prompt_text if i == self.completions_start and i else self._render(turns[:i], generate=True)
            if not start.startswith(before):
                raise self._unlike()
            text, stop = self._message(turns[: i + 1], start)
            yield _Span(before, start[len(before) :], text, stop)
            before = start + text + self.text.decode([stop])

    def _spans_nearby(self, turns: Sequence[_Turn], supervised: Sequence[int]) -> list[_Span]:
        """The same in time linear in the number of turns: each message is rendered with the first turns and the two
        supervised messages before it only. Together they must be the text of the whole conversation.

        Raises:
            DataError: if they are not, since the template looks further back.
        """
        whole = self._render(turns[: supervised[-1] + 1], generate=False)
        spans: list[_Span] = []
        end, last = len(self.prompt_text), ""
        for number, i in enumerate(supervised):
            near = supervised[max(number - 2, 0)] if number else self.completions_start
            window = [*turns[: self.completions_start], *turns[near : i + 1]]
            start = self._render(window[:-1], generate=True)
            before = start[: start.rindex(last) + len(last)] if number and last in start else self.prompt_text
            text, stop = self._message(window, start)
            last = text + self.text.decode([stop])
            spans.append(_Span(before, start[len(before) :], text, stop))
            if not (start.startswith(before) and whole.startswith(spans[-1].between + last, end)):
                raise self._unlike()
            end += len(spans[-1].between + last)
        start = self._render(turns[: supervised[-1]], generate=True)
        if not whole.startswith(self.prompt_text) or start != whole[: end - len(last)]:
            raise self._unlike()
        return spans

    def _unlike(self) -> DataError:
        return DataError(
            f"{self.row.place}: {self.template.name} renders earlier turns differently when later ones follow, for "
            "example without thoughts or terminators, so --supervise all is unsupported. To train every turn as "
            "generation writes it, make each one a row with `tropism convert DATA --to messages --turns all --output "
            "FILE`. Otherwise use --supervise last.")

    # --- rendering ----------------------------------------------------------------------------------------------------

    def _turns(self, messages: Sequence[Message]) -> list[_Turn]:
        return [_Turn(message, self.spelled.mark(message)) for message in messages]

    def _render(self, turns: Sequence[_Turn], *, generate: bool) -> str:
        """The template's text, with marks where control tokens are spelled.

        Raises:
            DataError: if control tokens in the text of messages change what the template writes around them.
        """
        text = self.template.render([turn.message for turn in turns], self._tools[0], self.row.place, generate=generate)
        if not self.spelled:
            return text
        marked = self.template.render([turn.marked for turn in turns], self._tools[1], self.row.place,
                                      generate=generate)
        if self.spelled.restore(marked) == text:
            return marked
        # The template reads or escapes them, and they are gone: all that are left are its own.
        if self._control(text) == self._control(marked):
            return text
        raise DataError(f"{self.row.place}: {self.template.name} treats the control token "
                        f"'{next(iter(self.spelled.names.values()))}' in the text of a message in its own way, so it "
                        "cannot become plain characters. Remove it, or use --control-tokens keep.")

    def _control(self, text: str) -> list[str]:
        return [match.group() for match in self.text.control_pattern.finditer(text)]

    # --- encoding -----------------------------------------------------------------------------------------------------

    def _encode_chunk(self, text: str) -> list[int]:
        return self.text.encode_spelled(text, self.spelled.names) if self.spelled else self.text.encode(text)

    def _encode(self, text: str) -> list[int]:
        if len(text) < _LONG:
            return self._encode_chunk(text)
        return [token for chunk in self.text.chunks(text) for token in self._chunk(chunk)]

    def _continue(self, before: str, ids: list[int], text: str) -> list[int]:
        new, exact = self.text.continue_text(before, ids, text, self.spelled.names)
        if not exact:
            self.notes.add("text_changed")
        return new

    def _head(self, turns: Sequence[_Turn], ids: list[int]) -> tuple[int, ...]:
        """Numbers of first tokens that truncation keeps: the BOS, or BOS and system message."""
        bos = 1 if ids and ids[0] == self.text.bos_id else 0
        if not turns or turns[0].role != "system":
            return (bos,)
        try:
            system = self._encode(self._render(turns[:1], generate=False))
        except DataError:  # the template needs a user message first
            return (bos,)
        return (bos, len(system)) if ids[: len(system)] == system else (bos,)

    # --- one message --------------------------------------------------------------------------------------------------

    def _message(self, turns: Sequence[_Turn], start: str) -> tuple[str, int]:
        """The last message as the template renders it behind `start`, without its terminator, and the terminator's
        id."""
        full = self._render(turns, generate=False)
        message = turns[-1].marked if self.spelled.in_text(full) else turns[-1].message
        content, opening = str(message.get("content") or ""), thoughts.opening_of(start)
        begin = len(start) if full.startswith(start) else self._begin(turns, full, start, content)
        rendered = full[begin:]
        restored = ""
        if begin != len(start) and opening and (thoughts.begins(content) or (
                thoughts.closes(content) and not thoughts.closes(rendered))):
            restored = thoughts.without_opening(content.strip(), start)
        if content.strip() and not rendered.strip():
            raise DataError(f"{self.row.place}: {self.template.name} does not render the completion. Choose another "
                            "with --chat-template.")
        self._check_calls(message, rendered)
        plain = self.text.without_added(rendered, content)
        if content not in opening + plain and not restored:  # the template trims it, for example
            self.notes.add("text_changed")
        shown = next((text for text in (content, content.strip(), thoughts.answer_of(content).strip())
                      if text.strip() and text in plain), "")
        # A tool call has no content, and white space alone would be found anywhere.
        end = plain.rfind(shown) + len(shown) if shown else 0
        text, stop = self._ended(rendered, end)
        if restored:
            self.notes.add("thought_restored")
            text = restored + text[end:]
        self._note_thoughts(message, opening, text)
        return text, stop

    def _begin(self, turns: Sequence[_Turn], full: str, start: str, content: str) -> int:
        """Where the last message begins in a text that differs before it: the generation prompt has text that finished
        messages lack, such as a thought, or the template renders earlier turns differently."""
        border = next((i for i, (one, other) in enumerate(zip(full, start, strict=False)) if one != other), len(full))
        bare = self._render(turns[:-1], generate=False)
        if start.startswith(bare) and border < len(bare):
            ends = (start[match.start() :] for match in self.text.control_pattern.finditer(start, border, len(bare)))
            if same := next((end for end in ends if end in full), ""):
                return full.rindex(same) + len(same)
        for text in (full, start):  # not inside a token
            border = self.text.outside_added(text, border)
        answer = thoughts.answer_of(content).strip()
        plain = self.text.without_added(full, content)
        # Behind a closed thought comes the answer alone.
        for wanted in (answer,) if thoughts.is_closed(start) else (content.strip(), answer):
            found = plain.rfind(wanted) if wanted else -1
            if found >= 0 and found + len(wanted) > border:
                # The template itself closes the thought that the generation prompt opens.
                return border if thoughts.opening_of(start) and thoughts.closes(full[border:found]) else found
        if not answer:
            return border
        raise DataError(f"{self.row.place}: {self.template.name} changes the text of the completion, so its tokens "
                        "cannot be located. Choose another with --chat-template.")

    def _ended(self, rendered: str, end: int) -> tuple[str, int]:
        """The text of a message up to its terminator, and the terminator's id."""
        if stop := self.text.terminator(rendered, end, content_shown=end > 0, usual=self._terminator):
            return rendered[: stop.start()], self.text.added[stop.group()]
        self.notes.add("eos_added")
        assert self.text.eos_id is not None
        # White space after the content separates turns and is not part of the completion.
        tail = rendered[end:]
        return rendered[:end] + (tail if tail.strip() else ""), self.text.eos_id

    def _note_thoughts(self, message: Message, opening: str, text: str) -> None:
        """T5: a thought that is not in the trained text, and an answer inside a thought that is not closed."""
        if any(thought not in text for thought in thoughts.thoughts_of(message)):
            self.notes.add("thought_hidden")
        content = str(message.get("content") or "")
        if (opening and not thoughts.closes(text)) or (thoughts.begins(content) and not thoughts.closes(content)):
            self.notes.add("thought_open")

    def _note_hidden(self, head: Sequence[_Turn]) -> None:
        """T5: a system message that is not in the prompt, and thoughts under a key if the template reads none."""
        shown = self.spelled.restore(self.prompt_text)
        read = re.search(rf"\b(?:{'|'.join(thoughts.KEYS)})\b", str(self.template.tokenizer.chat_template))
        for turn in head:
            content = turn.message.get("content")
            if turn.role in ("system", "developer") and isinstance(content, str) and content.strip() not in shown:
                self.notes.add("system_hidden")
            if not read and any(thought not in shown for thought in thoughts.under_keys(turn.message)):
                self.notes.add("thought_hidden")

    def _check_tools(self) -> None:
        """T4: a template that expects tool schemas of another form silently renders nothing."""
        for tool in self._tools[1] or ():
            if (name := _tool_name(tool)) and name not in self.prompt_text:
                raise DataError(f"{self.row.place}: tool '{name}' is missing in the rendered prompt: "
                                f"{self.template.name} needs schemas in another form, probably "
                                '{"type": "function", "function": {"name": ...}}')

    def _check_calls(self, message: Message, rendered: str) -> None:
        """M5: a tool call that the template does not render would be trained as a terminator only."""
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if (name := _tool_name(call)) and name not in rendered:
                raise DataError(f"{self.row.place}: {self.template.name} does not render the call of '{name}'. Choose "
                                "another with --chat-template.")


class _Shorter(Sequence[list[int]]):
    """The prompt without its oldest turns, longest first, each rendered when it is asked for. Each begins with the
    system message and a user message."""

    def __init__(self, conversation: Conversation, turns: Sequence[_Turn]) -> None:
        self._conversation, self._turns = conversation, turns
        self._lead = 1 if turns and turns[0].role == "system" else 0
        self._starts = [i for i, turn in enumerate(turns) if turn.role == "user" and i > self._lead]
        self._ids = cache(self._render)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: Any) -> Any:
        return self._ids(self._starts[number])  # an IndexError ends an iteration

    def _render(self, start: int) -> list[int]:
        kept = [*self._turns[: self._lead], *self._turns[start:]]
        return self._conversation._encode(self._conversation._render(kept, generate=True))


def _tool_name(tool: Any) -> str:
    """Name of a tool in a schema or call; empty if there is none, or if a template may quote or escape it."""
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) and _PLAIN_NAME.fullmatch(name) else ""
