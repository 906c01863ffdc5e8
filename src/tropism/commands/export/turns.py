"""A chat template as the texts between its messages, found by rendering conversations, and as a Go template."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tropism.data.rows import Message
from tropism.errors import DataError

Render = Callable[[Sequence[Message]], str]
"""Renders messages and the generation prompt with the chat template."""

_WORDS = ("qmarka", "amarkb", "qmarkc", "amarkd", "qmarke", "smarkf")
_TEXTS = ("Why?", "line one\n\nline two", 'say "hi" to {{ .Content }} and """x"""',
          "\u00e9\u65e5\U0001f642 <b>&amp;</b> \\n", "1234 + 5", "{% if x %}", "a", "`code` 'single'")


class InexpressibleError(ValueError):
    """The template does more than put fixed texts between messages. Its text says what."""


@dataclass(frozen=True)
class Turns:
    """The fixed texts of a chat template that writes user and assistant messages in turn.

    Args:
        first: before the first user message, without a system message.
        system: before and after the system message, up to the first user message; None if the template refuses one.
        answer: between a user message and its answer.
        later: between an answer and the next user message.
        generate: between the last user message and the generated text.
    """

    first: str
    system: tuple[str, str] | None
    answer: str
    later: str
    generate: str

    def render(self, messages: Sequence[Message]) -> str:
        """The text of a conversation that ends with a user message; only its first message may be a system message."""
        text, turns = self.first, list(messages)
        if turns[0]["role"] == "system":
            before, after = self.system or (self.first, "")
            text = before + str(turns.pop(0)["content"]) + after
        for number, message in enumerate(turns):
            if message["role"] == "assistant":
                text += self.answer
            elif number:
                text += self.later
            text += str(message["content"])
        return text + self.generate

    def without_start(self, start: str) -> "Turns":
        """The same without a text that the server adds before all others."""
        system = self.system and (self.system[0].removeprefix(start), self.system[1])
        return replace(self, first=self.first.removeprefix(start), system=system)

    def go(self) -> str:
        """The Go template for Ollama, which calls it with `.System` and `.Messages`. It has no quotation marks outside
        of actions, and only printable characters and line ends."""
        start = go_text(self.first)
        if self.system is not None:
            before, after = map(go_text, self.system)
            start = f"{{{{ if .System }}}}{before}{{{{ .System }}}}{after}{{{{ else }}}}{start}{{{{ end }}}}"
        return (f'{{{{ $later := false }}}}{start}{{{{ range $i, $m := .Messages }}}}{{{{ if eq .Role "user" }}}}'
                f"{{{{ if $later }}}}{go_text(self.later)}{{{{ end }}}}{{{{ .Content }}}}"
                f"{{{{ if eq (len (slice $.Messages $i)) 1 }}}}{go_text(self.generate)}{{{{ end }}}}"
                f'{{{{ else if eq .Role "assistant" }}}}{go_text(self.answer)}{{{{ .Content }}}}'
                f"{{{{ $later = true }}}}{{{{ end }}}}{{{{ end }}}}")


def go_text(text: str) -> str:
    """A text in a Go template: as it is, or as a string constant if a part of it has a meaning there or in a
    Modelfile."""
    if all(char == "\n" or (char.isprintable() and char not in '{}"\\') for char in text):
        return text
    return '{{ "' + "".join(map(_go_escaped, text)) + '" }}'


def _go_escaped(char: str) -> str:
    if char.isprintable() and char not in '{}"\\':
        return char
    return "\\n" if char == "\n" else f"\\u{ord(char):04x}" if ord(char) < 2**16 else f"\\U{ord(char):08x}"


def turns_of(render: Render) -> tuple[Turns, list[str]]:
    """The texts between messages, compared with the template on other conversations.

    Returns:
        The texts, and a sentence for each thing that the template also does, and they do not.

    Raises:
        InexpressibleError: if conversations of user and assistant in turn do not have this shape.
        DataError: if the template rejects them.
    """
    q1, a1, q2, a2, q3, system = _WORDS
    first, answer, later, answer2, later2, generate = _between(render(_chat(q1, a1, q2, a2, q3)), q1, a1, q2, a2, q3)
    if (answer, later) != (answer2, later2) or _between(render(_chat(q1)), q1) != [first, generate]:
        raise InexpressibleError("it writes a message differently by its place in the conversation")
    remarks = []
    try:
        rendered = render(_chat(q1, a1, q2, system=system))
    except DataError:
        turns = Turns(first, None, answer, later, generate)
        remarks.append("The chat template rejects system messages. TEMPLATE ignores them.")
    else:
        before, after, *rest = _between(rendered, system, q1, a1, q2)
        if rest != [answer, later, generate]:
            raise InexpressibleError("it writes other messages differently if there is a system message")
        turns = Turns(first, (before, after), answer, later, generate)
    for messages in _probes(turns.system is not None):
        if render(messages) != turns.render(messages):
            raise InexpressibleError("it changes the text of messages")
    remarks += [f"The chat template {what} TEMPLATE does not." for what, content in (
        ("strips spaces and line ends around a message.", " \n a \n "),
        ("removes the thoughts of earlier answers.", "<think>\nb\n</think>\n\na"))
                if _differs(render, turns, _chat("a", content, "b")) or _differs(render, turns, _chat(content))]
    return turns, remarks


def _differs(render: Render, turns: Turns, messages: Sequence[Message]) -> bool:
    try:
        return render(messages) != turns.render(messages)
    except DataError:
        return True


def _between(text: str, *contents: str) -> list[str]:
    """The texts before, between and after contents that appear once each, in this order."""
    found = []
    for content in contents:
        if text.count(content) != 1:
            raise InexpressibleError("it leaves out or repeats messages, or changes their order")
        before, _, text = text.partition(content)
        found.append(before)
    return [*found, text]


def _chat(*contents: str, system: str | None = None) -> list[Message]:
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return messages + [{"role": ("user", "assistant")[number % 2], "content": content}
                       for number, content in enumerate(contents)]


def _probes(system: bool) -> Iterator[list[Message]]:
    for start in range(len(_TEXTS)):
        texts = _TEXTS[start:] + _TEXTS[:start]
        for count in (1, 3, 7):
            yield _chat(*texts[:count])
            if system:
                yield _chat(*texts[:count], system=texts[-1])
