"""The words of help texts, errors and documentation."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tropism
from tropism.config import METHODS

ROOT = Path(__file__).parents[2]
SOURCE = Path(tropism.__file__).parent

AVOID = ("goes on", "go on", "mend", "is none", "such a", "no such", "as ever", "says of", "in the meantime", "so long")
"""Phrases that read as if translated. Plain words say the same: resumes, fix, not found, still, reports, meanwhile."""

_PATTERN = re.compile(r"\b(" + "|".join(
    f"[{phrase[0].upper()}{phrase[0]}]" + phrase[1:].replace(" ", r"\s+") for phrase in AVOID) + r")\b")


def found(text: str) -> list[str]:
    """Each phrase to avoid, with a little text around it."""
    return [" ".join(text[max(0, hit.start() - 30):hit.end() + 30].split()) for hit in _PATTERN.finditer(text)]


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md",
            ROOT / "bench" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def sentences(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each string that a user may read.

    Strings that stand alone document the code and are skipped, except in classes of options, where they are the help.
    Values in f-strings are skipped.
    """
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for options in ast.walk(tree):
        if isinstance(options, ast.ClassDef) and options.name.endswith("Options"):
            alone -= {id(node.value) for node in options.body if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            alone |= {id(part) for part in node.values}
            yield node.lineno, "".join(str(part.value) if isinstance(part, ast.Constant) else "0"
                                       for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.lineno, node.value


def test_the_pattern_finds_words_and_not_parts_of_words() -> None:
    assert len(found("The run goes\non. Mend it; there is no such file, and this is none.")) == 4
    assert not found("It recommends such an amendment as everyone says. Longer runs go once; the default is None.")


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_documentation(page: Path) -> None:
    assert not found(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("method", METHODS)
def test_help_of_options(method: str) -> None:
    fields = METHODS[method].flat_fields()
    assert not {name: found(field.description) for name, field in fields.items() if found(field.description or "")}


def test_messages_of_the_source() -> None:
    """Errors, log lines and help in the source."""
    hits = [f"{file.relative_to(SOURCE)}:{line}: {phrase}"
            for file in sorted(SOURCE.rglob("*.py"))
            for line, text in sentences(ast.parse(file.read_text(encoding="utf-8")))
            for phrase in found(text)]
    assert not hits, "\n".join(hits)
