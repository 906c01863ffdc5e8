"""The Dockerfile, as far as it can be checked without Docker."""

import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES = [line for line in re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text(encoding="utf-8")).splitlines()
         if line and not line.startswith("#")]
STEPS = [tuple(line.split(maxsplit=1)) for line in LINES]
FINAL = STEPS[max(place for place, (name, _) in enumerate(STEPS) if name == "FROM"):]


def arguments(name: str, steps: list[tuple[str, ...]] = STEPS) -> list[str]:
    return [rest for step, rest in steps if step == name]


def test_bases_are_pinned() -> None:
    """To a release, not to `latest` or a bare name; a stage is named before it is used."""
    for base in arguments("FROM"):
        assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+(?: AS \w+)?", base)
    python = re.match(r"python:(\d+\.\d+)", arguments("FROM")[0])
    assert python is not None
    assert python[1] >= tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"][2:]


def test_it_does_not_run_as_root() -> None:
    users = arguments("USER", FINAL)
    assert users == ["1000:1000"]  # a number, which Kubernetes can tell from root
    assert "useradd --create-home --uid 1000 tropism" in " ".join(arguments("RUN", FINAL))
    made = next(rest for rest in arguments("RUN", FINAL) if "install -d" in rest)
    volumes = re.findall(r"/\w+", " ".join(arguments("VOLUME", FINAL)))
    assert volumes == ["/store", "/huggingface"]
    assert {*volumes, *arguments("WORKDIR", FINAL)} <= {*made.split()}
    settings = dict(word.split("=", 1) for word in shlex.split(arguments("ENV", FINAL)[0]))
    assert {settings["TROPISM_STORE"], settings["HF_HOME"]} == {*volumes}
    assert arguments("ENTRYPOINT", FINAL) == ['["tropism"]']


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    """The context holds what the build needs: what is copied, and what pyproject.toml names."""
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert ignored[0] == "*"
    copied = [word for rest in arguments("COPY") if "--from" not in rest for word in rest.split()[:-1]]
    for source in copied:
        assert (ROOT / source).exists()
        assert any(fnmatch(source, one) for one in kept), source
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"pyproject.toml", "src", project["readme"], *project["license-files"]} == {*copied} == kept


def test_what_is_installed_fits_the_project() -> None:
    """The version of torch is the tested one, and the extras exist."""
    version = re.search(r"^torch==(\S+)$", (ROOT / "constraints" / "tested.txt").read_text(), re.MULTILINE)
    assert version is not None
    assert f"TORCH={version[1]}" in arguments("ARG")
    extras = re.search(r'pip install "\.\[([\w,]+)\]"', " ".join(arguments("RUN")))
    assert extras is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {*extras[1].split(",")} <= project["optional-dependencies"].keys()
