"""A model that answers: it generates by transformers, and its text is passed on while it grows."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from tropism.borders import border
from tropism.commands.chat.feedback import Prompt
from tropism.data.tokenization.render import Renderer
from tropism.model.attention import attention, plain_implementation
from tropism.model.generation import generating
from tropism.model.language_model import LanguageModel, computing
from tropism.model.options import GenerationOptions

_CONTEXT = 16  # tokens of the prompt before which the text of an answer is decoded

End = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model answered.

    Args:
        text: without the token that ends it.
        end: why it ends: at a stop token, at the most tokens, or by Ctrl-C.
    """

    text: str
    end: End


@dataclass(frozen=True)
class Speaker:
    """A model with its tokenizer.

    Args:
        name: as the user named it.
        model: without gradients.
        renderer: of prompts.
        stop_ids: ids that end an answer.
        positions: the longest sequence of the model, in tokens; None if its config does not say.
        plain: it continues texts; else it answers messages, and white space around an answer, which belongs to the
            template, is no part of it.
        alone: context in which the module computes as this model, if two models share it.
    """

    name: str
    model: LanguageModel
    renderer: Renderer
    stop_ids: Sequence[int]
    positions: int | None
    plain: bool = False
    alone: Callable[[], AbstractContextManager[None]] = field(default=nullcontext)

    def ids(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt, as in training.

        Raises:
            DataError: if the chat template rejects the messages.
        """
        return self.renderer.prompt_ids(prompt, "the conversation")

    def room(self, ids: Sequence[int], most: int) -> int:
        """How many of `most` tokens fit behind a prompt."""
        return most if self.positions is None else min(most, self.positions - len(ids))

    @torch.no_grad()
    def answer(self, ids: Sequence[int], options: GenerationOptions, seed: int, say: Callable[[str], None],
               halted: Callable[[], bool]) -> Answer:
        """Answer a prompt that leaves room.

        Args:
            seed: of this answer.
            say: is given the parts of the text.
            halted: asked after each token: whether to stop.

        Raises:
            ModelError: if the generation fails.
        """
        module = self.model.module
        stream = _Stream(self.renderer.text.tokenizer, self.stop_ids, say, trimmed=not self.plain)
        sampling = {} if not options.temperature else {
            "temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
        asked = torch.tensor([list(ids)], device=self.model.device)
        torch.manual_seed(seed % 2**63)
        with (border(f"{self.name}: the generation failed"), attention(module, plain_implementation(module)),
              generating(module), self.alone(),
              computing(module, self.model.precision, self.model.device)):
            try:
                module.generate(input_ids=asked, attention_mask=torch.ones_like(asked), do_sample=bool(sampling),
                                max_new_tokens=self.room(ids, options.max_new_tokens), eos_token_id=list(self.stop_ids),
                                pad_token_id=self.stop_ids[0], streamer=stream, use_cache=True,
                                stopping_criteria=StoppingCriteriaList([_Halt(halted)]), **sampling)
            except KeyboardInterrupt:
                if not halted():
                    raise
                stream.end()
        end: End = "stop" if stream.stopped else "interrupted" if halted() else "length"
        return Answer(stream.text if self.plain else stream.text.rstrip(), end)


class _Halt(StoppingCriteria):
    """Stops when it is asked to."""

    def __init__(self, halted: Callable[[], bool]) -> None:
        self.halted = halted

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), self.halted(), dtype=torch.bool, device=input_ids.device)


class _Stream(BaseStreamer):
    """Passes on the text of tokens once the next token cannot change it: a character of several tokens, whole.

    Args:
        trimmed: without white space at the beginning.

    Attributes:
        text: all of it.
        stopped: a stop token came.
    """

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int], say: Callable[[str], None], trimmed: bool) -> None:
        self.tokenizer, self.stop_ids, self.say, self.trimmed = tokenizer, frozenset(stop_ids), say, trimmed
        self.text, self.stopped = "", False
        self._ids: list[int] | None = None
        self._start = self._said = 0  # tokens: where decoding begins, and up to where the text was passed on

    def put(self, value: Tensor) -> None:
        """Take the ids of the prompt, and then one token after the other."""
        ids = value.flatten().tolist()
        if self._ids is None:
            self._ids = ids[-_CONTEXT:]
            self._said = len(self._ids)
            return
        for token in ids:
            if self.stopped or token in self.stop_ids:
                self.stopped = True
                return
            self._ids.append(token)
        self._pass_on(last=False)

    def end(self) -> None:
        """Pass on what is left, which may be a part of a character."""
        self._pass_on(last=True)

    def _pass_on(self, last: bool) -> None:
        ids = self._ids or []
        known, text = self._decoded(ids[self._start : self._said]), self._decoded(ids[self._start :])
        if len(text) <= len(known) or (text.endswith("\ufffd") and not last):
            return
        self._start, self._said = self._said, len(ids)
        new = text[len(known) :].lstrip() if self.trimmed and not self.text else text[len(known) :]
        self.text += new
        self.say(new)

    def _decoded(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Context in which Ctrl-C is noted: yields a function that tells whether it came. A second one is raised."""
    came = False

    def note(number: int, frame: Any) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, before)
