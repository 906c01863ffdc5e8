"""The documentation names what exists."""

import importlib.util
import os
import pkgutil
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

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


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md",
            ROOT / "bench" / "README.md", *DOCS.rglob("*.md")]


def test_links_lead_somewhere() -> None:
    broken = []
    for file in pages():
        for target in re.findall(r"\]\(([^)#]+)", file.read_text(encoding="utf-8")):
            if "://" not in target and not (file.parent / target).exists():
                broken.append(f"{file.name}: {target}")
    assert not broken


def test_files_and_names_of_the_code_exist() -> None:
    """Paths in backticks are files of the repository, and dotted names of the package can be imported."""
    missing = []
    for file in pages():
        for quoted in re.findall(r"`([^`\n]+)`", file.read_text(encoding="utf-8")):
            path = re.fullmatch(r"(?:src|tests|tools|docs|bench|examples|constraints)/[\w./-]+", quoted)
            if path and not (ROOT / quoted).exists():
                missing.append(f"{file.name}: {quoted}")
            name = re.match(r"tropism(?:\.\w+)+", quoted)
            if name and name[0] != "tropism.trackers":  # the entry point
                try:
                    pkgutil.resolve_name(name[0])
                except (ImportError, AttributeError):
                    missing.append(f"{file.name}: {name[0]}")
    assert not missing


def test_every_room_is_in_the_tour() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    source = ROOT / "src" / "tropism"
    rooms = [path.parent for path in source.rglob("__init__.py") if path.parent != source]
    assert not [str(room) for room in rooms if f"{room.name}/`" not in text]
    files = [path.name for path in source.glob("*.py") if not path.name.startswith("__")]
    assert not [file for file in files if f"`{file}`" not in text]


# --- the site ---------------------------------------------------------------------------------------------------------


def site_source(target: Path) -> Path:
    """The source of the site, as `tools/docs_site.py` writes it."""
    runpy.run_path(str(ROOT / "tools" / "docs_site.py"))["write"](target)
    return target


def in_navigation(entry: Any) -> Iterator[str]:
    """Pages of an entry of the navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from in_navigation(inner)


def test_the_navigation_has_every_page(tmp_path: Path) -> None:
    source = site_source(tmp_path / "source")
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(in_navigation(settings["nav"])) == sorted(
        str(page.relative_to(source)) for page in source.rglob("*.md"))


def test_the_site_is_built_without_warnings_and_loads_nothing(tmp_path: Path) -> None:
    """With the extra `docs`. Pages must not fetch scripts, styles, fonts or images from the network."""
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module)
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    settings = settings.replace("build/docs-source", str(site_source(tmp_path / "source")))
    settings = settings.replace("site_dir: build/docs", f"site_dir: {tmp_path / 'site'}")
    (tmp_path / "mkdocs.yml").write_text(settings.replace("paths: [src]", f"paths: [{ROOT / 'src'}]"), encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(tmp_path / "mkdocs.yml")],
                          capture_output=True, text=True, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    built = list((tmp_path / "site").rglob("*.html"))
    assert len(built) > 60
    fetched = re.compile(r'<(?:script|img|iframe)[^>]+src="https?:|<link[^>]+rel="(?:stylesheet|icon)"[^>]+https?:')
    assert not [page.name for page in built if fetched.search(page.read_text(encoding="utf-8"))]
