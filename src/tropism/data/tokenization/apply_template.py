"""Applies a chat template within limits, and says in a sentence why a template fails."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tropism.data.rows import Message
from tropism.data.tokenization.template_limits import TemplateTimeout, limited
from tropism.data.tokenization.tool_arguments import render_with_arguments
from tropism.errors import DataError, ModelError

TEMPLATE_S = 30.0
"""Longest time in which a chat template may render one text. Usual ones need less than a millisecond."""
TEMPLATE_BYTES = 2**31
TEMPLATE_CHARACTERS = 10**8

_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        tokenizer: a Hugging Face tokenizer.
        kwargs: values for the template.
        name: its name in errors.
    """

    tokenizer: Any
    kwargs: Mapping[str, Any]
    name: str

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None, place: str, *, generate: bool) -> str:
        """The text of messages, with the generation prompt if `generate`.

        Raises:
            DataError: if the template rejects the messages or does not use the tools.
            ModelError: if there is no template.
        """
        source = getattr(self.tokenizer, "chat_template", None)
        if not source:
            raise ModelError("the data has messages, or text with a system message, history or tools, but the "
                             "tokenizer has no chat template. Set --chat-template, or use an instruct model or plain "
                             "text prompts alone.")
        if tools and _TOOLS.search(str(source)) is None:
            raise DataError(f"{place}: the row has tools, but {self.name} does not use them. Choose another with "
                            "--chat-template, or remove the column 'tools'.")
        # Without null values: some releases of transformers let templates write the word None.
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            text = render_with_arguments(lambda chat: str(limited(lambda: self.tokenizer.apply_chat_template(
                chat, tools=list(tools) if tools else None, add_generation_prompt=generate, tokenize=False,
                **self.kwargs), TEMPLATE_S, TEMPLATE_BYTES)), given)
        except TemplateTimeout:
            raise self._endless(place, f"did not end within {TEMPLATE_S:g} s") from None
        except (MemoryError, OverflowError):
            raise self._endless(place, f"needs more than {TEMPLATE_BYTES / 2**30:g} GiB of memory") from None
        except Exception as error:  # templates may raise anything
            raise DataError(f"{place}: {self.name} rejects these messages: {error}") from error
        if len(text) > TEMPLATE_CHARACTERS:
            raise self._endless(place, f"renders {len(text):,} characters, more than {TEMPLATE_CHARACTERS:,}")
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:  # in a role or a key of a tool; contents were checked before
                raise DataError(f"{place}: a message or tool has a lone surrogate, which tokenizers do not accept. "
                                "Fix the text's encoding.") from None
        return text

    def _endless(self, place: str, problem: str) -> DataError:
        return DataError(f"{place}: {self.name} {problem}. Fix the template, or choose another with --chat-template.")
