"""Which chat template renders messages, and what it is given: options, templates of our own, and a look at them."""

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Literal

import jinja2
from pydantic import field_validator

from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.tokenizer import TextTokenizer
from tropism.data.tokenization.truncate import Limits
from tropism.errors import ModelError, UsageError
from tropism.options import Options

NAMES = ("chatml", "gemma", "llama3", "phi3", "plain")
"""Templates that come with the package."""

_OURS = {"tools", "documents", "messages", "conversation", "chat_template", "add_generation_prompt", "tokenize",
         "continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict",
         "return_assistant_tokens_mask", "tokenizer_kwargs", "bos_token", "eos_token"}
CONTROL_TOKEN = re.compile(r"<\|[a-zA-Z]\w*\|>|<(?:start|end)_of_turn>")
"""How control tokens of chat templates are spelled."""
_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # of transformers; jinja alone knows it not


class TemplateOptions(Options):
    """How messages become text."""

    heading: ClassVar[str] = "Data"

    chat_template: str | None = None
    """Chat template: a file, or one of chatml, gemma, llama3, phi3 and plain. Default: the tokenizer's own."""
    chat_template_kwargs: str | None = None
    """Values for the chat template, as JSON or as NAME=VALUE, comma-separated. For example enable_thinking=false."""
    system_prompt: str | None = None
    """System message for conversations without one."""
    supervise: Literal["last", "all"] = "last"
    """Assistant messages to train on: the last one of a conversation, or all of them."""

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        """A mapping from Python or YAML is what the command line writes as JSON."""
        return json.dumps(value) if isinstance(value, dict) else value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _readable(cls, value: str | None) -> str | None:
        if value is not None:
            taken = _OURS & set(parse_kwargs(value))
            if taken:
                raise ValueError(f"chat_template_kwargs: '{min(taken)}' is set by Tropism")
        return value

    @field_validator("chat_template")
    @classmethod
    def _there(cls, value: str | None) -> str | None:
        if value is not None and value not in NAMES and not Path(value).expanduser().is_file():
            raise ValueError(f"chat_template: {value!r} is neither a file nor one of {', '.join(NAMES)}")
        return value

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Values for the chat template, by name."""
        return parse_kwargs(self.chat_template_kwargs or "")


def parse_kwargs(text: str) -> dict[str, Any]:
    """Values from JSON, or from `NAME=VALUE,NAME=VALUE`, where a value that is no JSON is text.

    Raises:
        ValueError: for what is neither.
    """
    if text.lstrip().startswith("{"):
        try:
            return dict(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"chat_template_kwargs: not valid JSON: {error}") from None
    found: dict[str, Any] = {}
    for entry in text.split(",") if text.strip() else ():
        name, equals, value = entry.partition("=")
        if not (equals and name.strip().isidentifier()):
            raise ValueError(f"chat_template_kwargs: {entry!r} is not NAME=VALUE, as in enable_thinking=false")
        try:
            found[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            found[name.strip()] = value.strip()
    return found


def template_text(named: str) -> str:
    """The template that comes under a name, or that stands in a file.

    Raises:
        UsageError: with FILE:LINE, for a file that cannot be read or is no template.
    """
    if named in NAMES:
        return (resources.files("tropism.data") / "chat_templates" / f"{named}.jinja").read_text(encoding="utf-8")
    try:
        text = Path(named).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"chat_template: {named}: cannot be read: {error}") from None
    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION_TAG.sub("", text))
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"chat_template: {named}:{error.lineno}: not a template: {error.message}") from None
    return text


def make_renderer(tokenizer: Any, limits: Limits, options: TemplateOptions) -> Renderer:
    """A renderer for these options.

    The tokenizer keeps the template that was chosen: it is what generation and the exported model must use.

    Raises:
        UsageError: for a template that cannot be read, or values that it does not use.
        ModelError: where the tokenizer has no token for what a template of ours writes.
    """
    name = "the chat template"
    if options.chat_template is not None:
        text = template_text(options.chat_template)
        name = f"the chat template {options.chat_template}"
        if options.chat_template in NAMES:
            _check_tokens(options.chat_template, _written(text, options.chat_template), tokenizer)
        tokenizer.chat_template = text
    kwargs = options.template_kwargs
    _check_used(kwargs, tokenizer, name)
    return Renderer(tokenizer, limits, options.supervise, template_kwargs=kwargs, system_prompt=options.system_prompt,
                    template_name=name)


def check_effect(options: TemplateOptions, renderer: Renderer) -> None:
    """After the rows have been rendered: options of templates do nothing for plain text.

    Raises:
        UsageError: naming the first option that had no effect.
    """
    if renderer.saw_messages:
        return
    for name in ("chat_template", "chat_template_kwargs", "system_prompt"):
        if getattr(options, name) is not None:
            raise UsageError(f"{name} has no effect: the data is plain text, which no template renders. Give messages, "
                             "or leave the option out")
    if options.supervise == "all":
        raise UsageError("supervise 'all' has no effect: the data is plain text, without turns")


def _check_tokens(name: str, written: set[str], tokenizer: Any) -> None:
    missing = sorted(written - TextTokenizer(tokenizer).control.keys())
    if missing:
        raise ModelError(f"chat_template {name}: the tokenizer has no token {', '.join(missing)}; take a template of "
                         "the model's family, or plain, which needs none")


def _check_used(kwargs: Mapping[str, Any], tokenizer: Any, name: str) -> None:
    """Jinja takes any name in silence."""
    template = tokenizer.chat_template
    text = "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template or "")
    words = set(re.findall(r"\w+", text))
    for given in kwargs:
        if given not in words:
            close = get_close_matches(given, words, n=1)
            raise UsageError(f"chat_template_kwargs: {name} does not use '{given}'"
                             + (f", did you mean {close[0]}?" if close else ""))


def _written(text: str, name: str) -> set[str]:
    """Control tokens that a template of ours writes."""
    if name == "phi3":  # it puts the role into the token
        return {"<|user|>", "<|assistant|>", "<|end|>"}
    return set(CONTROL_TOKEN.findall(text))
