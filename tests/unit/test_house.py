"""Rules of the house that no linter checks."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import tropism

SOURCE = Path(tropism.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_size_budgets(file: Path) -> None:
    """Files up to 400 lines, functions up to 80: a stranger reads one at a sitting."""
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 80, f"{node.name} is too long"


def test_ruff_checks_every_file_for_undefined_names() -> None:
    """An ignored directory, or a muted F821, would hide a name that does not exist."""
    def ruff(*arguments: str, code: str = "") -> list[str]:
        return subprocess.run([sys.executable, "-m", "ruff", "check", *arguments], cwd=SOURCE.parents[1], input=code,
                              capture_output=True, text=True, check=False).stdout.splitlines()

    assert {Path(line) for line in ruff("--show-files", "src")} >= set(FILES)
    for file in {file.parent: file for file in FILES}.values():  # one of each directory
        found = ruff("--output-format", "concise", "--stdin-filename", str(file), "-", code="undefined\n")
        assert any("F821" in line for line in found), file


def test_no_room_is_called_utils() -> None:
    assert not [file for file in FILES if file.stem in ("utils", "util", "helpers", "common", "misc")]


def test_torch_distributed_is_imported_in_distributed_only() -> None:
    offenders = []
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [])
            if any(name.startswith("torch.distributed") for name in names) and file.parent.name != "distributed":
                offenders.append(file)
    assert not offenders


def test_every_module_imports_with_warnings_as_errors() -> None:
    """In a process of its own: an import must not depend on what a test imported before."""
    names = [module.name for module in pkgutil.walk_packages([str(SOURCE)], "tropism.")
             if not module.name.endswith("__main__")
             and (find_spec("triton") or not module.name.endswith("triton_kernels"))]
    code = "import importlib, warnings\n" + "\n".join(
        f"importlib.import_module({name!r}) if not {name.count('demo.run')} else None" for name in names)
    done = subprocess.run([sys.executable, "-W", "error::SyntaxWarning", "-c", code], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    assert len(names) > 30


def test_public_names_have_docstrings() -> None:
    missing = []
    for file in FILES:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        nodes = [tree, *(node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
                         and not node.name.startswith("_"))]
        missing += [f"{file.name}: {getattr(node, 'name', 'module')}" for node in nodes if not ast.get_docstring(node)]
    assert not missing


def test_names_of_the_package_are_found() -> None:
    for name in tropism.__all__:
        assert getattr(importlib.import_module("tropism"), name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = tropism.no_such_name
