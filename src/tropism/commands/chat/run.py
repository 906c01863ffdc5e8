"""One session of `tropism chat`: load the models, read lines, and say at the end what to do with the feedback."""

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch

from tropism.borders import read_object
from tropism.commands.chat.feedback import Feedback
from tropism.commands.chat.session import Session
from tropism.commands.chat.speaker import Speaker
from tropism.commands.run_model import directory_of, model_of
from tropism.config import ChatOptions
from tropism.config_file import CODE, read_yaml
from tropism.data.tokenization.chat_template import TemplateOptions, make_renderer
from tropism.data.tokenization.truncate import Limits
from tropism.distributed import connect
from tropism.errors import ModelError, TropismError, UsageError, clause, count_of
from tropism.model import load
from tropism.model.adapters.switch import adapter_off
from tropism.model.bf16_weights import round_to_bf16
from tropism.model.config import max_positions
from tropism.model.generation import read_generation
from tropism.model.language_model import LanguageModel
from tropism.model.options import LoraOptions
from tropism.model.source import ModelSource
from tropism.observe.console import Voice, attended
from tropism.observe.rundir import RunDirectory
from tropism.train.setup.models import Numerics
from tropism.train.setup.policy import PolicyBuilder

_OF_RUN = ("system_prompt", "chat_template_kwargs", "plain_text")
"""Options of a run that its model is asked with."""


def chat(model: str, options: ChatOptions, feedback: Feedback | None, out: Voice, notes: Voice) -> None:
    """Answer the lines of standard input until they end.

    Args:
        model: a directory, Hub id, GGUF file, adapter or run directory.
        feedback: file for rows.
        out: prints answers.
        notes: prints everything else.

    Raises:
        TropismError: for a model that cannot be loaded or used. Without a terminal, for a line that cannot be answered.
    """
    with connect() as world:
        if world.size > 1:
            raise UsageError("tropism chat runs in one process. Start it without torchrun.")
        opening = _Opening(model, options, world.device, notes)
    session = opening.session(feedback, out)
    notes.concluding()  # what the user asks for is said with --quiet too
    if session.attended:
        with suppress(KeyboardInterrupt):
            _talk(session)
    else:
        _answer_lines(session)
    _say_end(session, opening)


class _Opening:
    """Loads what a session needs. Tokenizers and templates are checked before weights are read."""

    def __init__(self, model: str, options: ChatOptions, device: torch.device, voice: Voice) -> None:
        self.names = [model] if options.compare is None else [model, options.compare]
        self.voice = voice
        self.sources = [model_of(name, "chat with") for name in self.names]
        self.recorded = _recorded(model, voice)
        self.given, self.options = options, _as_in_the_run(options, self.recorded)
        precision = ("bf16" if device.type == "cuda" else "fp32") if options.precision == "auto" else options.precision
        self.numerics = Numerics(precision, device, 1, options.trust_remote_code)
        self.configs = [load.load_config(one, trust_remote_code=options.trust_remote_code) for one in self.sources]
        self.tokenizers = [load.load_tokenizer(one, trust_remote_code=options.trust_remote_code)
                           for one in self.sources]
        self.plain = self._is_plain()
        template = TemplateOptions() if self.plain else TemplateOptions(
            chat_template=options.chat_template, chat_template_kwargs=self.options.chat_template_kwargs)
        self.renderers = [make_renderer(one, Limits(sys.maxsize), template) for one in self.tokenizers]

    def _is_plain(self) -> bool:
        """Whether texts are continued as they are. Says why, and which template a base without one gets."""
        options, voice, first = self.options, self.voice, self.tokenizers[0]
        if options.plain_text or (not first.chat_template and options.chat_template is None):
            if options.system_prompt or options.chat_template_kwargs:
                raise UsageError(f"{self.names[0]}: the model has no chat template, so --system-prompt and "
                                 "--chat-template-kwargs have no effect. Choose one with --chat-template.")
            why = "plain text" if options.plain_text else f"{self.names[0]} has no chat template"
            voice.say(f"{why}: the model continues each text that you write, and remembers none")
            return True
        for name, tokenizer in zip(self.names[1:], self.tokenizers[1:], strict=True):
            if not tokenizer.chat_template and options.chat_template is None:
                voice.warn(f"{name} has no chat template. It gets that of {self.names[0]}.")
                tokenizer.chat_template = first.chat_template
        if self.recorded.get("plain_rows"):
            voice.warn(f"{self.names[0]}: the run trained on plain text, without the chat template. To continue text "
                       "as in training, add --plain-text")
        return False

    def session(self, feedback: Feedback | None, out: Voice) -> Session:
        """The session, once its models are loaded."""
        options, voice = self.options, self.voice
        speakers = self._speakers()
        session = Session(speakers, options, out, voice, options.blind, options.system_prompt, feedback,
                          attended())
        if options.system_prompt is not None:
            for speaker in speakers:  # some templates reject a system message
                speaker.ids([{"role": "system", "content": options.system_prompt}, {"role": "user", "content": "Hi"}])
            voice.say(f"system message: {options.system_prompt}" + (
                "" if "system_prompt" in self.given.model_fields_set else "  (of the run)"))
        how = f"temperature {options.temperature:g}" if options.temperature else "greedy decoding (temperature 0)"
        stops = " ".join(map(str, self.tokenizers[0].convert_ids_to_tokens(list(speakers[0].stop_ids))))
        voice.say(f"answers: {how}, at most {count_of(options.max_new_tokens, 'token')}, stop at {stops}")
        if feedback is not None:
            words = "/a or /b adds a pair" if session.compares else "/good or /bad adds the last answer"
            voice.say(f"feedback: {feedback.path}: {count_of(feedback.rows, 'row')}; {words}")
        if session.attended:
            voice.say("/help lists the commands. Ctrl-C stops an answer, Ctrl-D leaves.")
        return session

    @property
    def rendering(self) -> list[str]:
        """Options with which training renders the rows as they were asked here."""
        options = self.options
        given = () if self.plain else (("--chat-template", options.chat_template),
                                       ("--chat-template-kwargs", options.chat_template_kwargs))
        return [word for name, value in given if value for word in (
            name, value if isinstance(value, str) else json.dumps(value))] + (
            ["--trust-remote-code"] if options.trust_remote_code else [])

    def _speakers(self) -> list[Speaker]:
        sources = self.sources
        adapters = [one for one in sources if one.adapter is not None]
        if len(sources) == 2 and len(adapters) == 1 and sources[0].base == sources[1].base:
            source = adapters[0]
            builder = self._builder(source)
            if builder.adapts:  # the base is the same model with its adapter switched off
                shared = self._model(source, builder)
                return [self._speaker(number, shared, nullcontext if one.adapter else partial(
                    adapter_off, shared.module)) for number, one in enumerate(sources)]
        return [self._speaker(number, self._model(one, self._builder(one))) for number, one in enumerate(sources)]

    def _builder(self, source: ModelSource) -> PolicyBuilder:
        """How a model is loaded: with its adapter as it was trained; an adapter of another kind is merged."""
        quantize = self.recorded.get("lora.quantize") if source == self.sources[0] and source.adapter else None
        try:
            return PolicyBuilder.of(source, LoraOptions(quantize=quantize), None)
        except ModelError:
            if quantize is not None:
                raise
            return PolicyBuilder(source, LoraOptions())

    def _model(self, source: ModelSource, builder: PolicyBuilder) -> LanguageModel:
        self.voice.say(f"loading model {source.absolute}")
        module = builder.module(self.numerics, 0)
        module.requires_grad_(False)
        model = LanguageModel(module, "padded", self.numerics.precision, self.numerics.device)
        if self.numerics.precision == "bf16":
            round_to_bf16(module)
        return model

    def _speaker(self, number: int, model: LanguageModel,
                 alone: Callable[[], AbstractContextManager[None]] = nullcontext) -> Speaker:
        source, renderer = self.sources[number], self.renderers[number]
        generation = None if source.gguf_file and source.adapter is None else read_generation(
            source.adapter or source.name)[0]
        known = None if generation is None else generation.eos_token_id
        stops = renderer.terminators | set(known if isinstance(known, list) else [] if known is None else [known])
        return Speaker(self.names[number], model, renderer, sorted(stops), max_positions(self.configs[number]),
                       self.plain, alone)


