"""The way of a verb's settings through the package, read from the source.

The walk begins in the verb's function and follows each call in the order of evaluation. A *room* is
a function, or a class with all its methods, that is handed the settings or one of the classes from
which they inherit fields: a part counts as the whole does. A *climb* is a move back from a room to
its caller, which still uses the settings. A room that is called twice is walked twice. Types are
read from annotations, constructors and assignments; an object that holds settings is followed to
where its attribute is read. At 51e9a00d the settings of `qat train` make 257 stays in 59 rooms,
with 96 climbs; the goals were set by another count of that commit, with 253, 62 and 81.
"""

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

GROUND = "qat.config.Settings"
"""The base of all settings, which has no fields and is no part of any."""
RETURNS_SELF = ("model_copy",)
RETURNS_ITS_ARGUMENT = ("part",)
CALLS_ITS_ARGUMENT = ("together",)
INSIDE = ("Iterator", "Annotated", "Required")
"""Generic types that stand for their first argument here."""


class Package:
    """The functions and classes of a package by full name, and what names mean in its modules."""

    def __init__(self, root: Path) -> None:
        self.names: dict[str, dict[str, str]] = {}
        self.defined: dict[str, tuple[str, ast.FunctionDef | ast.ClassDef]] = {}
        self.bounds: dict[str, ast.expr] = {}
        self._attributes: dict[str, dict[str, str]] = {}
        for file in sorted(root.rglob("*.py")):
            module = ".".join(file.relative_to(root.parent).with_suffix("").parts)
            self._index(module, ast.parse(file.read_text(encoding="utf-8")))

    def _index(self, module: str, tree: ast.Module) -> None:
        names = self.names[module] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names[node.name] = f"{module}.{node.name}"
                self.defined[f"{module}.{node.name}"] = module, node
            if isinstance(node, ast.ClassDef):
                methods = (each for each in node.body if isinstance(each, ast.FunctionDef))
                own = {f"{module}.{node.name}.{each.name}": (module, each) for each in methods}
                self.defined |= own
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                bound = [word.value for word in node.value.keywords if word.arg == "bound"]
                if bound:  # a type variable stands for its bound
                    self.bounds[f"{module}.{ast.unparse(node.targets[0])}"] = bound[0]

    def meant(self, module: str, expression: ast.expr) -> str | None:
        """Return the full name of a name, or of a dotted one, in a module."""
        if isinstance(expression, ast.Name):
            return self.names[module].get(expression.id)
        if isinstance(expression, ast.Attribute):
            owner = self.meant(module, expression.value)
            return owner and f"{owner}.{expression.attr}"
        return None

    def annotated(self, module: str, annotation: ast.expr | None) -> str | None:
        """Return the class of the package that an annotation names, if any."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):
            left, right = annotation.left, annotation.right
            return self.annotated(module, left) or self.annotated(module, right)
        if isinstance(annotation, ast.Subscript):
            inner = annotation.slice
            first = inner.elts[0] if isinstance(inner, ast.Tuple) else inner
            return self.annotated(module, first) if _last(annotation.value) in INSIDE else None
        if annotation is None:
            return None
        name = self.meant(module, annotation)
        bound = self.bounds.get(f"{module}.{ast.unparse(annotation)}")
        if bound is not None:
            return self.annotated(module, bound)
        return name if name and self.is_class(name) else None

    def is_class(self, name: str) -> bool:
        """Return whether a full name is that of a class of the package."""
        return name in self.defined and isinstance(self.defined[name][1], ast.ClassDef)

    def lineage(self, name: str) -> Iterator[str]:
        """Yield a class and those of the package that it inherits from, directly or not."""
        yield name
        module, node = self.defined[name]
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            base = base.value if isinstance(base, ast.Subscript) else base
            found = self.meant(module, base)
            if found and self.is_class(found):
                yield from self.lineage(found)

    def member(self, name: str, attribute: str) -> str | None:
        """Return the full name of a class's method, which may be inherited."""
        found = (f"{each}.{attribute}" for each in self.lineage(name))
        return next((each for each in found if each in self.defined), None)

    def attribute(self, name: str, attribute: str) -> str | None:
        """Return the class of an attribute or property of a class's objects, if it is known."""
        tables = (self._attributes_of(each) for each in self.lineage(name))
        return next((table[attribute] for table in tables if attribute in table), None)

    def _attributes_of(self, name: str) -> dict[str, str]:
        if name not in self._attributes:
            found: dict[str, str | None] = {}
            module, node = self.defined[name]
            for each in node.body:
                if isinstance(each, ast.AnnAssign):
                    found[ast.unparse(each.target)] = self.annotated(module, each.annotation)
                if isinstance(each, ast.FunctionDef):
                    if any(_last(mark) == "property" for mark in each.decorator_list):
                        found[each.name] = self.annotated(module, each.returns)
                    found |= self._set_in(module, each)
            self._attributes[name] = {key: kind for key, kind in found.items() if kind}
        return self._attributes[name]

    def _set_in(self, module: str, method: ast.FunctionDef) -> dict[str, str | None]:
        """Return the classes of what a method assigns to attributes of `self`."""
        given = {p.arg: self.annotated(module, p.annotation) for p in parameters(method)}
        found = {}
        for node in ast.walk(method):
            for target, value in _pairs(node):
                if isinstance(target, ast.Attribute) and _last(target.value) == "self":
                    kind = given.get(value.id) if isinstance(value, ast.Name) else None
                    if isinstance(value, ast.Call):
                        is_part = _last(value.func) in RETURNS_ITS_ARGUMENT
                        named = value.args[0] if is_part else value.func
                        kind = self.annotated(module, named)
                    found[target.attr] = kind
        return found


