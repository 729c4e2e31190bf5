"""The pages of the rules: what goes wrong, how it shows, an example, the fix."""

from __future__ import annotations

import re
from importlib.resources import files

from cuverify.errors import ArgumentError

_PACKAGE = "cuverify.validators"
_FOLDER = "pages"


def names() -> list[str]:
    """Return the names of all rules that have a page, sorted."""
    return sorted(
        entry.name.removesuffix(".md")
        for entry in (files(_PACKAGE) / _FOLDER).iterdir()
        if entry.name.endswith(".md")
    )


def page(rule: str) -> str:
    """Return a rule's page, as Markdown.

    Parameters
    ----------
    rule : str
        Such as ``"CV101"``; upper or lower case.

    Raises
    ------
    ArgumentError
        No rule has that name.
    """
    name = rule.strip().upper()
    known = names()
    if name not in known:
        close = [other for other in known if other[:3] == name[:3]] or known
        raise ArgumentError("rule", rule, f"has no page; there are {', '.join(close)}")
    return (files(_PACKAGE) / _FOLDER / f"{name}.md").read_text(encoding="utf-8")


def title(rule: str) -> str:
    """Return the violation in a few words: the heading of a rule's page."""
    heading = page(rule).partition("\n")[0]
    return heading.partition(": ")[2]


def section(rule: str, name: str) -> str:
    """Return one section of a rule's page, without its heading; empty when it has none.

    Parameters
    ----------
    rule : str
    name : str
        ``"What goes wrong"``, ``"How it shows"``, ``"Minimal example"``, ``"Fix"`` or
        ``"In the zoo"``.
    """
    found = re.search(
        rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", page(rule), re.MULTILINE | re.DOTALL
    )
    return found[1].strip() if found else ""
