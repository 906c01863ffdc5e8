"""A conversation: questions, answers of one or two models, and what the user says of them."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tropism.commands.chat.feedback import Feedback, Prompt
from tropism.commands.chat.speaker import Answer, Speaker, interruptible
from tropism.data.rows import Message
from tropism.errors import DataError, TropismError, UsageError, count_of, did_you_mean
from tropism.model.options import GenerationOptions
from tropism.observe.console import Voice

_NAMES = ("A", "B")


@dataclass
class Exchange:
    """The last question and its answers.

    Args:
        question: of the user.
        prompt: that the models were given.
        answers: in the order in which they were shown.
        order: numbers of the models in this order.
        chosen: number of the answer that the conversation continues with.
        judged: the user has said which is better, or whether it is good.
    """

    question: str
    prompt: Prompt
    answers: list[Answer]
    order: Sequence[int]
    chosen: int = 0
    judged: bool = False


@dataclass
class Session:
    """What was said so far, and the commands of the user.

    Args:
        speakers: one model, or two that are compared.
        options: of generation.
        out: prints the answers.
        notes: prints everything else.
        blind: shuffle the models until the user has chosen.
        system: system message.
        feedback: file for rows.
        attended: a person sits at a terminal.
    """

    speakers: Sequence[Speaker]
    options: GenerationOptions
    out: Voice
    notes: Voice
    blind: bool = False
    system: str | None = None
    feedback: Feedback | None = None
    attended: bool = True
    turns: list[tuple[str, str]] = field(default_factory=list)
    last: Exchange | None = None
    tally: dict[str, int] = field(default_factory=dict)
    ended: bool = False
    _asked: int = 0
    _shuffle: random.Random = field(default_factory=random.SystemRandom)

    @property
    def plain(self) -> bool:
        """Whether texts are continued without a chat template. Each stands alone."""
        return self.speakers[0].plain

    @property
    def compares(self) -> bool:
        """Whether two models answer."""
        return len(self.speakers) > 1

    def take(self, line: str) -> None:
        """Act on a line of the user: a command, or a question.

        Raises:
            UsageError: for a command that is unknown or has no effect now.
            TropismError: if the models cannot answer, or a row cannot be written.
        """
        if not line.strip():
            return
        if not line.startswith("/"):
            self._ask(line.strip())
            return
        name, _, text = line[1:].strip().partition(" ")
        if name not in (known := self._commands()):
            raise UsageError(f"unknown command /{name}. To send text that begins with a slash, put a space before it. "
                             + did_you_mean(name, known, "/{}"))
        known[name][0](text.strip())

    def _commands(self) -> Mapping[str, tuple[Callable[[str], None], str, str]]:
        """The commands of this session: what they do, their argument, and their help."""
        judging: dict[str, Any] = {
            "a": (lambda _: self._choose(0), "", "choose answer A: the conversation continues with it"),
            "b": (lambda _: self._choose(1), "", "choose answer B"),
            "tie": (lambda _: self._choose(None), "", "say that neither is better; no row is added"),
        } if self.compares else {
            "good": (lambda _: self._label(True), "", "add the last answer to the feedback as desirable"),
            "bad": (lambda _: self._label(False), "", "add the last answer to the feedback as undesirable"),
        }
        return {
            **judging,
            "retry": (self._retry, "", "answer the last question again"),
            "reset": (self._reset, "", "forget the conversation"),
            "system": (self._system, "TEXT", "set the system message; without TEXT, remove it"),
            "temperature": (self._temperature, "NUMBER", "set the temperature; 0 takes the most likely token"),
            "help": (self._help, "", "list the commands"),
            "quit": (self._quit, "", "leave"),
        }

    # --- asking -------------------------------------------------------------------------------------------------------

    def _ask(self, question: str) -> None:
        try:
            question.encode()
        except UnicodeEncodeError:
            raise UsageError("the text is not UTF-8. Check the encoding of the terminal.") from None
        turns = [*self.turns, *self._last_turn()]
        prompt, ids, kept = self._fitting(turns, question)
        if kept < len(turns):
            self.notes.warn(f"dropped {count_of(len(turns) - kept, 'turn')} from the start of the conversation: it no "
                            f"longer fits into the model's {min(self._positions()):,} positions")
        self.turns, self.last = turns[len(turns) - kept:], None
        order = [0, 1] if self.compares else [0]
        if self.blind:
            self._shuffle.shuffle(order)
        self._asked += 1
        answers = [self._answer(ids[number], number, place) for place, number in enumerate(order)]
        if any(answer.text or answer.end != "interrupted" for answer in answers):
            self.last = Exchange(question, prompt, answers, order)

    def _fitting(self, turns: Sequence[tuple[str, str]], question: str) -> tuple[Prompt, list[list[int]], int]:
        """The prompt with as many of the last turns as leave room for an answer, its ids for each model, and their
        number.

        Raises:
            DataError: if the question alone leaves none, or the chat template rejects the conversation.
        """
        for start in range(len(turns) + 1):
            prompt = question if self.plain else self._messages(turns[start:], question)
            ids = [speaker.ids(prompt) for speaker in self.speakers]
            if not all(ids):
                raise DataError("the text has no tokens, so there is nothing to continue")
            rooms = [speaker.room(one, self.options.max_new_tokens) for speaker, one in zip(
                self.speakers, ids, strict=True)]
            wanted = min([self.options.max_new_tokens, *(positions // 2 for positions in self._positions())])
            if min(rooms) >= (wanted if start < len(turns) else 1):
                return prompt, ids, len(turns) - start
        raise DataError(f"the prompt has {count_of(max(map(len, ids)), 'token')}, which leaves no room for an answer "
                        f"in the model's {min(self._positions()):,} positions. Use a shorter text.")

    def _positions(self) -> list[int]:
        return [speaker.positions for speaker in self.speakers if speaker.positions is not None]

    def _messages(self, turns: Sequence[tuple[str, str]], question: str) -> list[Message]:
        said = [] if self.system is None else [{"role": "system", "content": self.system}]
        for asked, answered in turns:
            said += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [*said, {"role": "user", "content": question}]

    def _answer(self, ids: Sequence[int], number: int, place: int) -> Answer:
        speaker = self.speakers[number]
        if self.compares:
            self.out.say(_NAMES[place] + ":" + ("" if self.blind else f" {speaker.name}"))

        def answer(halted: Callable[[], bool]) -> Answer:
            return speaker.answer(ids, self.options, self.options.seed + self._asked, self.out.stream,
                                  lambda: halted() or self.out.console.quiet)

        if self.attended:
            with interruptible() as halted:
                found = answer(halted)
        else:
            found = answer(lambda: False)
        self.out.end_stream()
        if found.end == "interrupted":
            self.notes.say("(stopped)")
        elif found.end == "length":
            most = speaker.room(ids, self.options.max_new_tokens)
            self.notes.say(f"(cut at {count_of(most, 'token')}" + (
                ")" if most == self.options.max_new_tokens else ", where the model's positions end)"))
        elif not found.text:
            self.notes.say("(empty answer)")
        return found

    def _last_turn(self) -> list[tuple[str, str]]:
        """The last question with the chosen answer; none in plain text, where each text stands alone."""
        last = self.last
        return [] if last is None or self.plain else [(last.question, last.answers[last.chosen].text)]

    # --- commands -----------------------------------------------------------------------------------------------------

    def _answered(self) -> Exchange:
        if self.last is None:
            raise UsageError("there is no answer yet")
        return self.last

    def _unjudged(self) -> Exchange:
        last = self._answered()
        if last.judged:
            raise UsageError("you have judged this answer already. To get another one, use /retry.")
        return last

    def _label(self, desirable: bool) -> None:
        if self.feedback is None:
            raise UsageError("no file for feedback was given. Start with --feedback FILE.")
        last = self._unjudged()
        if not last.answers[0].text.strip():
            raise UsageError("the answer is empty, so there is no row to add")
        self.feedback.label(last.prompt, last.answers[0].text, desirable)
        last.judged = True
        self._tell_added("desirable" if desirable else "undesirable", last.answers)

    def _choose(self, place: int | None) -> None:
        last = self._unjudged()
        names = [self.speakers[number].name for number in last.order]
        better, other = (None, None) if place is None else (last.answers[place], last.answers[1 - place])
        if self.feedback is not None and better is not None and other is not None:
            if better.text == other.text or not (better.text.strip() and other.text.strip()):
                what = "equal" if better.text == other.text else "not both text"
                self.notes.warn(f"the answers are {what}, so no row was added")
            else:
                self.feedback.prefer(last.prompt, better.text, other.text)
                self._tell_added("pair", last.answers)
        last.judged, last.chosen = True, place or 0
        winner = "tie" if place is None else names[place]
        self.tally[winner] = self.tally.get(winner, 0) + 1
        if self.blind:
            self.notes.say(f"A was {names[0]}, B was {names[1]}")

    def _tell_added(self, what: str, answers: Sequence[Answer]) -> None:
        assert self.feedback is not None
        self.notes.say(f"added to {self.feedback.path}: {what}, row {self.feedback.rows:,}")
        if any(answer.end != "stop" for answer in answers):
            self.notes.warn("an answer of this row was cut or stopped. Training takes its last word as the end.")

    def _retry(self, text: str) -> None:
        last = self._answered()
        self.last = None
        try:
            self._ask(last.question)
        finally:
            self.last = self.last or last
        if not self.options.temperature and {one.text for one in last.answers} == {
                one.text for one in self.last.answers}:
            self.notes.say("At temperature 0 the answer stays the same. For another one, set /temperature 0.8")

    def _reset(self, text: str) -> None:
        self.turns, self.last = [], None
        self.notes.say("new conversation")

    def _system(self, text: str) -> None:
        if self.plain:
            raise UsageError("a system message has no effect on plain text, which has no roles")
        before, self.system = self.system, text or None
        try:
            for speaker in self.speakers:
                speaker.ids(self._messages([], "Hi"))
        except TropismError as error:
            self.system = before
            raise UsageError(f"the system message was not set: {error}") from error
        self.notes.say("system message set" if text else "system message removed")

    def _temperature(self, text: str) -> None:
        try:
            self.options = type(self.options).model_validate({**self.options.model_dump(), "temperature": text})
        except ValueError:
            raise UsageError(f"/temperature: {text!r} is not a temperature. Use 0, or a number from 0.01 to 100."
                             ) from None
        self.notes.say(f"temperature {self.options.temperature:g}")

    def _help(self, text: str) -> None:
        for name, (_, argument, what) in self._commands().items():
            self.notes.say(f"  /{name} {argument}".ljust(22) + what)
        if self.attended:
            self.notes.say("  Ctrl-C".ljust(22) + "stop an answer; at the prompt, leave",
                           "  Ctrl-D".ljust(22) + "leave")

    def _quit(self, text: str) -> None:
        self.ended = True