def _as_in_the_run(options: ChatOptions, recorded: Mapping[str, Any]) -> ChatOptions:
    """Options with those of the run that were not given now. Those about messages and plain text exclude each other."""
    given = options.model_fields_set & {*_OF_RUN, "chat_template"}
    if options.plain_text or (given and recorded.get("plain_text")):
        return options
    return options.model_copy(update={name: recorded[name] for name in _OF_RUN
                                      if name not in given and recorded.get(name) is not None})


def _recorded(model: str, voice: Voice) -> dict[str, Any]:
    """What the run of a model says of its prompts: options by name, and `plain_rows`."""
    run = directory_of(model)
    if run is None:
        return {}
    RunDirectory(run).check_kinds()
    try:
        _, found = read_yaml(run / "config.yaml", decided=CODE)
    except TropismError as error:
        voice.warn(f"{clause(error)}. The options of the run are not in use.")
        return {}
    with suppress(TropismError):
        findings = read_object(run / "audit.json").get("findings")
        if isinstance(findings, list) and any(isinstance(one, dict) and one.get("name") == "plain_text"
                                              for one in findings):
            found["plain_rows"] = True
    return found


def _talk(session: Session) -> None:
    """Take what a person types, until they leave. An error in a line is shown."""
    for line in _typed(session.notes):
        try:
            session.take(line)
        except TropismError as error:
            session.notes.warn(str(error), "error")
        if session.ended or session.out.console.quiet:
            return


def _typed(voice: Voice) -> Iterator[str]:
    with suppress(ImportError):
        import readline  # noqa: F401  input() then edits lines and keeps a history
    while True:
        try:
            yield input("> ")
        except UnicodeDecodeError:
            voice.warn("the text is not UTF-8. Check the encoding of the terminal.", "error")
        except (EOFError, KeyboardInterrupt):
            voice.say("")  # below the prompt
            return


def _answer_lines(session: Session) -> None:
    """Take the lines of a file or pipe.

    Raises:
        TropismError: for the first line that cannot be answered, with its number.
    """
    for number, line in enumerate(sys.stdin.buffer if sys.stdin is not None else (), start=1):
        try:
            session.take(line.decode().rstrip("\r\n"))
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input:{number}: not UTF-8 ({error.reason})") from None
        except TropismError as error:
            raise type(error)(f"standard input:{number}: {error}") from error
        if session.ended or session.out.console.quiet:
            return


def _say_end(session: Session, opening: _Opening) -> None:
    """Print what was chosen, and how to train on the feedback."""
    if session.tally:
        session.notes.say("choices: " + ", ".join(f"{name} {count}" for name, count in session.tally.items()))
    feedback = session.feedback
    if feedback is not None and feedback.added:
        words = ["tropism", feedback.command, "--model", opening.sources[0].absolute, "--data", str(feedback.path),
                 *opening.rendering, "--output", "RUN"]
        session.notes.say(f"{feedback.path}: added {count_of(feedback.added, 'row')}, {feedback.rows:,} in total. "
                          f"Train on them: {shlex.join(words)}")
