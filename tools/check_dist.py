"""Check a wheel and an sdist: the version, the files of the package and nothing else, the command, what it needs.

    python tools/check_dist.py dist
"""

import argparse
import re
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = _PROJECT["project"]
SHIPPED = _PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
_MUST = ("tropism/py.typed", "tropism/commands/demo/feedback.jsonl", "tropism/data/chat_templates/chatml.jinja",
         "tropism/observe/pages/report.html.jinja")


def files_below(root: Path) -> dict[str, bytes]:
    """Contents of the files of a directory by their path, without what Python leaves behind."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts}


def wheel_problems(path: Path) -> Iterator[str]:
    """What is wrong with a wheel."""
    info = f"tropism-{PROJECT['version']}.dist-info"
    if path.name != f"tropism-{PROJECT['version']}-py3-none-any.whl":
        yield f"{path.name}: not the name of version {PROJECT['version']}"
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    package = {f"tropism/{name}": content for name, content in files_below(ROOT / "src" / "tropism").items()}
    own = {name for name in held if not name.startswith(f"{info}/")}
    yield from (f"{path.name}: {name} is missing" for name in sorted(package.keys() - own))
    yield from (f"{path.name}: {name} does not belong in it" for name in sorted(own - package.keys()))
    yield from (f"{path.name}: {name} differs from the source" for name in sorted(own & package.keys())
                if held[name] != package[name])
    yield from (f"{path.name}: {name} is missing" for name in _MUST if name not in own)
    if "tropism = tropism.cli.app:main" not in held.get(f"{info}/entry_points.txt", b"").decode():
        yield f"{path.name}: has no command `tropism`"
    if f"{info}/licenses/LICENSE" not in held:
        yield f"{path.name}: has no LICENSE"
    metadata = Parser().parsestr(held.get(f"{info}/METADATA", b"").decode())
    needs, wanted = ({re.split(r"[^\w.-]", line)[0].lower() for line in lines}
                     for lines in (metadata.get_all("Requires-Dist", []), PROJECT["dependencies"]))
    yield from (f"{path.name}: does not require {name}" for name in sorted(wanted - needs))
    if metadata["Version"] != PROJECT["version"]:
        yield f"{path.name}: its version is {metadata['Version']}"


def sdist_problems(path: Path) -> Iterator[str]:
    """What is wrong with an sdist."""
    top = f"tropism-{PROJECT['version']}"
    if path.name != f"{top}.tar.gz":
        yield f"{path.name}: not the name of version {PROJECT['version']}"
    with tarfile.open(path) as archive:
        held = {member.name for member in archive.getmembers() if member.isfile()}
    listed = [ROOT / entry for entry in SHIPPED]
    wanted = {f"{top}/{entry.relative_to(ROOT).as_posix()}" for entry in listed if entry.is_file()} | {
        f"{top}/{entry.relative_to(ROOT).as_posix()}/{name}" for entry in listed if entry.is_dir()
        for name in files_below(entry)}
    extra = held - wanted - {f"{top}/{name}" for name in ("PKG-INFO", "pyproject.toml", ".gitignore")}
    yield from (f"{path.name}: {name} is missing" for name in sorted(wanted - held))
    yield from (f"{path.name}: {name} does not belong in it" for name in sorted(extra))


def problems(directory: Path) -> list[str]:
    """What is wrong with the packages in a directory, which has one of each kind."""
    found: list[str] = []
    for pattern, check in (("*.whl", wheel_problems), ("*.tar.gz", sdist_problems)):
        packages = sorted(directory.glob(pattern))
        if len(packages) != 1:
            found.append(f"{directory}: {len(packages)} files {pattern} instead of one")
        for package in packages:
            found += check(package)
    return found


def main() -> None:
    """Exit with code 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where wheel and sdist are")
    directory = parser.parse_args().directory
    if found := problems(directory):
        sys.exit("\n".join(found))
    print(f"{directory}: wheel and sdist of {PROJECT['version']} are complete")


if __name__ == "__main__":
    main()
