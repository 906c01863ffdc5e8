"""Marks on messages that say whether they are trained on, in the spellings of public trainers."""

from collections.abc import Mapping
from typing import Any

from tropism.data.rows import Message
from tropism.errors import DataError

TRAIN, DETAIL = "train", "train_detail"
"""Keys of the marks of a message in a `Row`: a boolean, and spans of characters. A message without them is trained on
if `--supervise` selects it."""

_TRAINED = {"train": True, "weight": True, "loss": True, "trainable": True, "training": True, "loss_mask": True,
            "step_loss_mask": True, "loss_weight": True, "loss_scale": True, "mask": False, "masked": False}
"""Each key of a mark, with the value that marks a message as trained on."""
_DETAILS = (DETAIL, "training_detail")
_MARKS = frozenset((*_TRAINED, *_DETAILS))
_WORDS = {"true": 1, "false": 0, "1": 1, "0": 0, "1.0": 1, "0.0": 0}


def with_marks(message: Message, name: str, place: str) -> Message:
    """A message whose marks are `train`, and `train_detail` if it is trained on in part.

    Args:
        message: with text as its content, and without null values.
        name: of its column, for errors.
        place: of its record, for errors.

    Raises:
        DataError: for an invalid mark, or marks that contradict each other.
    """
    if _MARKS.isdisjoint(message):
        return message
    of = f"of a message of '{name}'"
    given = {key: _verdict(message[key], f"{place}: '{key}' {of}") == meaning
             for key, meaning in _TRAINED.items() if key in message}
    if len(set(given.values())) > 1:
        raise DataError(f"{place}: {' and '.join(map(repr, given))} {of} contradict each other. Remove the wrong one.")
    spans = [_spans(message[key], message.get("content") or "", f"{place}: '{key}' {of}")
             for key in _DETAILS if key in message]
    trained = next(iter(given.values()), None)
    found = {key: value for key, value in message.items() if key not in _MARKS}
    if spans and trained is not False:
        in_part = any(span["train"] for span in spans[-1])
        if not spans[-1]:
            trained = bool(trained)
        elif not in_part or message["role"] != "assistant":
            trained = in_part
        else:
            found[DETAIL] = spans[-1]
    if trained is not None and (trained or message["role"] == "assistant"):
        found[TRAIN] = trained
    return found


def _verdict(value: Any, what: str) -> bool:
    number = _WORDS.get(value.strip().lower()) if isinstance(value, str) else value
    if isinstance(number, bool | int | float) and number in (0, 1):
        return bool(number)
    raise DataError(f"{what} is {value!r:.100}. It says whether to train on the message: use true, false, 1 or 0, or "
                    "rename the key. The column 'weight' of a row scales its loss.")


def _spans(value: Any, content: str, what: str) -> list[dict[str, Any]]:
    """Spans of characters, checked."""
    if not isinstance(value, list | tuple):
        raise DataError(f"{what} must be a list of spans, not {type(value).__name__}")
    found: list[dict[str, Any]] = []
    covered: set[int] = set()
    for span in value:
        fields: dict[str, Any] = span if isinstance(span, dict) else {}
        begin, end = (_offset(fields.get(key)) for key in ("begin_offset", "end_offset"))
        train = fields.get("train")
        if begin is None or end is None or train is None:
            raise DataError(f"{what} has the span {span!r:.100}. A span needs 'begin_offset', 'end_offset' and "
                            "'train'.")
        if not 0 <= begin <= end < len(content):
            raise DataError(f"{what} has the span {begin} to {end}, but the content has the characters 0 to "
                            f"{len(content) - 1}. Offsets count from 0, and the end is included.")
        characters = range(begin, end + 1)
        if not covered.isdisjoint(characters):
            raise DataError(f"{what} has the span {begin} to {end}, which overlaps an earlier one")
        covered.update(characters)
        found.append({"begin_offset": begin, "end_offset": end, "train": _verdict(train, f"{what}: 'train'")})
    return found


def _offset(value: Any) -> int | None:
    """A whole number, also as a float, as tables with missing values have it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:  # NaN too
        return None
    return int(value)


def is_trained(message: Mapping[str, Any]) -> bool:
    """False if a message is marked as not trained on."""
    return bool(message.get(TRAIN, True))


def is_marked(message: Mapping[str, Any]) -> bool:
    """True if a message says whether it is trained on."""
    return TRAIN in message or DETAIL in message


def without_marks(message: Message) -> Message:
    """A message without its marks, as templates get it."""
    if not is_marked(message):
        return message
    return {key: value for key, value in message.items() if key not in (TRAIN, DETAIL)}


def effective(message: Message) -> Message:
    """A message without a mark that changes nothing, for comparisons."""
    return {key: value for key, value in message.items() if key != TRAIN} if message.get(TRAIN) else message
