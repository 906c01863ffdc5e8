"""A tokenizer as training needs it: control tokens known by name, text at a border, one terminator."""

import copy
import json
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from types import MappingProxyType
from typing import Any

from tropism.errors import ModelError

_WINDOW = 16  # tokens of context in which a completion's text is checked against its ids
# Neither white space nor format characters by their category, and yet nobody sees them: fillers, an empty Braille
# pattern, a joiner, variation selectors.
_UNSEEN = frozenset("\u034f\u115f\u1160\u2800\u3164\uffa0" + "".join(map(chr, range(0xFE00, 0xFE10))))


def visible(text: str) -> str:
    """A text with line ends and what no terminal should be sent spelled out."""
    return text if text.isprintable() else "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def says_nothing(text: str) -> bool:
    """Whether a text is empty to the eye: white space, control and format characters (a zero width space, say)."""
    return all(char.isspace() or char in _UNSEEN or unicodedata.category(char) in ("Cc", "Cf") for char in text)


@dataclass(frozen=True, slots=True)
class Piece:
    """One token for a person's eyes.

    Args:
        id: its id.
        text: what it adds to the text before it; the vocabulary's own spelling where that is no whole character.
        supervised: whether it is learned.
    """

    id: int
    text: str
    supervised: bool = False

    @property
    def visible(self) -> str:
        """The text as `visible` shows it."""
        return visible(self.text)


