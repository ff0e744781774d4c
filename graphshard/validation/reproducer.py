"""What is written where a pass fails: both graphs as code, as far as the first result that differs needs them, the
inputs of all ranks, and a script that runs by itself.

    python FOLDER/run.py    # exit status 1 where results still differ
"""

from __future__ import annotations

import itertools
import math
import operator
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph, Node

from graphshard import env
from graphshard.compat.tensors import is_torch_operator
from graphshard.files import make_private, write_private
from graphshard.graph.ir import output_args, output_node
from graphshard.graph.printer import format_graph

_RUN = '''"""Runs before.py and after.py on inputs.pt and compares; needs torch and graphshard."""
import sys
from pathlib import Path

from graphshard.validation.replay import replay

sys.exit(replay(Path(__file__).parent))
'''
_HEAD = """import operator
import torch
from torch.fx import Graph
from graphshard.fsdp2.settings import UnitSettings
from graphshard.graph.ir import Collective, Flags, Member, ParamRef, PassContext
from graphshard.graph.sameness import Bitwise, Regrouped

"""
_numbers = itertools.count()


class _NoCode(Exception):
    """What has no text from which Python would make it again."""


def write_reproducer(title: str, step: str, parts: Mapping[str, Any]) -> str:
    """Writes a folder; says where, or why there is none."""
    folder = env.dump_dir() or env.fault_dir()
    if dist.is_initialized():
        folder = folder / f"rank{dist.get_rank()}"
    folder = folder / f"{title}.{step}.{os.getpid()}-{next(_numbers)}"
    try:
        make_private(folder)
        for name in ("before", "after"):
            write_private(folder / f"{name}.ir", format_graph(parts[name]))
        try:
            return f"run {_write_script(folder, parts)}"
        except _NoCode as why:
            return f"{folder} has both graphs, but nothing to run: {why}"
    except OSError as error:
        return f"no reproducer: {error}"


def _write_script(folder: Path, parts: Mapping[str, Any]) -> Path:
    if not parts["want"]:
        raise _NoCode("the second graph does not run")
    result, constants, kept = parts["result"], dict[str, Tensor](), list[dict[str, Any]]()
    texts = {}
    for name, inputs in zip(("before", "after"), parts["inputs"], strict=True):
        graph = parts[name] if result is None else _reduced(parts[name], result)
        texts[name] = _code(graph, parts, constants)
        used = {node.name for node in graph.find_nodes(op="placeholder")}
        kept.append({key: _plain(value) for key, value in inputs.items() if key in used})
    want = parts["want"] if result is None else [parts["want"][result]]
    data = {"before": kept[0], "after": kept[1], "want": [one and _plain(one) for one in want], "constants": constants}
    for name, text in texts.items():
        write_private(folder / f"{name}.py", text)
    (folder / "inputs.pt").touch(mode=0o600)
    torch.save(data, folder / "inputs.pt")
    write_private(script := folder / "run.py", _RUN)
    return script


def _plain(values: list[Any]) -> list[Any]:
    return [value.detach().clone() if isinstance(value, Tensor) else value for value in values]


def _reduced(graph: Graph, result: int) -> Graph:
    """What one result needs of a graph."""
    copy = Graph(owning_module=graph.owning_module)
    copy.output(copy.graph_copy(graph, {}))
    if result < len(results := output_args(copy)):
        output_node(copy).args = ((results[result],),)
    for node in reversed(copy.nodes):
        if not node.users and node.op != "output" and not _matters(node):
            copy.erase_node(node)
    return copy


def _matters(node: Node) -> bool:
    """Whether others may depend on a node that they do not read: it writes, or draws random numbers."""
    schema, tags = getattr(node.target, "_schema", None), getattr(node.target, "tags", ())
    return (schema is not None and schema.is_mutable) or torch.Tag.nondeterministic_seeded in tags


def _code(graph: Graph, parts: Mapping[str, Any], constants: dict[str, Tensor]) -> str:
    ctx = parts["ctx"]
    context = replace(ctx, planner=None, coalesces=None)
    lines = [_HEAD, f"says = {parts['says']!r}", f"sameness = {_source(parts['sameness'])}"]
    lines += [f"reruns_before = {parts['reruns_before']}", f"groups = {dict(parts['world'].groups)!r}"]
    lines += [f"ranks = {parts['world'].size}", f"ctx = {_source(context)}", "", "", "def build(graph: Graph) -> None:"]
    for node in graph.nodes:
        if node.op == "placeholder":
            lines.append(f"    {node.name} = graph.placeholder({node.name!r})")
        elif node.op == "output":
            lines.append(f"    graph.output({_source(tuple(output_args(graph)))})")
        elif node.op == "get_attr":
            owner: Any = graph.owning_module
            value = getattr(owner, str(node.target), None)
            if not isinstance(value, Tensor) or hasattr(value, "fake_mode"):
                raise _NoCode(f"%{node.name} reads {node.target}, which is no tensor")
            constants[str(node.target)] = value.detach()
            lines.append(f"    {node.name} = graph.get_attr({str(node.target)!r})")
        else:
            call = f"graph.call_function({_target(node)}, {_source(tuple(node.args))}, {_source(dict(node.kwargs))})"
            lines.append(f"    {node.name} = {call}")
            lines += [
                f"    {node.name}.meta[{key!r}] = {_source(node.meta[key])}"
                for key in ("collective", "partial")
                if key in node.meta
            ]
    return "\n".join([*lines, ""])


def _target(node: Node) -> str:
    if node.op == "call_function" and is_torch_operator(node.target):
        if node.target.namespace == "graphshard" and "block" in str(node.target):
            raise _NoCode(f"%{node.name} calls a block, which stands for a graph of its own")
        return f"torch.ops.{node.target}"
    name = getattr(node.target, "__name__", "")
    if node.op == "call_function" and getattr(operator, name, None) is node.target:
        return f"operator.{name}"
    raise _NoCode(f"%{node.name} calls {node.target}")


def _source(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_source(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(_source, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
    if isinstance(value, frozenset):
        return f"frozenset({_source(sorted(value))})"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if is_dataclass(value) and not isinstance(value, type):
        given = ", ".join(f"{entry.name}={_source(getattr(value, entry.name))}" for entry in fields(value))
        return f"{type(value).__name__}({given})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.layout, torch.memory_format)):
        return repr(value)
    if isinstance(value, Mapping):
        return _source(dict(value))
    raise _NoCode(f"a graph has an argument {type(value).__name__}")
