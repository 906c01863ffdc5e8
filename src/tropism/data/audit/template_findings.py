"""Findings about a chat template."""

from collections.abc import Sequence
from itertools import takewhile

from tropism.data.audit.findings import Finding
from tropism.data.rows import Message, Row
from tropism.data.tokenization.chat_template import CONTROL_TOKEN
from tropism.data.tokenization.render import Renderer
from tropism.errors import DataError, ModelError


def find_in_template(renderer: Renderer) -> list[Finding]:
    """Findings from a short conversation: generation prompt, control tokens, BOS."""
    messages: Sequence[Message] = [{"role": "user", "content": "Hi"}]
    row = Row("template", renderer.template_name, tuple(messages), ())
    try:
        prompt = renderer.template(messages, row, generate=True)
        bare = renderer.template(messages, row, generate=False)
        complete = renderer.template([*messages, {"role": "assistant", "content": "Yes"}], row, generate=False)
    except (DataError, ModelError):  # encoding the rows raises the same error, with the place
        return []
    found = []
    name, text = renderer.template_name, renderer.text
    if prompt == bare:
        found.append(Finding("no_generation_prompt", "notice",
                             f"{name} has no generation prompt. The text that it writes before a completion is "
                             "trained on too."))
    elif not complete.startswith(prompt):
        found.append(Finding("generation_prompt_adds", "info",
                             f"the generation prompt of {name} is {prompt[len(bare):]!r}, which finished completions "
                             "do not have. It is part of the prompt and not trained on."))
    unknown = sorted(set(CONTROL_TOKEN.findall(complete + prompt)) - text.added.keys())
    if unknown:
        found.append(Finding("template_tokens", "notice",
                             f"{name} uses {', '.join(unknown)}, for which the tokenizer has no token. They become "
                             "plain characters. If the model does not expect that, use a template of its family."))
    # Only those at the start: some templates begin every turn with a BOS.
    first_bos = list(takewhile(lambda token: token == text.bos_id, text.encode(prompt)))
    bos_count = len(first_bos) if text.bos_id is not None else 1
    if bos_count > 1:
        found.append(Finding("two_bos", "warning", f"{name} begins with {bos_count} BOS tokens. Remove all but one "
                             "from the template."))
    elif bos_count == 0 and text.encode_prompt("a")[:1] == [text.bos_id]:
        found.append(Finding("no_bos", "notice",
                             f"the tokenizer adds a BOS to plain text, but {name} does not write one. Conversations "
                             "have no BOS, in training and in generation."))
    return found