class TextTokenizer:
    """Wraps a Hugging Face tokenizer; every id that Tropism trains on comes from here.

    Control tokens are all tokens that the tokenizer matches before it looks at text (its added tokens), but for
    runs of white space, which some tokenizers add for code.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.bos_id: int | None = tokenizer.bos_token_id
        self.eos_id: int | None = tokenizer.eos_token_id
        if self.eos_id is None:
            raise ModelError("the tokenizer has no eos token, so an answer could never end; set `eos_token`")
        added = {str(token): token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
        for name in (tokenizer.eos_token, tokenizer.bos_token):
            if name:
                added.setdefault(name, tokenizer.convert_tokens_to_ids(name))
        self._added: dict[str, int] = dict(sorted(added.items(), key=lambda item: -len(item[0])))
        self._added_pattern = _any_of(self._added)
        self.control: dict[str, int] = {name: token_id for name, token_id in self._added.items() if name.strip()}
        special = {str(token) for token in tokenizer.all_special_tokens}
        special.update(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
        self.terminators: frozenset[str] = frozenset(special & self.control.keys())
        self.control_pattern = _any_of(self.control)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = copy.deepcopy(backend) if backend is not None else None
        if self._backend is not None:  # limits of ours are explicit; a limit stored in the file would be silent
            self._backend.no_truncation()
            self._backend.no_padding()

    def encode(self, text: str) -> list[int]:
        """Ids of text in which control tokens are control tokens; nothing is put around it."""
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_prompt(self, text: str) -> list[int]:
        """Ids that generation gets for a plain text prompt: what the tokenizer puts in front stays
        (a BOS), what it would put behind (an EOS, in some) does not, since the text goes on."""
        if not text:  # nothing to tell front from behind by
            filled = self.encode_prompt("a")
            return filled[: len(filled) - len(self.encode("a"))]
        bare = self.encode(text)
        full = list(self.tokenizer(text)["input_ids"])
        lead = len(full) - len(bare)
        while lead > 0 and full[lead : lead + len(bare)] != bare:
            lead -= 1
        ids = full[: lead + len(bare)] if full[lead : lead + len(bare)] == bare else full
        while self.bos_id is not None and ids[:2] == [self.bos_id] * 2:
            ids = ids[1:]  # the user's text spells the BOS that the tokenizer adds: once is right
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of ids, control tokens spelled out."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def pieces(self, ids: Sequence[int], before: Sequence[int] = (), mask: Sequence[bool] = ()) -> list[Piece]:
        """Tokens one by one.

        Args:
            ids: the tokens.
            before: what stands in front of them, which may change how the first one reads.
            mask: which are supervised; none by default.
        """
        whole = [*before[-_WINDOW:], *ids]
        start = len(whole) - len(ids)
        found = []
        for number, token_id in enumerate(ids):
            left = max(start + number - _WINDOW, 0)
            lead = self.decode(whole[left : start + number])
            grown = self.decode(whole[left : start + number + 1])
            text = grown[len(lead) :] if grown.startswith(lead) else ""
            if not text or "\ufffd" in text:  # part of a character, or what a decoder swallows
                text = str(self.tokenizer.convert_ids_to_tokens(token_id))
            found.append(Piece(token_id, text, bool(mask) and bool(mask[number])))
        return found

    def supervised_text(self, before: Sequence[int], ids: Sequence[int], mask: Sequence[bool]) -> list[str]:
        """M1: the exact text that is learned: decoded behind what stands in front, one entry per stretch."""
        found: list[str] = []
        position = 0
        for learned, group in groupby(mask):
            end = position + len(list(group))
            if learned:
                lead, whole = (self.decode([*before, *ids[:stop]]) for stop in (position, end))
                found.append(whole[len(lead) :] if whole.startswith(lead) else self.decode(list(ids[position:end])))
            position = end
        return found

    def encode_spelled(self, text: str, spelled: Mapping[str, str]) -> list[int]:
        """Ids of rendered text in which the keys of `spelled` stand for control tokens that a user wrote out.

        Those become plain characters: they are encoded by a copy of the tokenizer that knows no control
        tokens, together with the text around them, up to the next true control token.
        """
        ids: list[int] = []
        position = 0
        for match in [*self._added_pattern.finditer(text), None]:
            piece = text[position : match.start() if match else len(text)]
            piece = self._strip(piece, before=match.group() if match else "", after=text[:position])
            piece = self.spell_out(piece, spelled)
            if piece:
                plain = self._plain if ids else self._plain_first
                ids += plain.encode(piece, add_special_tokens=False).ids
            if match:
                ids.append(self._added[match.group()])
                position = match.end()
        return ids

    def _strip(self, piece: str, *, before: str, after: str) -> str:
        """Honor control tokens that swallow the white space beside them."""
        tokens = {str(token): token for token in self.tokenizer.added_tokens_decoder.values()}
        if before in tokens and tokens[before].lstrip:
            piece = piece.rstrip()
        previous = next((name for name in self._added if after.endswith(name)), None)
        if previous in tokens and tokens[previous].rstrip:
            piece = piece.lstrip()
        return piece

    @cached_property
    def _plain_first(self) -> Any:
        return self._without_control(first=True)

    @cached_property
    def _plain(self) -> Any:
        return self._without_control(first=False)

    def _without_control(self, *, first: bool) -> Any:
        from tokenizers import Tokenizer

        if self._backend is None:
            raise ModelError("this tokenizer has no fast backend, so control tokens spelled out in a message "
                             "cannot be told from true ones")
        state = json.loads(self._backend.to_str())
        state["added_tokens"], state["post_processor"] = [], None
        if not first:
            _set_prepend_scheme(state.get("pre_tokenizer"), "never")
        _forget(state["model"], self.control)
        return Tokenizer.from_str(json.dumps(state))

    def continue_text(self, prompt_text: str, prompt_ids: list[int], text: str,
                      spelled: Mapping[str, str] = MappingProxyType({})) -> tuple[list[int], bool]:
        """Ids of `text` as the continuation of a prompt, and whether they decode to exactly that text.

        The first of three encodings that is exact wins: the text alone; the text behind the prompt, where
        the joint ids begin with the prompt's ids; the text behind a newline (for tokenizers that put a space
        in front of whatever comes first). `spelled` is as in `encode_spelled`.
        """
        def encode(piece: str) -> list[int]:
            return self.encode_spelled(piece, spelled) if spelled else self.encode(piece)

        wanted = self.spell_out(text, spelled)
        alone = encode(text)
        if self._continues(prompt_ids, alone, wanted):
            return alone, True
        bare, joint = encode(prompt_text), encode(prompt_text + text)
        if joint[: len(bare)] == bare and prompt_ids[len(prompt_ids) - len(bare) :] == bare:
            behind = joint[len(bare) :]
            if self._continues(prompt_ids, behind, wanted):
                return behind, True
        anchor, anchored = encode("\n"), encode("\n" + text)
        if anchored[: len(anchor)] == anchor and self._continues(prompt_ids, anchored[len(anchor) :], wanted):
            return anchored[len(anchor) :], True
        return alone, False

    @staticmethod
    def spell_out(text: str, spelled: Mapping[str, str]) -> str:
        """Rendered text with the control tokens that a user wrote out put back."""
        for marker, name in spelled.items():
            text = text.replace(marker, name)
        return text

    def terminator(self, rendered: str, end: int, *, content_shown: bool) -> re.Match[str] | None:
        """Where an answer ends: the first special token of those that end the rendered text.

        Not the first one behind the content, since a call of a tool may open with one; and not the last, since some
        templates end a whole conversation with one more. Where the text ends otherwise it is the first behind the
        content, if that is shown.

        Args:
            rendered: an answer and what the template puts behind it.
            end: where its content ends.
            content_shown: whether the content was found, so that `end` means something.
        """
        specials = [match for match in self.control_pattern.finditer(rendered, end)
                    if match.group() in self.terminators]
        found, border = None, len(rendered)
        for match in reversed(specials):
            if rendered[match.end() : border].strip():
                break
            found, border = match, match.start()
        return found or (specials[0] if specials and content_shown else None)

    def without_control(self, text: str) -> str:
        """Text of the same length in which control tokens are blanked, to search for an answer in."""
        return self.control_pattern.sub(lambda match: "\0" * len(match.group()), text)

    def _continues(self, prompt_ids: list[int], ids: list[int], text: str) -> bool:
        tail = prompt_ids[-_WINDOW:]
        lead = self.decode(tail)
        whole = self.decode(tail + ids)
        return whole.startswith(lead) and whole[len(lead) :] == text


def _any_of(names: Collection[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")


def _forget(model: Any, names: Collection[str]) -> None:
    """Take names out of what a model of the `tokenizers` library (as JSON) can find in plain text.

    Most vocabularies list the control tokens, and a model may find them there: whole words, a likely Unigram
    piece, merges that a converter wrote for them.
    """
    if model["type"] == "Unigram":  # ids are positions, so the names make way for what no text holds
        model["vocab"] = [["\U0010ffff" + piece if piece in names else piece, score] for piece, score in model["vocab"]]
        return
    unknown = model.get("unk_token")
    model["vocab"] = {piece: token_id for piece, token_id in model["vocab"].items()
                      if piece not in names or piece == unknown}
    if "merges" in model:
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [[left, right] for left, right in pairs if not {left, right, left + right} & set(names)]


def _set_prepend_scheme(state: Any, scheme: str) -> None:
    if isinstance(state, dict):
        if state.get("type") == "Metaspace" and state.get("prepend_scheme") == "first":
            state["prepend_scheme"] = scheme
        for child in state.get("pretokenizers", []):
            _set_prepend_scheme(child, scheme)
