"""HTML pages: one self-contained file each, without scripts that run or network access."""

from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from tropism.printable import one_line


def render_page(template: str, **values: Any) -> str:
    """Render a template of `observe/pages`. All values are shown as text, each on one line, except for `Markup`, which
    only code of ours makes.

    Args:
        template: file name.
        values: variables of the template.
    """
    environment = jinja2.Environment(loader=jinja2.FunctionLoader(_read), autoescape=True, trim_blocks=True,
                                     lstrip_blocks=True, undefined=jinja2.StrictUndefined,
                                     finalize=lambda value: value if isinstance(value, Markup)
                                     else one_line(str(value)))
    return environment.get_template(template).render(**values)


def _read(name: str) -> str:
    return (resources.files("tropism.observe") / "pages" / name).read_text(encoding="utf-8")
