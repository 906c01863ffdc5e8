"""The documentation names what exists."""

import importlib.util
import re
from pathlib import Path

import pytest

from tropism.cli.table import COMMANDS
from tropism.config import METHODS
from tropism.data.rows import Reason
from tropism.methods import LOSSES
from tropism.methods.build import build_method
from tropism.observe.metrics import METRICS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_spec = importlib.util.spec_from_file_location("make_reference", ROOT / "tools" / "make_reference.py")
assert _spec is not None
assert _spec.loader is not None
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)


def test_the_generated_tables_are_current() -> None:
    """If this fails, run `python tools/make_reference.py`."""
    for name in reference.FILES:
        text = (DOCS / name).read_text(encoding="utf-8")
        assert reference.generated(text) == text, f"{name} is stale"


@pytest.mark.parametrize("method", METHODS)
def test_every_option_is_in_the_table(method: str) -> None:
    text = (DOCS / "options.md").read_text(encoding="utf-8")
    missing = [option.flag for option in METHODS[method].described() if f"| `{option.flag}` |" not in text]
    assert not missing
    assert (DOCS / "methods" / f"{method}.md").is_file()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_reference(name: str) -> None:
    text = (DOCS / "options.md").read_text(encoding="utf-8")
    assert f"tropism {name} " in text or f"`tropism {name}`" in text


def index() -> dict[str, list[str]]:
    """Cells of `methods/README.md` by the loss that a line is about."""
    text = (DOCS / "methods" / "README.md").read_text(encoding="utf-8")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:3] == "| `"]
    return {cells[0].strip("`"): cells[1:] for cells in lines}


@pytest.mark.parametrize("name", {name: None for rows in LOSSES.values() for name in rows})
def test_every_loss_has_a_page(name: str) -> None:
    pages = [page for page in (DOCS / "methods").glob("*.md")
             if f"`{name}`" in page.read_text(encoding="utf-8").splitlines()[0]]
    assert len(pages) == 1
    assert f"({pages[0].name})" in index()[name][-1]


def test_every_page_is_in_the_index() -> None:
    linked = re.findall(r"\((\w+\.md)\)", (DOCS / "methods" / "README.md").read_text(encoding="utf-8"))
    assert {page.name for page in (DOCS / "methods").glob("*.md")} == {"README.md", *linked}


@pytest.mark.parametrize(("view", "name"), [
    (view, name) for view, rows in LOSSES.items() for name, row in rows.items() if row.reward is not None])
def test_the_index_says_what_the_table_of_losses_says(view: str, name: str) -> None:
    row = LOSSES[view][name]  # type: ignore[index]
    named_view, needs, _, beta, first, _ = index()[name]
    assert named_view == view
    assert ("reference" in needs, "whole step" in needs) == (row.needs_reference, bool(row.step_inputs))
    assert float(beta) == row.options["beta"]
    known = build_method(row.view, {"loss": name}, [True, False]).loss_at_start([True, False])
    assert first == ("-" if known is None else f"{known:.4f}".rstrip("0").rstrip("."))


@pytest.mark.parametrize("method", ["kto", "dpo"])
def test_descriptions_of_losses_agree_with_the_table_of_losses(method: str) -> None:
    """Their names, and the defaults of their options."""
    described = {option.name: option for option in METHODS[method].described()}
    known = described["loss"].text.partition("Known: ")[2]
    assert {*re.findall(r"[a-z]\w+", known)} >= {*reference.preference_losses(method)}
    for name, option in described.items():
        if default := reference.default_of_losses(method, name):
            assert option.default == default, name


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
