"""The Modelfile of an export: where the weights are, how messages become text, and where generation stops."""

import re
from collections.abc import Mapping
from typing import Any

from tropism.commands.export.turns import InexpressibleError, turns_of
from tropism.data.tokenization.apply_template import ChatTemplate
from tropism.errors import DataError, ModelError, clause, first_line
from tropism.printable import one_line

FILE = "Modelfile"


def model_name(name: str) -> str:
    """A name for `ollama create`, made from the name of a directory."""
    return re.sub(r"[^a-z0-9_.-]+", "-", name.lower()).strip("-._") or "model"


def modelfile(tokenizer: Any, stop_tokens: Mapping[int, str], weights: str, template_kwargs: Mapping[str, Any],
              system_prompt: str | None, adds_bos: bool) -> tuple[str, list[str]]:
    """The content of a Modelfile.

    Args:
        tokenizer: with the chat template.
        stop_tokens: where generation stops, by their ids.
        weights: the GGUF file, or `.` for the directory of the Modelfile.
        template_kwargs: values for the chat template during training.
        system_prompt: that training added to conversations without one.
        adds_bos: whether the server adds the beginning of text itself.

    Returns:
        The content, and a sentence for each thing that it does not say.
    """
    missing: list[str] = []
    lines = [f"FROM {weights}", *_template(tokenizer, template_kwargs, adds_bos, missing)]
    if system_prompt is not None:
        lines += _quoted_line("SYSTEM", str(system_prompt), "The system prompt of the training", missing)
    special = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
    for token in stop_tokens.values():
        if token in special:
            lines += _quoted_line("PARAMETER stop", token, f"The stop token {token!r}", missing)
        else:
            missing.append(f"The stop token {token!r} is left out, because it is ordinary text, which an answer may "
                           "contain.")
    return "".join(f"{line}\n" for line in [*lines, *(f"# {one_line(sentence)}" for sentence in missing)]), missing


def _template(tokenizer: Any, kwargs: Mapping[str, Any], adds_bos: bool, missing: list[str]) -> list[str]:
    """The line of TEMPLATE; none if the chat template cannot be expressed as a Go template."""
    source = str(tokenizer.chat_template or "")
    template = ChatTemplate(tokenizer, kwargs, "the chat template")
    try:
        if not source:
            raise InexpressibleError("the tokenizer has none")
        if "strftime_now" in source:
            raise InexpressibleError("it writes the date")
        turns, remarks = turns_of(lambda messages: template.render(messages, None, "a conversation", generate=True))
    except (InexpressibleError, DataError, ModelError) as error:
        missing.append("TEMPLATE is left out, because the chat template cannot be written as a Go template: "
                       f"{clause(first_line(error))}. Ollama uses the one that it finds in the model, or none.")
        return []
    missing += remarks
    if adds_bos and tokenizer.bos_token:
        turns = turns.without_start(tokenizer.bos_token)
    return [f'TEMPLATE """{turns.go()}"""']


def _quoted_line(command: str, text: str, what: str, missing: list[str]) -> list[str]:
    """A command with a text. A Modelfile has no escapes: it cannot hold every text."""
    ends = any(line.rstrip().endswith('"""') for line in text.split("\n")[:-1])
    if not text.strip() or ends or any(not char.isprintable() and char not in "\n\t" for char in text):
        missing.append(f"{what} is left out, because a Modelfile cannot hold its text.")
        return []
    quotes = '"""' if '"' in text or "\n" in text else '"'
    return [f"{command} {quotes}{text}{quotes}"]
