"""What a format is: the columns that identify it, and the function that reads one record."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tropism.data.formats.fields import Content
from tropism.data.formats.labels import LABELS, LabelKind
from tropism.data.formats.options import FormatOptions
from tropism.data.rows import Dropped, RawRow, View

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """Columns that make a row.

    Args:
        view: kind of row: unpaired, paired or single.
        prompt: column of the prompt; empty if the completions are conversations that begin with it.
        completions: column of the completion, or of the chosen and the rejected one.
        label: column with the label of an unpaired completion.
    """

    view: View
    prompt: str
    completions: tuple[str, ...]
    label: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns of the shape. A row needs every one of them."""
        return tuple(name for name in (self.prompt, *self.completions, self.label) if name)

    def missing_in(self, record: Record) -> str | None:
        """The first column of the shape that the record lacks."""
        return next((name for name in self.columns if name not in record), None)

    def __str__(self) -> str:
        return "(" + ", ".join(self.columns) + ")"


@dataclass(frozen=True, slots=True)
class Draft:
    """A row before its checks: the fields of a record, by the column names that errors use.

    Args:
        prompt: text or messages.
        completions: one, or chosen and rejected, by column.
        desirable: label of an unpaired row.
        tools: tool schemas from elsewhere than the column `tools`.
        votes: labels that are not read yet, of one or several annotators: of an unpaired row, or, for two completions,
            whether the first one is chosen. None if there is nothing to decide.
        label_name: where the votes come from.
    """

    prompt: Content
    completions: dict[str, Content]
    desirable: bool | None = None
    tools: Any = None
    votes: tuple[Any, ...] | None = None
    label_name: str = ""


Drafts = list[Draft | Dropped]


@dataclass(frozen=True, slots=True)
class Format:
    """A format of data files.

    Args:
        name: value of `--format`.
        shapes: shapes of its rows. If several match a record, the first is used.
        matches: True if a record with the columns of a shape is in this format.
        decisive: `matches` checks values, so no other format claims a record that it accepts.
        chat: text is a user message, and the columns `system`, `history` and (with `instruction`) `input` are read.
            Otherwise text is used as it is.
        labels: what its labels are.
        votes: its drafts have labels that are not read yet.
        named: a record can have several labels, and `--label-name` chooses one.
        locate: finds the columns of a record for a view, if they have no fixed names; None if it is not in this format.
        make_drafts: reads a record. `plain_records.plain_drafts` reads those for which it is or gives None.
        plain: some records are plain columns with labels, although there is `make_drafts`.
    """

    name: str
    shapes: tuple[Shape, ...]
    matches: Callable[[Record, Shape, FormatOptions], bool] = lambda record, shape, options: True
    decisive: bool = False
    chat: bool = False
    labels: LabelKind = LABELS
    plain: bool = False
    votes: bool = False
    named: bool = False
    locate: Callable[[Record, View, FormatOptions], Shape | None] | None = None
    make_drafts: Callable[[RawRow, Shape, FormatOptions], Drafts | None] | None = None

    def shape_for(self, record: Record, view: View) -> Shape:
        """The first shape whose columns the record has, or else the one with the most columns in it."""
        shapes = [shape for shape in self.shapes if shape.view == view]
        return max(shapes, key=lambda shape: (all(name in record for name in shape.columns),
                                              sum(name in record for name in shape.columns)))
