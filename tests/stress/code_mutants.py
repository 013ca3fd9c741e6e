"""Draws mutants of the core.

The changes of operators, numbers and names are mutmut's; dropped statements and returned values are
added. Messages, log lines, types and decorators are left alone.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import libcst as cst
from measure_mutants import ROOT, Mutant
from mutmut.mutation import mutators

FLOORS = ("quant", "losses", "nn", "data", "train")
TOLD = ("logger", "warnings")
"""Whose calls only tell people something."""


class Change(NamedTuple):
    """One node of a file's syntax and what takes its place."""

    tree: cst.Module
    node: cst.CSTNode
    kind: str
    other: cst.CSTNode


def drawn(size: int, seed: int) -> list[Mutant]:
    """A sample of the mutants that are possible."""
    files = sorted(path for floor in FLOORS for path in (ROOT / "qat" / floor).rglob("*.py"))
    possible = [change for path in files for change in changes(path)]
    print(f"{len(possible)} mutants of {len(files)} files are possible; {size} are drawn")
    found = []
    for path, change in random.Random(seed).sample(possible, size):
        file = path.relative_to(ROOT).as_posix()
        line, before, after = lines_changed(path, change)
        name = hashlib.sha256(f"{file} {before} {after}".encode()).hexdigest()[:10]
        found.append(Mutant(name, file, line, change.kind, before, after))
    return sorted(found, key=lambda each: (each.file, each.line))


def changes(path: Path) -> Iterator[tuple[Path, Change]]:
    """All that may be done to a file."""
    tree = cst.MetadataWrapper(cst.parse_module(path.read_text(encoding="utf-8"))).module
    left = [tree]
    while left:
        node = left.pop()
        if is_left_out(node):
            continue
        for of, operator in OPERATORS:
            if isinstance(node, of):
                for other in operator(node):
                    yield path, Change(tree, node, operator.__name__[9:], other)
        if not isinstance(node, cst.Raise):  # its message
            left.extend(reversed(node.children))


def operator_drop(node: cst.BaseSmallStatement) -> Iterator[cst.CSTNode]:
    """Drop a call, a `raise`, or what is put into something; without a name it would not run."""
    if isinstance(node, cst.Assign):
        is_name = [isinstance(each.target, cst.Name | cst.Tuple) for each in node.targets]
        if any(is_name):
            return
    if isinstance(node, cst.Expr | cst.Assign | cst.AugAssign | cst.Raise) and not (
        isinstance(node, cst.Expr) and is_left_out(node.value)
    ):
        yield cst.Pass()


def operator_return(node: cst.Return) -> Iterator[cst.CSTNode]:
    """Return None."""
    if node.value is not None and getattr(node.value, "value", "") != "None":
        yield node.with_changes(value=cst.Name("None"))


def is_left_out(node: cst.CSTNode) -> bool:
    """Whether a node is a docstring, a type, an import, or told to people."""
    if isinstance(node, cst.Expr):
        return isinstance(node.value, cst.SimpleString)
    if isinstance(node, cst.If):
        return getattr(node.test, "value", "") == "TYPE_CHECKING"
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        return getattr(node.func.value, "value", "") in TOLD
    return isinstance(node, cst.Annotation | cst.Decorator | cst.Import | cst.ImportFrom)


OPERATORS: tuple[tuple[type, Callable], ...] = (
    (cst.BaseNumber, mutators.operator_number),
    (cst.Name, mutators.operator_name),
    (cst.UnaryOperation, mutators.operator_remove_unary_ops),
    (cst.CSTNode, mutators.operator_keywords),
    (cst.CSTNode, mutators.operator_swap_op),
    (cst.BaseSmallStatement, operator_drop),
    (cst.Return, operator_return),
)


def lines_changed(path: Path, change: Change) -> tuple[int, str, str]:
    """The first line that a change concerns, and the lines before and after it."""
    old = path.read_text(encoding="utf-8").splitlines(keepends=True)
    new = change.tree.deep_replace(change.node, change.other).code.splitlines(keepends=True)
    start = next(at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    pairs = zip(reversed(old[start:]), reversed(new[start:]), strict=False)
    shorter = min(len(old), len(new)) - start
    end = next((at for at, (a, b) in enumerate(pairs) if a != b), shorter)
    before, after = (lines[start : len(lines) - end] for lines in (old, new))
    return start + 1, "".join(before), "".join(after)
