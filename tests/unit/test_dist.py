"""The version has one place, and a wheel holds the package and nothing else."""

import os
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "import hatchling.build as build; build.build_wheel({0!r}); build.build_sdist({0!r})"


@pytest.fixture(scope="module")
def check() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "check_dist.py"))


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel and sdist, built without network."""
    pytest.importorskip("hatchling", reason="the build backend is not installed: pip install 'tropism[dist]'")
    directory = tmp_path_factory.mktemp("dist")
    done = subprocess.run([sys.executable, "-c", BUILD.format(str(directory))], cwd=ROOT, capture_output=True,
                          text=True, env={**os.environ, "PIP_NO_INDEX": "1"}, check=False)
    assert done.returncode == 0, done.stderr
    return directory


def test_the_packages_are_complete(packages: Path, check: dict[str, Any]) -> None:
    assert check["problems"](packages) == []


def test_what_is_wrong_is_found(packages: Path, check: dict[str, Any], tmp_path: Path) -> None:
    """A file of the tests in the wheel, a template that is missing, an old name, and no sdist."""
    wheel, = packages.glob("*.whl")
    with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(tmp_path / "tropism-0.0.1-py3-none-any.whl", "w") as after:
        for name in before.namelist():
            if name != "tropism/py.typed":
                after.writestr(name, before.read(name) + (b" " if name.endswith("chatml.jinja") else b""))
        after.writestr("tests/conftest.py", "")
    said = "\n".join(check["problems"](tmp_path))
    for part in ("0.0.1-py3-none-any.whl: not the name", "tropism/py.typed is missing", "chatml.jinja differs",
                 "tests/conftest.py does not belong", "0 files *.tar.gz"):
        assert part in said


def test_the_version_has_one_place() -> None:
    """The newest heading of the changelog is that of pyproject.toml; modules read it from the installed package."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    headings = re.findall(r"^## \[([\d.]+)\] - (?:unreleased|\d{4}-\d\d-\d\d)$",
                          (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == version
    assert len({*headings}) == len(headings)
    written = re.compile(rf"(?<![\d.]){re.escape(version)}(?![\d.])")
    assert not [path for path in (ROOT / "src").rglob("*.py") if written.search(path.read_text(encoding="utf-8"))]


def test_what_the_sdist_names_exists(check: dict[str, Any]) -> None:
    assert not [entry for entry in check["SHIPPED"] if not (ROOT / entry).exists()]
