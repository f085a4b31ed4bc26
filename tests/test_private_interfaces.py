"""docs/private-interfaces.md lists every private interface of a dependency, with a test file that exists."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "private-interfaces.md").read_text()
OWN = {"bitcycle", "hydra_plugins", *sys.stdlib_module_names}


def dotted(node: ast.AST) -> str:
    """The dotted name of an attribute; empty for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    below = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{below}.{node.attr}" if below and isinstance(node, ast.Attribute) else ""


def names_in(source: str) -> Iterator[str]:
    """Dotted names that a module imports, reads as attributes of an imported package, or writes as a text."""
    tree = ast.parse(source)
    packages = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and (name := dotted(node)).partition(".")[0] in packages:
            yield name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"^(?:torch|numpy|hydra|transformers)\.[\w.]*$", node.value)


def private(name: str) -> str:
    """The name up to its first private part; empty if it has none, or belongs to Python or to bitcycle."""
    parts = name.split(".")
    if parts[0] in OWN:
        return ""
    for place, part in enumerate(parts):
        if re.fullmatch(r"_[A-Za-z]\w*", part):
            return ".".join(parts[: place + 1])
    return ""


def used() -> set[str]:
    """Private interfaces in the sources, up to their first private part."""
    sources = (path.read_text() for path in (ROOT / "src").rglob("*.py"))
    return {found for source in sources for name in names_in(source) if (found := private(name))}


def test_the_page_lists_what_is_used_and_nothing_else():
    listed = {
        name
        for row in PAGE.splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`([\w.]+)`", row.split("|")[1])
    }
    assert {private(name) for name in listed} == used()
    inside = {name for name in listed if name.startswith("torch._C.")}
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert set(re.findall(r"torch\._C\.\w+", sources)) == inside


@pytest.mark.parametrize("file", sorted(set(re.findall(r"tests/[\w/]+\.py", PAGE))))
def test_the_tests_it_names_exist(file):
    assert (ROOT / file).is_file()


def test_torch_is_bounded_above():
    (requirement,) = re.findall(r'"(torch>=[^"]*)"', (ROOT / "pyproject.toml").read_text())
    assert re.fullmatch(r"torch>=\d+\.\d+,<\d+\.\d+", requirement)
