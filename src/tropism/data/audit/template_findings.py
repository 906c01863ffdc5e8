"""What looks wrong in a chat template."""

from collections.abc import Sequence
from itertools import takewhile

from tropism.data.audit.findings import Finding
from tropism.data.rows import Message, Row
from tropism.data.tokenization.chat_template import CONTROL_TOKEN
from tropism.data.tokenization.render import Renderer
from tropism.errors import DataError, ModelError


def find_in_template(renderer: Renderer) -> list[Finding]:
    """What a short conversation shows of a template: its start, its end, and what generation is given."""
    asked: Sequence[Message] = [{"role": "user", "content": "Hi"}]
    row = Row("template", renderer.template_name, tuple(asked), ())
    try:
        prompt = renderer.template(asked, row, generate=True)
        bare = renderer.template(asked, row, generate=False)
        whole = renderer.template([*asked, {"role": "assistant", "content": "Yes"}], row, generate=False)
    except (DataError, ModelError):  # the rows say it better
        return []
    found = []
    name, text = renderer.template_name, renderer.text
    if prompt == bare:
        found.append(Finding("no_generation_prompt", "notice",
                             f"{name} has no generation prompt: what it puts before an answer is learned with it"))
    elif not whole.startswith(prompt):
        found.append(Finding("generation_prompt_adds", "info",
                             f"{name} begins an answer with {prompt[len(bare):]!r}, which a finished answer lacks: "
                             "it is given, not learned"))
    unknown = sorted(set(CONTROL_TOKEN.findall(whole + prompt)) - text.control.keys())
    if unknown:
        found.append(Finding("template_tokens", "notice",
                             f"{name} writes {', '.join(unknown)}, for which the tokenizer has no token: they are read "
                             "as plain characters. If the model does not expect that, take a template of its family"))
    # Those in front only: some templates begin every turn with it.
    leading = list(takewhile(lambda token: token == text.bos_id, text.encode(prompt)))
    begins = len(leading) if text.bos_id is not None else 1
    if begins > 1:
        found.append(Finding("two_bos", "warning", f"{name} writes {begins} BOS; take all but one out of it"))
    elif begins == 0 and text.encode_prompt("a")[:1] == [text.bos_id]:
        found.append(Finding("no_bos", "notice",
                             f"the tokenizer begins a text with a BOS, and {name} does not: conversations have "
                             "none, in training as in generation"))
    return found
