"""Chooses the chat template that renders messages, and its values: options, built-in templates, checks."""

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Literal

import jinja2
from pydantic import field_validator

from tropism.data.tokenization.render import ControlTokens, Renderer
from tropism.data.tokenization.tokenizer import TextTokenizer
from tropism.data.tokenization.truncate import Limits
from tropism.errors import ModelError, UsageError
from tropism.options import Options

NAMES = ("chatml", "gemma", "llama3", "phi3", "plain")
"""Built-in templates."""

_RESERVED = {"tools", "documents", "messages", "conversation", "chat_template", "add_generation_prompt", "tokenize",
         "continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict",
         "return_assistant_tokens_mask", "tokenizer_kwargs", "bos_token", "eos_token"}
CONTROL_TOKEN = re.compile(r"<\|[a-zA-Z]\w*\|>|<(?:start|end)_of_turn>")
"""Matches the control tokens of common chat templates."""
_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # an extension of transformers, unknown to jinja2


class PromptOptions(Options):
    """How messages become a prompt."""

    heading: ClassVar[str] = "Data"

    chat_template: str | None = None
    """Chat template: a file, or one of chatml, gemma, llama3, phi3 and plain. Default: the tokenizer's own."""
    chat_template_kwargs: str | None = None
    """Variables for the chat template, as JSON or comma-separated NAME=VALUE pairs. For example
    enable_thinking=false."""
    system_prompt: str | None = None
    """System message for conversations without one."""

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _kwargs_as_text(cls, value: Any) -> Any:
        """A mapping from Python or YAML as JSON, as on the command line."""
        return json.dumps(value) if isinstance(value, dict) else value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _valid_kwargs(cls, value: str | None) -> str | None:
        if value is not None:
            taken = _RESERVED & set(parse_kwargs(value))
            if taken:
                raise ValueError(f"'{min(taken)}' is set by Tropism")
        return value

    @field_validator("chat_template")
    @classmethod
    def _exists(cls, value: str | None) -> str | None:
        if value is not None and value not in NAMES and not Path(value).expanduser().is_file():
            raise ValueError(f"{value!r} is neither a file nor one of {', '.join(NAMES)}")
        return value

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Values for the chat template, by name."""
        return parse_kwargs(self.chat_template_kwargs or "")


class TemplateOptions(PromptOptions):
    """How messages become text."""

    heading: ClassVar[str] = "Data"

    supervise: Literal["last", "all"] = "last"
    """Assistant messages to train on: the last one of a conversation, or all of them."""
    control_tokens: ControlTokens = "plain"
    """Control tokens (the tokenizer's special tokens) spelled in the text of messages and tools: encode them as plain
    characters, keep them as tokens, or refuse the row."""

    as_messages: bool = False
    """Render rows of plain text with the chat template: the prompt as a user message, the completion as an assistant
    message."""
    plain_text: bool = False
    """Train on plain text as it is, without a warning that the model has a chat template."""


def parse_kwargs(text: str) -> dict[str, Any]:
    """Values from JSON or from `NAME=VALUE,NAME=VALUE`. A value that is not JSON is text.

    Raises:
        ValueError: for anything else.
    """
    if text.lstrip().startswith("{"):
        try:
            return dict(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"not valid JSON: {error}") from None
    found: dict[str, Any] = {}
    for entry in text.split(",") if text.strip() else ():
        name, equals, value = entry.partition("=")
        if not (equals and name.strip().isidentifier()):
            raise ValueError(f"{entry!r} is not NAME=VALUE, as in enable_thinking=false")
        try:
            found[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            found[name.strip()] = value.strip()
    return found


def template_text(named: str) -> str:
    """The text of a built-in template or of a template file.

    Raises:
        UsageError: for a file that cannot be read or is not a valid template.
    """
    if named in NAMES:
        return (resources.files("tropism.data") / "chat_templates" / f"{named}.jinja").read_text(encoding="utf-8")
    try:
        text = Path(named).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--chat-template: {named}: cannot be read: {error}") from None
    try:
        parser = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])  # noqa: S701  nothing is rendered
        parser.parse(_GENERATION_TAG.sub("", text))
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"--chat-template: {named}:{error.lineno}: not a valid template: {error.message}") from None
    except RecursionError:
        raise UsageError(f"--chat-template: {named}: not a valid template: expressions are nested too deeply") from None
    return text


def make_renderer(tokenizer: Any, limits: Limits, options: TemplateOptions) -> Renderer:
    """Build the renderer for these options.

    The chosen template is set on the tokenizer, since generation and the exported model must use it too.

    Raises:
        UsageError: for a template that cannot be read, values that it does not use, or options that exclude each other.
        ModelError: if the tokenizer lacks a control token of a built-in template, or the template that `as_messages`
            needs.
    """
    if options.as_messages and options.plain_text:
        raise UsageError("--as-messages and --plain-text exclude each other. Remove one of them.")
    name = "the chat template"
    if options.chat_template is not None:
        text = template_text(options.chat_template)
        name = f"the chat template {options.chat_template}"
        if options.chat_template in NAMES:
            _check_tokens(options.chat_template, _control_tokens(text, options.chat_template), tokenizer)
        tokenizer.chat_template = text
    kwargs = options.template_kwargs
    _check_used(kwargs, tokenizer, name)
    if options.as_messages and not tokenizer.chat_template:
        raise ModelError("--as-messages: the tokenizer has no chat template. Choose one with --chat-template, or "
                         "remove the option.")
    return Renderer(tokenizer, limits, options.supervise, template_kwargs=kwargs, system_prompt=options.system_prompt,
                    template_name=name, control_tokens=options.control_tokens,
                    as_messages=options.as_messages, plain_text=options.plain_text)


def check_effect(options: TemplateOptions, renderer: Renderer, plain_rows: int = 0) -> None:
    """Check, after all rows were rendered, that template options had an effect.

    Args:
        options: as the user gave them.
        renderer: of the rows.
        plain_rows: number of rows that the data has as plain text.

    Raises:
        UsageError: naming the first option without one.
    """
    for name in ("as_messages", "plain_text"):
        if getattr(options, name) and not plain_rows:
            raise UsageError(f"--{name.replace('_', '-')} has no effect on data with messages. Remove the option.")
    if renderer.saw_messages:
        return
    for name in ("chat_template", "chat_template_kwargs", "system_prompt"):
        if getattr(options, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} has no effect on plain text. Use data with messages, pass "
                             "--as-messages, or remove the option.")
    if options.supervise == "all":
        raise UsageError("--supervise all has no effect on plain text, which has no turns. Remove the option.")


def _check_tokens(name: str, needed: set[str], tokenizer: Any) -> None:
    missing = sorted(needed - TextTokenizer(tokenizer).added.keys())
    if missing:
        raise ModelError(f"--chat-template {name}: the tokenizer has no token {', '.join(missing)}. Use a template of "
                         "the model's family, or `plain`, which needs none.")


def _check_used(kwargs: Mapping[str, Any], tokenizer: Any, name: str) -> None:
    """Check that the template uses every value, since jinja2 ignores unknown names."""
    template = tokenizer.chat_template
    text = "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template or "")
    words = set(re.findall(r"\w+", text))
    for given in kwargs:
        if given not in words:
            close = get_close_matches(given, words, n=1)
            raise UsageError(f"--chat-template-kwargs: {name} does not use '{given}'"
                             + (f". Did you mean {close[0]}?" if close else ""))


def _control_tokens(text: str, name: str) -> set[str]:
    """Control tokens of a built-in template."""
    if name == "phi3":  # its control tokens contain the role
        return {"<|user|>", "<|assistant|>", "<|end|>"}
    return set(CONTROL_TOKEN.findall(text))
