"""English text that ships with every Python: the standard library's own documentation."""

import ast
import importlib.util
import inspect
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

MIN_CHARACTERS = 80
SKIPPED_DIRECTORIES = {
    "__pycache__",
    "dist-packages",
    "idle_test",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def stdlib_documents() -> Iterator[str]:
    """Docstrings of the standard library and the topics of `pydoc`, each text once.

    Sources are parsed, never imported, in the sorted order of their paths, so one Python version
    always gives the same documents. Texts shorter than 80 characters are left out.
    """
    seen = set()
    for text in _all_texts():
        if len(text) >= MIN_CHARACTERS and text not in seen:
            seen.add(text)
            yield text


def _all_texts() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_DIRECTORIES.isdisjoint(path.relative_to(root).parts):
            yield from docstrings(path.read_bytes())
    if importlib.util.find_spec("pydoc_data") is not None:
        from pydoc_data.topics import topics

        yield from (inspect.cleandoc(topics[name]) for name in sorted(topics))


def docstrings(source: bytes) -> Iterator[str]:
    """The dedented docstrings of a module, its classes and functions, in the order of the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    nodes = [node for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        text = ast.get_docstring(node)
        if text:
            yield text