def parameters(function: ast.FunctionDef) -> list[ast.arg]:
    """Return the named parameters of a function, those without a default first."""
    given = function.args
    return [*given.posonlyargs, *given.args, *given.kwonlyargs]


def _pairs(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield targets with their values, of several in one line each with its own."""
    for target in node.targets if isinstance(node, ast.Assign) else ():
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def _last(expression: ast.AST) -> str:
    return ast.unparse(expression).rpartition(".")[2]


class SettingsTrace:
    """The path of settings from the function of a verb through all functions that get them."""

    def __init__(self, package: Package, verb: str, settings: str) -> None:
        self.package = package
        self.settings = set(package.lineage(settings)) - {GROUND}
        self.stays: list[tuple[str, int]] = []
        """Rooms in the order of the walk, each with its depth."""
        self.path: list[str] = []  # functions from the verb to the present one
        self.enter(verb, {})

    @property
    def rooms(self) -> int:
        """Number of rooms."""
        return len({room for room, _ in self.stays})

    @property
    def climbs(self) -> int:
        """Number of climbs."""
        return sum(after < before for (_, before), (_, after) in pairwise(self.stays))

    def enter(self, name: str, given: dict[str, str]) -> None:
        """Follow a function; `given` are the classes of settings among its arguments."""
        if name in self.path:
            return
        module, node = self.package.defined[name]
        owner = name.rpartition(".")[0]
        is_method = self.package.is_class(owner)
        kinds = {p.arg: self.package.annotated(module, p.annotation) for p in parameters(node)}
        if is_method:
            kinds |= {"self": owner, "cls": owner}
        self.path.append(name)
        visit = _FunctionVisitor(self, owner if is_method else name, module, {**kinds, **given})
        if given:
            visit.stay()
        for statement in node.body:
            visit.visit(statement)
        self.path.pop()

    def stay(self, room: str, below: int = 0) -> None:
        """Note that the settings are used in a room, unless they have not left it since."""
        if not self.stays or self.stays[-1][0] != room:
            self.stays.append((room, len(self.path) + below))


class _FunctionVisitor(ast.NodeVisitor):
    """The way through one function, in the order of evaluation."""

    def __init__(
        self, trace: SettingsTrace, room: str, module: str, kinds: dict[str, str | None]
    ) -> None:
        self._trace, self._room, self._module, self._kinds = trace, room, module, kinds
        self._package = trace.package
        self._lists: dict[str, list[str]] = {}
        """Names of functions in a local tuple, and by the variable that loops over it."""

    def stay(self) -> None:
        self._trace.stay(self._room)

    def _kind(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self._kinds.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._kind(node.value)
            return owner and self._package.attribute(owner, node.attr)
        if isinstance(node, ast.IfExp):
            return self._kind(node.body) or self._kind(node.orelse)
        if isinstance(node, ast.Lambda):
            return self._kind(node.body)
        return self._returned(node) if isinstance(node, ast.Call) else None

    def _returned(self, node: ast.Call) -> str | None:
        """Return the class of what a call returns, if it is known."""
        if _last(node.func) in CALLS_ITS_ARGUMENT and node.args:
            return self._kind(node.args[0])
        if _last(node.func) in RETURNS_SELF and isinstance(node.func, ast.Attribute):
            return self._kind(node.func.value)
        if _last(node.func) in RETURNS_ITS_ARGUMENT and node.args:
            return self._package.annotated(self._module, node.args[0])
        called = self._called(node)
        if called is None or self._package.is_class(called):
            return called
        module, function = self._package.defined[called]
        returned = ast.unparse(function.returns) if function.returns else ""
        if returned == "Self":
            return called.rpartition(".")[0]
        if f"{module}.{returned}" in self._package.bounds:
            return self._kind(node.args[0])
        return self._package.annotated(module, function.returns)

    def _called(self, node: ast.Call) -> str | None:
        name = self._package.meant(self._module, node.func)
        if name is None and isinstance(node.func, ast.Attribute):
            owner = self._kind(node.func.value)
            name = owner and self._package.member(owner, node.func.attr)
        return name if name in self._package.defined else None

    def _is_settings(self, node: ast.expr) -> bool:
        return self._kind(node) in self._trace.settings

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and self._is_settings(node):
            self.stay()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)
        if self._is_settings(node):
            self.stay()

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        if isinstance(node.value, ast.Tuple):
            names = [self._package.meant(self._module, each) for each in node.value.elts]
            self._lists[ast.unparse(node.targets[0])] = [n for n in names if n]
        for target, value in _pairs(node):
            if isinstance(target, ast.Name):
                self._kinds[target.id] = self._kind(value) or self._kinds.get(target.id)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        kind = self._package.annotated(self._module, node.annotation)
        self._kinds[ast.unparse(node.target)] = kind

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self._kinds[node.target.id] = self._kind(node.value)

    def visit_withitem(self, node: ast.withitem) -> None:
        self.visit(node.context_expr)
        if isinstance(node.optional_vars, ast.Name):
            self._kinds[node.optional_vars.id] = self._kind(node.context_expr)

    def visit_For(self, node: ast.For) -> None:
        self._loops(node.target, node.iter)
        self.generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        for each in node.generators:
            self._loops(each.target, each.iter)
            self.visit(each)
        self.visit(node.elt)

    def _loops(self, target: ast.expr, over: ast.expr) -> None:
        self._lists[ast.unparse(target)] = self._lists.get(ast.unparse(over), [])

    def visit_Call(self, node: ast.Call) -> None:
        for each in (node.func, *node.args, *(word.value for word in node.keywords)):
            self.visit(each)
        found = self._called(node)
        for name in self._lists.get(ast.unparse(node.func), [found] if found else []):
            self._hand_over(name, node)

    def _hand_over(self, name: str, call: ast.Call) -> None:
        """Follow what is called if an argument is the settings, or one of its parts."""
        package = self._package
        if any(name == each or name.startswith(f"{each}.") for each in self._trace.settings):
            return
        called = package.member(name, "__init__") if package.is_class(name) else name
        if called is None:  # a class of fields
            given = [*call.args, *(word.value for word in call.keywords)]
            if any(map(self._is_settings, given)):
                self._trace.stay(name, 1)
            return
        _, function = package.defined[called]
        expected = [p.arg for p in parameters(function)]
        if expected[:1] in (["self"], ["cls"]):
            expected = expected[1:]
        named = {word.arg: word.value for word in call.keywords if word.arg}
        pairs = {**dict(zip(expected, call.args, strict=False)), **named}
        given = {key: self._kind(value) for key, value in pairs.items()}
        given = {key: kind for key, kind in given.items() if kind in self._trace.settings}
        if given:
            self._trace.enter(called, given)
