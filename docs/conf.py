"""The site of these pages: ``make docs`` builds it. A dead link, a dead anchor or an undocumented public name fails."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging

import hpctrain

project = "hpctrain"
version = release = hpctrain.__version__
html_title = f"hpctrain {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
html_theme = "furo"
html_show_copyright = False
html_show_sourcelink = False
exclude_patterns = ["pictures"]

add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "undoc-members": True}
napoleon_use_rtype = False
python_maximum_signature_line_length = 100
suppress_warnings = ["sphinx_autodoc_typehints"]

logger = logging.getLogger(__name__)


def keep_colons(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Napoleon takes the text before a colon in the first line of an attribute's docstring for its type."""
    if what in ("attribute", "property"):
        lines[:0] = ["..", ""]  # a comment, in which there is no colon


def hide_signature_of_protocols(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, annotation: str | None
) -> tuple[str, None] | None:
    """Nobody calls them."""
    return ("", None) if what == "class" and getattr(obj, "_is_protocol", False) else None


def require_documentation(app: Sphinx, env: BuildEnvironment) -> None:
    """Checks that each public name of ``hpctrain`` is on a page, and that each of its members has a docstring."""
    on_pages = {name for name, *_ in env.get_domain("py").get_objects()}
    for name in sorted(set(hpctrain.__all__) - {"__version__"}):
        if f"hpctrain.{name}" not in on_pages:
            logger.warning("hpctrain.%s is public but on no page of docs/api", name)
        for missing in undocumented(getattr(hpctrain, name)):
            logger.warning("hpctrain.%s: %s has no docstring", name, missing)


def undocumented(thing: Any) -> Iterator[str]:
    """A function or class itself, and a class's public members, without a docstring."""
    if not thing.__doc__:
        yield "it"
    if not isinstance(thing, type):
        return
    for kind in (base for base in thing.__mro__ if base.__module__.startswith("hpctrain")):
        described = ModuleAnalyzer.for_module(kind.__module__).find_attr_docs()
        members = {**dict.fromkeys(inspect.get_annotations(kind)), **vars(kind)}
        for name, member in members.items():
            has_own = callable(member) or isinstance(member, (property, classmethod, staticmethod))
            if (
                not name.startswith("_")
                and (kind.__name__, name) not in described
                and not (has_own and inspect.getdoc(member))
            ):
                yield name


def setup(app: Sphinx) -> None:
    """Adds the checks."""
    app.connect("autodoc-process-docstring", keep_colons, priority=400)  # before napoleon's
    app.connect("autodoc-process-signature", hide_signature_of_protocols)
    app.connect("env-check-consistency", require_documentation)
