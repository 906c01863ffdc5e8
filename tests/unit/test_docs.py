"""The documentation names what exists."""

import re
from pathlib import Path

import pytest

from tropism.config import METHODS
from tropism.data.rows import Reason
from tropism.methods import LOSSES
from tropism.methods.build import build_method
from tropism.observe.metrics import METRICS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.mark.parametrize("method", METHODS)
def test_every_option_is_in_the_table(method: str) -> None:
    text = (DOCS / "options.md").read_text(encoding="utf-8")
    missing = [name for name in METHODS[method].flat_fields() if f"`{name}`" not in text]
    assert not missing
    assert (DOCS / "methods" / f"{method}.md").is_file()


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


@pytest.mark.parametrize("name", {
    name: None for rows in LOSSES.values() for row in rows.values() for name in row.options})
def test_the_table_of_options_says_which_losses_take_one(name: str) -> None:
    text = (DOCS / "options.md").read_text(encoding="utf-8")
    for view, heading in (("unpaired", "kto"), ("paired", "dpo")):
        part = text.split(f"### Options of losses of `{heading}`")[1].split("\n#")[0]
        takers = {loss for loss, row in LOSSES[view].items() if name in row.options}  # type: ignore[index]
        said = next((line.split("|")[3] for line in part.splitlines() if line.startswith(f"| `{name}`")), "")
        if said.strip() == "as `f_divergence`":
            continue
        named = set(re.findall(r"`(\w+)`", said))
        everything = {loss for loss, row in LOSSES[view].items() if not row.needs_teacher}  # type: ignore[index]
        assert (everything - named if "all but" in said else named) == takers


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
