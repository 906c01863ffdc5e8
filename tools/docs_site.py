"""Write the source of the documentation site to build/docs-source: docs/, and pages made of other files.

    python tools/docs_site.py

Pages in docs/ link to files as they are in the repository, such as `../examples/sft.py`. On the site these links lead
to generated pages. `make docs` runs this before it builds the site.
"""

import argparse
import posixpath
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md",
         "SECURITY.md": "security.md", "bench/README.md": "bench.md"}
"""Files of the repository, and the pages of the site that show them. The site's home page is docs/index.md."""

_LINK = re.compile(r"\]\((?!\w+://|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
_PAPER = re.compile(r"(?<![\[/\w])arXiv:(\d{4}\.\d{4,5})")


def page_of(path: str) -> str | None:
    """The page of the site that shows a file of the repository, or None."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("examples/") and path.endswith((".py", ".sh")):
        return str(Path(path).with_suffix(".md"))
    return PAGES.get(path)


def relinked(text: str, source: str) -> str:
    """The Markdown of a file with its links changed to pages of the site, and papers linked to arXiv.

    Args:
        text: the Markdown.
        source: path of the file in the repository.

    Raises:
        ValueError: for a link to a file that is not on the site.
    """
    here = posixpath.dirname(page_of(source) or "") or "."

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        page = page_of(target)
        if page is None:
            raise ValueError(f"{source}: {match[1]} is not on the site. Write its path in backticks instead of a link.")
        return f"]({posixpath.relpath(page, here)}{match[2] or ''})"

    return _PAPER.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", _LINK.sub(link, text))


def write(target: Path) -> None:
    """Write the source of the site; what was in the directory before is removed."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "docs", target)
    for file in sorted((ROOT / "docs").rglob("*.md")):
        source = file.relative_to(ROOT).as_posix()
        (target / source.removeprefix("docs/")).write_text(relinked(file.read_text(encoding="utf-8"), source),
                                                           encoding="utf-8")
    for source, page in PAGES.items():
        if page != "index.md":
            (target / page).write_text(relinked((ROOT / source).read_text(encoding="utf-8"), source), encoding="utf-8")
    (target / "examples").mkdir()
    for file in [*sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "examples").glob("*.sh"))]:
        language = {".py": "python", ".sh": "bash"}[file.suffix]
        text = f"# {file.name}\n\n```{language}\n{file.read_text(encoding='utf-8')}```\n"
        (target / "examples" / f"{file.stem}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    write(ROOT / "build" / "docs-source")
