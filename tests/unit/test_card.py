"""A model card and a page show names, options and rows of others as text."""

import ast
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from markdown_it import MarkdownIt

from hostile import TEXTS, is_harmless
from tropism.commands.export import card
from tropism.commands.export.read_run import Chosen, ExportedRun
from tropism.observe.page import render_page
from tropism.printable import one_line

MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def rendered(text: str, method: str = "dpo", adapter: bool = False) -> str:
    """A card of a run in which every name is this text."""
    run = ExportedRun(
        Path("runs/first"),
        {"method": method, "model": text, "status": text, "device": text, "device_name": text, "layout": text,
         "python": text, "libraries": {"tropism": text, text: text}, "given": {text: text}, "precision": text,
         "world_size": text},
        {"loss": text, "beta": text, "reference": text, "teacher": text, "seed": text, "schedule": text, "lora": {
            "rank": 1, "targets": text, "adapter": text, "quantize": text}},
        {"source": text, "rows": {"read": text, "kept": text, "dropped": {text: 1}}, "labels": {text: 2},
         "split": {"train": text, "eval": text}},
        [{"split": "eval", "step": 2, text: 0.5, f"{text}/x": 0.25}])
    facts: dict[str, Any] = {"base": text, "adapter": adapter, "merged": False, "dtype": text, "rounding": None,
                             "stop_tokens": {1: text, 2: "a"}, "fingerprints": {text: text}}
    return card.render(run, Chosen(Path("c"), 2, {}, best=(text, 0.25)), facts, text)


def structure(source: str) -> Counter[str]:
    """What a reader of Markdown makes of it besides text."""
    found: Counter[str] = Counter()
    for block in MARKDOWN.parse(source):
        for token in (block, *(block.children or [])):
            found[token.type + (token.content if token.type in ("html_inline", "html_block") else "")] += 1
    return found


@settings(max_examples=25)
@given(text=TEXTS)
@example(text="`</code><script>alert(1)</script>")
@example(text="![a](http://b/c.png) <http://d> http://e www.f.g a@h.i *b* __c__ ~~d~~ :e:")
def test_a_card_says_what_its_run_says_and_nothing_else(text: str) -> None:
    """Whatever its names are, it is the same document with other words."""
    for adapter in (False, True):
        source = rendered(text, adapter=adapter)
        assert is_harmless(source)
        source.encode()
        ignored = {"text", "code_inline", "html_inline<code>", "html_inline</code>", "text_special", "softbreak"}
        found, usual = structure(source), structure(rendered("word", adapter=adapter))
        assert {kind: count for kind, count in found.items() if kind not in ignored} == {
            kind: count for kind, count in usual.items() if kind not in ignored}
        assert found["html_inline<code>"] == found["html_inline</code>"]
        assert not re.search(r"<(?!/?code>)", source)
        front = next(iter(yaml.safe_load_all(source.split("\n---\n")[0].removeprefix("---\n"))))
        assert front.keys() - {"base_model"} == {"library_name", "pipeline_tag", "tags"}
        named = re.search(r"from_pretrained\((\".*?\")(?:, dtype=\"auto\")?\)\n", source)
        assert named is not None
        assert ast.literal_eval(named[1]) == text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def test_text_in_a_card_can_be_read() -> None:
    source = rendered("a_b [x] 100% `c` | <d>\x1b", method="<img>")
    html = MARKDOWN.render(source)
    assert "<code>a_b [x] 100% `c` | &lt;d&gt;\\x1b</code>" in html
    assert "&lt;img&gt;" in html
    assert "a_b [x] 100%" in source
    assert "| `beta` | 0.5 |" in card.render(
        ExportedRun(Path("r"), {"method": "dpo", "model": "m"}, {"beta": 0.5}), Chosen(Path("c"), 2),
        {"base": "m", "adapter": False, "merged": False, "dtype": "float32", "rounding": None, "stop_tokens": {},
         "fingerprints": {}}, "n")


class Page(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.said: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Count it."""
        self.elements[tag] += 1
        self.attributes |= {f"{tag} {name}" for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        """Keep it."""
        self.said.append(data)


def page_of(text: str) -> str:
    """The page of `tropism inspect` on data in which every name is this text."""
    row = {"place": text, "id": f"id {text}", "label": True, "notes": [text, text]}
    report = {"source": text, "format": text, "model": text, "max_length": 8, "histograms": {text: [[1, 2, 3]]},
              "findings": [{"severity": "warning", "text": text, "places": [text, text]}],
              "dropped_rows": [{"place": text, "reason": text, "detail": text}]}
    return render_page("inspect.html.jinja", report=report, summary=text,
                       rows=[{"row": row, "prompt": [text], "completions": [[(text, True)], [(text, False)]]}])


@settings(max_examples=25)
@given(text=TEXTS)
def test_a_page_shows_data_as_text(text: str) -> None:
    """No element, attribute or character that acts comes from the data, and no script could run."""
    source = page_of(text)
    assert is_harmless(source)
    source.encode()
    page, usual = Page(source), Page(page_of("word"))
    assert page.elements == usual.elements
    assert page.attributes == usual.attributes
    assert "script" not in page.elements
    assert one_line(text).strip() in "".join(page.said)
    assert "Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"" in source


@pytest.mark.parametrize("severity", ["warning\" onclick=\"x", "<b>"])
def test_attributes_of_a_page_stay_attributes(severity: str) -> None:
    source = render_page("inspect.html.jinja", summary="", rows=[], report={
        "source": "", "format": "", "model": "", "max_length": 1, "histograms": {}, "dropped_rows": [],
        "findings": [{"severity": severity, "text": "", "places": []}]})
    assert "td onclick" not in Page(source).attributes
    assert "b" not in Page(source).elements
