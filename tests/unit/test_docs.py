"""The documentation names what exists."""

import re
from pathlib import Path

import pytest

from tropism.config import METHODS
from tropism.data.rows import Reason
from tropism.observe.metrics import METRICS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.mark.parametrize("method", METHODS)
def test_every_option_is_in_the_table(method: str) -> None:
    text = (DOCS / "options.md").read_text(encoding="utf-8")
    missing = [name for name in METHODS[method].model_fields if f"`{name}`" not in text]
    assert not missing
    assert (DOCS / "methods" / f"{method}.md").is_file()


def test_every_metric_is_in_the_table() -> None:
    text = (DOCS / "run-directory.md").read_text(encoding="utf-8")
    assert not [key for key in METRICS if f"`{key}`" not in text]


def test_every_reason_for_leaving_a_row_out_is_described() -> None:
    text = (DOCS / "data.md").read_text(encoding="utf-8")
    assert not [reason for reason in Reason if f"`{reason}`" not in text]


def test_requirement_ids_that_tests_name_are_described() -> None:
    known = set(re.findall(r"\b([A-Z]\d)\b", (DOCS / "requirements.md").read_text(encoding="utf-8")))
    named = {}
    for file in (ROOT / "tests").rglob("test_*.py"):
        for docstring in re.findall(r'"""((?:[A-Z]\d(?:, |: ))+)', file.read_text(encoding="utf-8")):
            named |= dict.fromkeys(re.findall(r"[A-Z]\d", docstring), file.name)
    assert len(named) > 25
    assert not {requirement: file for requirement, file in named.items() if requirement not in known}


def test_links_lead_somewhere() -> None:
    broken = []
    for file in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", file.read_text(encoding="utf-8")):
            if "://" not in target and not (file.parent / target).exists():
                broken.append(f"{file.name}: {target}")
    assert not broken
