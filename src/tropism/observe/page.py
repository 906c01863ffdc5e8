"""Pages for a browser: one file each, with no script and nothing from the network."""

from importlib import resources
from typing import Any

import jinja2


def render_page(template: str, **values: Any) -> str:
    """A page from one of the templates beside this file; every value is escaped.

    Args:
        template: name of the file.
        values: what it shows.
    """
    environment = jinja2.Environment(loader=jinja2.FunctionLoader(_read), autoescape=True, trim_blocks=True,
                                     lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.get_template(template).render(**values)


def _read(name: str) -> str:
    return (resources.files("tropism.observe") / "pages" / name).read_text(encoding="utf-8")
