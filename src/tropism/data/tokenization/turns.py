"""What marks on messages leave to be learned: whole messages, or the tokens of some of their characters."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

from tropism.data.formats.turn_marks import DETAIL, TRAIN, is_marked, is_trained
from tropism.data.rows import Message, Row
from tropism.errors import DataError

_WINDOW = 16  # tokens of context in which a token is decoded
_PARTIAL = "\ufffd"  # what a decoder writes for a part of a character


class NothingToLearn(Exception):
    """A row whose marks leave nothing to learn. The message says why."""


def check_marks(row: Row, supervise: Literal["last", "all"], notes: set[str]) -> None:
    """Check that each completion has a message to learn from, and note marks without effect.

    Raises:
        NothingToLearn: if not.
    """
    if isinstance(row.prompt, str):
        return
    names = ("the chosen side", "the rejected side") if len(row.completions) == 2 else ("the completion",)
    completions: Any = row.completions
    for name, completion in zip(names, completions, strict=True):
        messages: list[Message] = [*row.prompt, *completion]
        if not any(map(is_marked, messages)):
            continue
        if any(message.get(TRAIN) and message["role"] != "assistant" for message in messages):
            notes.add("others_marked")
        judged = row.desirable is not None or len(row.completions) == 2  # a label is about the completion alone
        earlier = completion[:-1] if judged else messages[1:-1]
        others = any(message["role"] == "assistant" and is_trained(message) for message in earlier)
        if not is_trained(messages[-1]) and (supervise == "last" or not others):
            raise NothingToLearn(f"{name} is marked as not trained on" + (
                ". To train on the other assistant messages, use --supervise all." if others else ""))
        if supervise == "last" and others and not judged:
            notes.add("earlier_marked")


def learned(message: Message, ids: list[int], decode: Callable[[list[int]], str],
            place: str) -> tuple[list[bool], bool]:
    """Which tokens of a rendered message are supervised, and whether its terminator is.

    With `train_detail` a token is supervised if all its characters are in trained spans; white space at a border does
    not count. The terminator goes with the last character. What the template adds is not supervised.

    Args:
        message: with its marks and its content.
        ids: of the rendered message, without the terminator.
        decode: ids to text.
        place: of the row, for errors.

    Raises:
        DataError: if the content cannot be located.
    """
    if DETAIL not in message:
        return [True] * len(ids), True
    text, borders, content = decode(ids), _borders(ids, decode), str(message.get("content") or "")
    shown = content if content in text else content.strip()
    if borders[-1] != len(text) or shown not in text:
        raise DataError(f"{place}: the chat template or the tokenizer changes the text of a message with "
                        f"'{DETAIL}', so its characters cannot be located. Remove the key, or mark the whole message "
                        f"with '{TRAIN}'.")
    start = text.rfind(shown) - content.find(shown)
    trained = {start + number for span in message[DETAIL] if span["train"]
               for number in range(span["begin_offset"], span["end_offset"] + 1)}

    def all_trained(characters: Sequence[int]) -> bool:
        seen = [number for number in characters if not text[number].isspace()] or characters
        return bool(seen) and all(number in trained for number in seen)

    # A token that is a part of a character belongs to that character.
    spans = [range(left, min(max(right, left + 1), len(text))) for left, right in pairwise(borders)]
    return [all_trained(span) for span in spans], start + len(content.rstrip()) - 1 in trained


def _borders(ids: list[int], decode: Callable[[list[int]], str]) -> list[int]:
    """The number of whole characters before each token, and after the last one."""
    borders = [0]
    for number in range(len(ids)):
        left = max(number - _WINDOW, 0)
        shorter, longer = (decode(ids[left:end]).rstrip(_PARTIAL) for end in (number, number + 1))
        borders.append(borders[-1] + len(longer) - len(shorter))
    return borders
