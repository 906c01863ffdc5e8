"""Wraps a tokenizer for training: control tokens by name, exact text at borders, terminators."""

import copy
import json
import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from types import MappingProxyType
from typing import Any

from tropism.errors import ModelError
from tropism.printable import escaped

_WINDOW = 16  # tokens of context for checking that ids decode to their text
# Invisible characters that are neither white space nor format characters by category: fillers, an empty Braille
# pattern, a joiner, variation selectors.
_INVISIBLE = frozenset("\u034f\u115f\u1160\u2800\u3164\uffa0" + "".join(map(chr, range(0xFE00, 0xFE10))))


def is_invisible(text: str) -> bool:
    """True for a text of white space, control and format characters only, such as a zero-width space."""
    return all(char.isspace() or char in _INVISIBLE or unicodedata.category(char) in ("Cc", "Cf") for char in text)


@dataclass(frozen=True, slots=True)
class Piece:
    """One token for display.

    Args:
        id: its id.
        text: the text that it adds; the vocabulary's spelling if it is only a part of a character.
        supervised: True if it is supervised.
    """

    id: int
    text: str
    supervised: bool = False

    @property
    def visible(self) -> str:
        """The text with line ends and unprintable characters escaped."""
        return escaped(self.text)


class TextTokenizer:
    """Wraps a Hugging Face tokenizer; every id that Tropism trains on comes from here.

    Added tokens are matched before all other text. Those that the tokenizer calls special are control tokens.

    Attributes:
        added: ids of the added tokens, except runs of white space, which some tokenizers add for code.
        control: names of the control tokens. A message may end with one, but its text contains none.
        control_pattern: matches them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.bos_id: int | None = tokenizer.bos_token_id
        self.eos_id: int | None = tokenizer.eos_token_id
        if self.eos_id is None:
            raise ModelError("the tokenizer has no EOS token, so a completion could never end. Set `eos_token` in its "
                             "tokenizer_config.json.")
        added = {str(token): token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
        for name in (tokenizer.eos_token, tokenizer.bos_token):
            if name:
                added.setdefault(name, tokenizer.convert_tokens_to_ids(name))
        self._added: dict[str, int] = dict(sorted(added.items(), key=lambda item: -len(item[0])))
        self._added_pattern = _any_of(self._added)
        self.added: dict[str, int] = {name: token_id for name, token_id in self._added.items() if name.strip()}
        known = {str(token): token for token in tokenizer.added_tokens_decoder.values()}
        self._strips_left = {name for name, token in known.items() if token.lstrip}
        self._strips_right = {name for name, token in known.items() if token.rstrip}
        self._borders = {name for name, token in known.items()
                         if not (token.lstrip or token.single_word or token.normalized)}
        special = {str(token) for token in tokenizer.all_special_tokens}
        special.update(name for name, token in known.items() if token.special)
        self.control: frozenset[str] = frozenset(special & self.added.keys())
        self.control_pattern = _any_of(sorted(self.control, key=len, reverse=True))
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = copy.deepcopy(backend) if backend is not None else None
        if self._backend is not None:  # limits come from options; a limit stored in the file would apply silently
            self._backend.no_truncation()
            self._backend.no_padding()

    def encode(self, text: str) -> list[int]:
        """Ids of text, with control tokens parsed and no tokens added around it."""
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def chunks(self, text: str) -> list[str]:
        """The text in pieces whose ids, one after the other, are those of the text: each begins with an added token,
        which separates what is before it from what follows."""
        if self._backend is None:
            return [text]
        starts = [match.start() for match in self._added_pattern.finditer(text) if match.group() in self._borders]
        return [text[start:end] for start, end in pairwise(dict.fromkeys([0, *starts, len(text)]))]

    def encode_prompt(self, text: str) -> list[int]:
        """Ids that generation gets for a plain text prompt: with the tokens that the tokenizer adds before the text
        (a BOS), but without those that it adds after it (an EOS, in some), since the text continues."""
        if not text:  # with a letter, tokens before and after can be told apart
            filled = self.encode_prompt("a")
            return filled[: len(filled) - len(self.encode("a"))]
        bare = self.encode(text)
        full = list(self.tokenizer(text, verbose=False)["input_ids"])
        added = len(full) - len(bare)
        while added > 0 and full[added : added + len(bare)] != bare:
            added -= 1
        ids = full[: added + len(bare)] if full[added : added + len(bare)] == bare else full
        while self.bos_id is not None and ids[:2] == [self.bos_id] * 2:
            ids = ids[1:]  # the text contains the BOS that the tokenizer adds; one is enough
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of ids, including control tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def pieces(self, ids: Sequence[int], before: Sequence[int] = (), mask: Sequence[bool] = ()) -> list[Piece]:
        """Tokens for display.

        Args:
            ids: the tokens.
            before: tokens before them, which may change the text of the first one.
            mask: True for supervised tokens; none by default.
        """
        context = [*before[-_WINDOW:], *ids]
        start = len(context) - len(ids)
        found = []
        for number, token_id in enumerate(ids):
            left = max(start + number - _WINDOW, 0)
            shorter = self.decode(context[left : start + number])
            longer = self.decode(context[left : start + number + 1])
            text = longer[len(shorter) :] if longer.startswith(shorter) else ""
            if not text or "\ufffd" in text:  # a part of a character, or removed by the decoder
                text = str(self.tokenizer.convert_ids_to_tokens(token_id))
            found.append(Piece(token_id, text, bool(mask) and bool(mask[number])))
        return found

    def supervised_text(self, before: Sequence[int], ids: Sequence[int], mask: Sequence[bool]) -> list[str]:
        """M1: the exact supervised text, decoded in its context, one entry per supervised stretch."""
        found: list[str] = []
        position = 0
        for learned, group in groupby(mask):
            end = position + len(list(group))
            if learned:
                shorter, longer = (self.decode([*before, *ids[:stop]]) for stop in (position, end))
                found.append(longer[len(shorter) :] if longer.startswith(shorter)
                             else self.decode(list(ids[position:end])))
            position = end
        return found

    def encode_spelled(self, text: str, spelled: Mapping[str, str]) -> list[int]:
        """Ids of rendered text, in which the keys of `spelled` replace control tokens in user text.

        These are encoded as plain characters: a copy of the tokenizer without control tokens encodes them with the
        text around them, up to the next real control token.
        """
        ids: list[int] = []
        position, previous = 0, ""
        for match in [*self._added_pattern.finditer(text), None]:
            piece = text[position : match.start() if match else len(text)]
            if match and match.group() in self._strips_left:
                piece = piece.rstrip()
            if previous in self._strips_right:
                piece = piece.lstrip()
            piece = self.spell_out(piece, spelled)
            if piece:
                plain = self._plain if ids else self._plain_first
                ids += plain.encode(piece, add_special_tokens=False).ids
            if match:
                ids.append(self._added[match.group()])
                position, previous = match.end(), match.group()
        return ids

    @cached_property
    def _plain_first(self) -> Any:
        return self._without_control(first=True)

    @cached_property
    def _plain(self) -> Any:
        return self._without_control(first=False)

    def _without_control(self, *, first: bool) -> Any:
        from tokenizers import Tokenizer

        if self._backend is None:
            raise ModelError("the tokenizer has no fast backend, so control tokens in the text of a message cannot be "
                             "told from real ones. Use a fast tokenizer.")
        state = json.loads(self._backend.to_str())
        state["added_tokens"], state["post_processor"] = [], None
        if not first:
            _set_prepend_scheme(state.get("pre_tokenizer"), "never")
        _remove_pieces(state["model"], self.added)
        return Tokenizer.from_str(json.dumps(state))

    def continue_text(self, prompt_text: str, prompt_ids: list[int], text: str,
                      spelled: Mapping[str, str] = MappingProxyType({})) -> tuple[list[int], bool]:
        """Ids of `text` as the continuation of a prompt, and True if they decode to exactly that text.

        The first exact one of three encodings is used: the text alone; the text after the prompt, if the joint ids
        begin with the prompt's ids; the text after a newline, for tokenizers that add a space before the first word.
        Of the prompt, the end from its last border on is enough. `spelled` is as in `encode_spelled`.
        """
        def encode(piece: str) -> list[int]:
            return self.encode_spelled(piece, spelled) if spelled else self.encode(piece)

        wanted = self.spell_out(text, spelled)
        alone = encode(text)
        if self._continues(prompt_ids, alone, wanted):
            return alone, True
        end = self._last_chunk(prompt_text)
        bare, joint = encode(end), encode(end + text)
        if joint[: len(bare)] == bare and prompt_ids[len(prompt_ids) - len(bare) :] == bare:
            after = joint[len(bare) :]
            if self._continues(prompt_ids, after, wanted):
                return after, True
        anchor, anchored = encode("\n"), encode("\n" + text)
        if anchored[: len(anchor)] == anchor and self._continues(prompt_ids, anchored[len(anchor) :], wanted):
            return anchored[len(anchor) :], True
        return alone, False

    def _last_chunk(self, text: str) -> str:
        """The last of `chunks`, searched from the end."""
        reach = 256
        while reach < len(text):
            if len(found := self.chunks(text[-reach:])) > 1:
                return found[-1]
            reach *= 4
        return self.chunks(text)[-1] if text else ""

    @staticmethod
    def spell_out(text: str, spelled: Mapping[str, str]) -> str:
        """Rendered text with the control tokens of user text restored."""
        for marker, name in spelled.items():
            text = text.replace(marker, name)
        return text

    def terminator(self, rendered: str, end: int, *, content_shown: bool,
                   usual: Callable[[], str] = str) -> re.Match[str] | None:
        """The terminator of a message: the usual one, or the first, of the special tokens at the end of the text.

        It is not the first one after the content, since a tool call may begin or end with one, and not the last, since
        some templates end a conversation with one more. If other text is at the end, it is the first one after the
        content.

        Args:
            rendered: a message and all that the template adds after it.
            end: end of the content.
            content_shown: True if the content was found, so that `end` is valid.
            usual: gives the one of other messages; called if there are several.
        """
        specials = [match for match in self._added_pattern.finditer(rendered, end) if match.group() in self.control]
        border = len(rendered)
        last: list[re.Match[str]] = []
        for match in reversed(specials):
            if rendered[match.end() : border].strip():
                break
            last.insert(0, match)
            border = match.start()
        if len(last) > 1:
            name = usual()
            return next((match for match in last if match.group() == name), last[0])
        return last[0] if last else specials[0] if specials and content_shown else None

    def without_added(self, text: str, content: str) -> str:
        """A text of the same length without the added tokens that `content` lacks, for finding it."""
        return self._added_pattern.sub(
            lambda match: match.group() if match.group() in content or match.group().isspace()
            else "\0" * len(match.group()), text)

    def outside_added(self, text: str, position: int) -> int:
        """The position, or the start of the added token around it."""
        near = max(position - max(map(len, self._added), default=0), 0)
        return min([position, *(match.start() for match in self._added_pattern.finditer(text, near)
                                if match.start() < position < match.end())])

    def _continues(self, prompt_ids: list[int], ids: list[int], text: str) -> bool:
        context = prompt_ids[-_WINDOW:]
        shorter = self.decode(context)
        longer = self.decode(context + ids)
        return longer.startswith(shorter) and longer[len(shorter) :] == text


def _any_of(names: Collection[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")


def _remove_pieces(model: Any, names: Collection[str]) -> None:
    """Remove names from a model of the `tokenizers` library (as JSON), so that it does not find them in plain text.

    Most vocabularies contain the control tokens, and a model may find them there: as whole words, as a likely Unigram
    piece, or by merges that a converter wrote for them.
    """
    if model["type"] == "Unigram":  # ids are positions, so names are replaced by text that never occurs
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
