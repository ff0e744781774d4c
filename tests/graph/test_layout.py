"""The house rules that a machine can check: private torch, file names and sizes."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "graphshard"

# The only readers of torch's private state.
READS_PRIVATE_TORCH = ("graphshard/fsdp2/", "graphshard/compat/")
TORCH = {"torch", "functorch"}
# Names with an underscore that are public all the same.
PUBLIC_DESPITE_UNDERSCORE = {
    "torch.ops._c10d_functional": "the namespace in which the functional collectives are registered",
}
MAX_LINES = 400
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}


def sources(*folders: str) -> list[Path]:
    """Python files below folders of the repository; graphshard/passes is reached through its link, once."""
    return [
        Path(directory, name)
        for folder in folders
        for directory, _, names in os.walk(ROOT / folder, followlinks=True)
        for name in sorted(names)
        if name.endswith(".py")
    ]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    """`graphshard/passes/__init__.py` -> `graphshard.passes`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything a file imports, wherever in the file; relative names are resolved."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def test_passes_is_a_link_imported_under_one_name() -> None:
    link = PACKAGE / "passes"
    assert link.is_symlink()
    assert link.readlink() == Path("../passes")
    by_folder_name = [
        f"{shown(path)}:{line}: import {dotted}"
        for path in sources("graphshard", "tests", "bench")
        for line, dotted in imported(path)
        if dotted.split(".")[0] == "passes"
    ]
    assert not by_folder_name, "\n".join(["import graphshard.passes instead:", *by_folder_name])
    assert "passes" not in sys.modules


def private_torch(path: Path) -> Iterator[str]:
    """Every private name of torch that a file imports or reaches through a name it imported, by line."""
    tree = parse(path)
    torch_names: dict[str, str] = {}  # a name bound in this file -> what it stands for
    used: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                if top in TORCH:
                    used.append((node.lineno, alias.name))
                    torch_names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in TORCH:
            for alias in node.names:
                used.append((node.lineno, f"{node.module}.{alias.name}"))
                torch_names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain: list[str] = []
            value: ast.expr = node
            while isinstance(value, ast.Attribute):
                chain.insert(0, value.attr)
                value = value.value
            if isinstance(value, ast.Name) and value.id in torch_names:
                used.append((node.lineno, ".".join([torch_names[value.id], *chain])))
    for line, dotted in sorted(set(used)):
        is_private = any(part.startswith("_") and not part.endswith("__") for part in dotted.split("."))
        is_public = any(f"{dotted}.".startswith(f"{known}.") for known in PUBLIC_DESPITE_UNDERSCORE)
        if is_private and not is_public:
            yield f"{shown(path)}:{line}: {dotted}"


def test_private_torch_stays_in_few_files() -> None:
    found = [
        line
        for path in sources("graphshard")
        if not shown(path).startswith(READS_PRIVATE_TORCH)
        for line in private_torch(path)
    ]
    assert not found, "\n".join([f"private names of torch outside {READS_PRIVATE_TORCH}:", *found])


def test_private_torch_check_sees_each_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    forms = {
        "import torch._dynamo": 1,
        "import torch\ntorch._C": 1,
        "import torch.distributed as dist\ndist._x.y": 2,  # `dist._x` and `dist._x.y`
        "from torch import nn as layers\nlayers._z()": 1,
        "from torch.fx import _symbolic_trace": 1,
        "import torch\ntorch.ops._c10d_functional.wait_tensor.default, torch.__version__": 0,
        "from mine import _private": 0,
    }
    for source, count in forms.items():
        file = tmp_path / "form.py"
        file.write_text(source)
        assert len(list(private_torch(file))) == count, source


def test_files_are_small_and_named_for_what_they_hold() -> None:
    paths = sources("graphshard", "bench", "tests", "docs")
    long = [f"{shown(path)}: {n} lines" for path in paths if (n := len(path.read_text().splitlines())) > MAX_LINES]
    assert not long, f"over {MAX_LINES} lines: {long}"
    vague = [shown(path) for path in paths if {path.stem, path.parent.name} & VAGUE_NAMES]
    assert not vague, f"name the thing the file holds: {vague}"


def test_files_that_the_docs_name_are_there() -> None:
    text = "".join((ROOT / name).read_text() for name in ("docs/architecture.md", "CONTRIBUTING.md"))
    named = set(re.findall(r"`([a-z0-9_]+(?:/[a-z0-9_]+)*\.py)`", text))
    assert len(named) > 40
    missing = [name for name in named if not any((folder / name).is_file() for folder in (PACKAGE, ROOT))]
    assert not missing, f"docs name files that are not there: {sorted(missing)}"
