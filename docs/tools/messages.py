"""What graphshard may say to a user, read off its sources: errors, and lines of the report, log and warnings.

A message is the literal text of what is raised or said, `…` in the place of each value. Texts are followed through
local names, conditionals, sums of texts and functions of the package that return them. What cannot be followed is an
`Unread`, so that nothing is left out unseen.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VALUE = "…"
# Functions that say their first argument to the user, and how.
SAYS = {
    "say_once": "report",
    "note_once": "report",
    "say": "report",
    "_say": "report",
    "note": "report",
    "add_note": "note",
}
SAYS_OF = {("log", "warning"): "log", ("warnings", "warn"): "warning", ("parser", "error"): "usage"}
SAYS_OF |= {("stderr", "write"): "stderr", ("notes", "append"): "explain"}
# Their texts reach the user inside those of others.
TOLD = {
    "agree/agreement.py": ("_told", "_difference"),
    "agree/rank_store.py": ("_located",),
    "faults/sentence.py": ("sentence", "_phrase", "_difference"),
    "plan_file/replay.py": ("_check_known", "replay", "_decision"),
    "runtime/region_orders.py": ("decide",),
}
# What they print is no message about something that is wrong.
PRINTS = ("demo/", "explain/")
_BUILTIN = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)}
_MOST_FORMS = 16
_MOST_DEPTH = 6
_LEAST_LETTERS = 8


@dataclass(frozen=True, order=True)
class Message:
    """One thing that may be said.

    Attributes:
        file: below the package.
        scope: dotted name of the function or class in it.
        how: the exception's class, ``"report"``, ``"log"``, ``"warning"``, ``"usage"`` or ``"stderr"``.
        text: its words.
    """

    file: str
    scope: str
    how: str
    text: str


@dataclass(frozen=True, order=True)
class Unread:
    """Something raised or said whose words are not found from there.

    Attributes:
        file: below the package.
        scope: dotted name of the function or class in it.
        code: of what is raised or said.
    """

    file: str
    scope: str
    code: str


@dataclass
class _Scope:
    """A function, class or module, with what is assigned in it."""

    name: str
    node: ast.AST
    outer: _Scope | None
    values: dict[str, list[ast.expr]] = field(default_factory=dict)


class _Source:
    """One file: its scopes and functions."""

    def __init__(self, file: str, tree: ast.Module) -> None:
        self.file = file
        self.module = _Scope("", tree, None)
        self.scope_of: dict[ast.AST, _Scope] = {}
        self.functions: dict[str, ast.FunctionDef] = {}
        self._visit(tree, self.module)

    def _visit(self, node: ast.AST, scope: _Scope) -> None:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = _Scope(f"{scope.name}.{child.name}".lstrip("."), child, scope)
                if isinstance(child, ast.FunctionDef):
                    self.functions.setdefault(child.name, child)
            elif isinstance(child, ast.Assign):
                for target in child.targets:
                    self._assign(target, child.value, scope)
            elif isinstance(child, (ast.AnnAssign, ast.NamedExpr)) and child.value is not None:
                self._assign(child.target, child.value, scope)
            self.scope_of[child] = inner
            self._visit(child, inner)

    def _assign(self, target: ast.expr, value: ast.expr, scope: _Scope) -> None:
        if isinstance(target, ast.Name):
            scope.values.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, its in zip(target.elts, value.elts, strict=True):
                self._assign(one, its, scope)


class Sources:
    """The package.

    Args:
        folder: of its files.
    """

    def __init__(self, folder: Path = ROOT / "graphshard") -> None:
        self._files: list[_Source] = []
        self._errors = set(_BUILTIN)
        for directory, folders, names in os.walk(folder, followlinks=True):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            for name in sorted(names):
                if name.endswith(".py"):
                    path = Path(directory, name)
                    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
                    self._files.append(_Source(path.relative_to(folder).as_posix(), tree))
        for _ in range(3):  # classes of errors whose bases are such
            self._errors |= {
                node.name
                for source in self._files
                for node in source.scope_of
                if isinstance(node, ast.ClassDef) and any(_last(base) in self._errors for base in node.bases)
            }

    def said(self) -> Iterator[Message | Unread]:
        """All that may be said, in the order of files; the same message of one function once."""
        for source in self._files:
            seen: set[Message | Unread] = set()
            for node, scope in source.scope_of.items():
                for how, expression in [*self._sinks(node, scope), *_told(source.file, node, scope)]:
                    if source.file.startswith(PRINTS) and how in ("report", "explain"):
                        continue
                    for one in self._read(source, scope, how, expression):
                        if one not in seen:
                            seen.add(one)
                            yield one

    def _read(self, source: _Source, scope: _Scope, how: str, expression: ast.expr) -> Iterator[Message | Unread]:
        within = scope if how != "part" else _Scope("", expression, None)  # names in parts are values
        texts = [" ".join(text.split()) for text in self._texts(expression, source, within)]
        told = [text for text in dict.fromkeys(texts) if sum(map(str.isalpha, text)) >= _LEAST_LETTERS]
        yield from (Message(source.file, scope.name, how, text) for text in told)
        if not told and how != "part":
            yield Unread(source.file, scope.name, ast.unparse(expression))

    def _sinks(self, node: ast.AST, scope: _Scope) -> Iterator[tuple[str, ast.expr]]:
        """(how, the words) of what a node raises or says."""
        if isinstance(node, ast.Raise) and node.exc is not None and not self._is_error_call(node.exc):
            yield "raised", node.exc
        if not isinstance(node, ast.Call):
            return
        if self._is_error_call(node):
            words = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
            if words:
                yield _last(node.func), words[1] if _last(node.func) == "VerifyError" else words[0]
            return
        if not node.args:
            return
        function = node.func
        if isinstance(function, ast.Attribute):
            name, owner = function.attr, _last(function.value)
            if name == "__init__" and isinstance(function.value, ast.Call) and _last(function.value.func) == "super":
                owner_class = scope.outer.node if scope.outer is not None else None
                if isinstance(owner_class, ast.ClassDef) and owner_class.name in self._errors:
                    yield owner_class.name, node.args[0]
            elif (owner, name) in SAYS_OF:
                yield SAYS_OF[owner, name], node.args[0]
            elif name in SAYS:
                yield SAYS[name], node.args[0]
        elif isinstance(function, ast.Name) and function.id in ("say", "warn_once"):
            yield SAYS.get(function.id, "warning"), node.args[0]

    def _is_error_call(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and _last(node.func) in self._errors

    def _texts(self, node: ast.expr, source: _Source, scope: _Scope, depth: int = 0) -> list[str]:
        """Forms that a text may have; `[VALUE]`: it is only known when it is said."""
        if depth > _MOST_DEPTH:
            return [VALUE]
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=parts):
                forms = [self._part(part, source, scope, depth) for part in parts]
                return ["".join(form) for form in itertools.islice(itertools.product(*forms), _MOST_FORMS)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                pairs = itertools.product(
                    self._texts(left, source, scope, depth), self._texts(right, source, scope, depth)
                )
                return ["".join(pair) for pair in itertools.islice(pairs, _MOST_FORMS)]
            case ast.IfExp(body=body, orelse=orelse):
                return [*self._texts(body, source, scope, depth), *self._texts(orelse, source, scope, depth)]
            case ast.BoolOp(values=values):
                return [text for value in values for text in self._texts(value, source, scope, depth)]
            case ast.Name(id=name):
                found = _assigned(name, scope)
                return [text for value in found for text in self._texts(value, source, scope, depth + 1)] or [VALUE]
            case ast.Call(func=function, args=args) if self._is_error_call(node) and args:
                return self._texts(args[0], source, scope, depth + 1)
            case ast.Call(func=function):
                return self._returned(_last(function), source, depth)
        return [VALUE]

    def _part(self, part: ast.expr, source: _Source, scope: _Scope, depth: int) -> list[str]:
        """Forms of one part of an f-string; names that stand for words are put in, other values not."""
        if isinstance(part, ast.Constant):
            return [str(part.value)]
        if isinstance(part, ast.FormattedValue) and isinstance(part.value, (ast.Name, ast.IfExp)):
            name = part.value.id if isinstance(part.value, ast.Name) else ""
            assigned = _assigned(name, scope) if name else []
            if not any(isinstance(one, ast.Call) for one in assigned):
                return list(dict.fromkeys(self._texts(part.value, source, scope, depth + 1)))
        return [VALUE]

    def _returned(self, name: str, source: _Source, depth: int) -> list[str]:
        """Texts that a function of this file, or the one of that name in another, returns."""
        owners = [source] if name in source.functions else [one for one in self._files if name in one.functions]
        if len(owners) != 1:
            return [VALUE]
        function = owners[0].functions[name]
        inside = owners[0].scope_of[function]
        returned = [
            node.value
            for node in ast.walk(function)
            if isinstance(node, (ast.Return, ast.Yield)) and node.value is not None
        ]
        texts = [text for value in returned for text in self._texts(value, owners[0], inside, depth + 1)]
        return texts or [VALUE]


def _told(file: str, node: ast.AST, scope: _Scope) -> Iterator[tuple[str, ast.expr]]:
    """Texts in the functions of `TOLD`."""
    if scope.name.rpartition(".")[2] in TOLD.get(file, ()) and isinstance(node, ast.JoinedStr):
        yield "part", node


def _assigned(name: str, scope: _Scope | None) -> list[ast.expr]:
    while scope is not None:
        if name in scope.values:
            return scope.values[name]
        scope = scope.outer
    return []


def _last(node: ast.expr) -> str:
    """`a.b.c` -> `c`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
