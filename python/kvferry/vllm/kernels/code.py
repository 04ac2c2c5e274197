"""The code of a function of vLLM together with what it calls: read, for whoever writes a cache and cannot be called."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

#: What is not looked into: it decides what runs, and computes nothing.
BEYOND = frozenset({"config", "distributed", "envs", "forward_context", "logger", "platforms", "triton_utils"})

#: A statement at the top of a module (by its dotted name below vLLM).
Statement = tuple[str, ast.stmt]


class Code:
    """The source of one vLLM, which need not be the one that runs."""

    def __init__(self, root: Path) -> None:
        #: Its folder `vllm`.
        self.root = root

    def of(self, module: str, name: str) -> list[Statement]:
        """The statements that define a function and all that it needs of vLLM, each after those that it needs."""
        found: list[Statement] = []
        seen: set[tuple[str, str]] = set()

        def visit(module: str, name: str) -> None:
            if (module, name) in seen:
                return
            seen.add((module, name))
            made = self.bound(module).get(name)
            if made is None:
                return
            if isinstance(made, ast.ImportFrom):
                source = self.imported(module, made)
                if source is not None and source.partition(".")[0] not in BEYOND:
                    visit(source, next(it.name for it in made.names if name in (it.asname, it.name)))
            elif not isinstance(made, ast.Import):
                for other in _names(made):
                    visit(module, other)
            if (module, made) not in found:
                found.append((module, made))

        visit(module, name)
        return found

    def digest(self, module: str, name: str) -> str:
        """The same for code that differs in names, comments and annotations alone; empty where there is none."""
        turns: dict[tuple[str, str], str] = {}
        text = [
            ast.dump(_Plain(self, where, made, turns).visit(ast.parse(ast.unparse(made))))
            for where, made in self.of(module, name)
            if not isinstance(made, ast.Import | ast.ImportFrom)
        ]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16] if text else ""

    def defined(self, module: str, name: str) -> tuple[str, str, ast.stmt | None]:
        """Where a name that a module knows is defined, what it is called there, and by which statement of vLLM."""
        made = self.bound(module).get(name)
        if isinstance(made, ast.Import | ast.ImportFrom):
            called = next(it.name for it in made.names if name in (it.asname, it.name.partition(".")[0]))
            if isinstance(made, ast.Import):
                return called, "", None
            source = self.imported(module, made)
            if source is None or source.partition(".")[0] in BEYOND:
                return f"{made.module}", called, None
            return self.defined(source, called)
        return module, name, made

    def bound(self, module: str) -> dict[str, ast.stmt]:
        """By name: the statement at the top of a module that binds it."""
        return _bound(self.file(module))

    def file(self, module: str) -> Path:
        path = self.root.joinpath(*module.split(".")) if module else self.root
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def imported(self, module: str, made: ast.ImportFrom) -> str | None:
        """The module of vLLM that a statement imports from; None for others'."""
        if not made.level:
            top, _, rest = (made.module or "").partition(".")
            return rest if top == "vllm" else None
        package = module.split(".")
        up = made.level - (self.file(module).name == "__init__.py")
        return ".".join([*package[: len(package) - up], *((made.module or "").split(".") if made.module else ())])


@cache
def _bound(file: Path) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    if file.exists():
        for made in ast.parse(file.read_text(), str(file)).body:
            for name in _bindings(made, inside=False):
                found[name] = made
    return found


def _bindings(made: ast.AST, inside: bool = True) -> Iterator[str]:
    """Names that a statement binds, `inside` of functions and classes, too."""
    match made:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield made.name
            if not inside:
                return
        case ast.arg():
            yield made.arg
        case ast.Import() | ast.ImportFrom():
            yield from (it.asname or it.name.partition(".")[0] for it in made.names)
        case ast.Name(ctx=ast.Store()):
            yield made.id
    for child in ast.iter_child_nodes(made):
        yield from _bindings(child, inside)


def _names(made: ast.AST) -> Iterator[str]:
    """Names that a statement looks at."""
    for node in ast.walk(made):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id


class _Plain(ast.NodeTransformer):
    """A statement without annotations and documentation, where what has a name is called by its turn."""

    def __init__(self, code: Code, module: str, made: ast.stmt, turns: dict[tuple[str, str], str]) -> None:
        self._code, self._module, self._turns = code, module, turns
        #: What is bound inside of it, and not by it.
        outside = set(_bindings(made, inside=False))
        names = dict.fromkeys(it for it in _bindings(made) if it not in outside)
        self._inside = {name: f"inside {turn}" for turn, name in enumerate(names)}

    def _called(self, name: str) -> str:
        if name in self._inside:
            return self._inside[name]
        module, name, made = self._code.defined(self._module, name)
        if made is None:
            # A builtin, or something of another package.
            return name if module == self._module else f"{module} {name}"
        return self._turns.setdefault((module, name), f"outside {len(self._turns)}")

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self._called(node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        # `tl.constexpr` is no annotation for readers alone, but a constant changes no byte.
        node.arg, node.annotation = self._called(node.arg), None
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        # Arguments by name are called by their place in the function: `store(slot=1)`, `kernel[grid](slot=1)`.
        function = node.func.value if isinstance(node.func, ast.Subscript) else node.func
        if isinstance(function, ast.Name) and function.id not in self._inside:
            made = self._code.defined(self._module, function.id)[2]
            if isinstance(made, ast.FunctionDef):
                names = [it.arg for it in (*made.args.posonlyargs, *made.args.args, *made.args.kwonlyargs)]
                for keyword in node.keywords:
                    if keyword.arg in names:
                        keyword.arg = f"argument {names.index(keyword.arg)}"
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name, node.returns = self._called(node.name), None
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        made = ast.Assign([node.target], node.value or ast.Constant(None))
        return self.generic_visit(made)
