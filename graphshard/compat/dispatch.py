"""What is private of torch about modes that see each operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch._functorch._aot_autograd import runtime_wrappers
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily

# The mode in which AOTAutograd runs a graph for the first time, to see what custom operators return;
# None: this torch has no such check.
_ALIAS_CHECK: type | None = getattr(runtime_wrappers, "_AnalyzeCustomOpInputOutputMode", None)
_NAMESPACES = ("aten", "prim", "prims", "c10d", "_c10d_functional", "fsdp", "graphshard")


class _Seen(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, look: Callable[[Any], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._look(func)
        return func(*args, **(kwargs or {}))


def each_operator(look: Callable[[Any], object]) -> AbstractContextManager[Any]:
    """Inside, `look` is shown every operator before it runs, those that others are made of and those of autograd, too;
    it may raise.
    """
    return _Seen(look)


def without_alias_check(run: Callable[[list[Any]], Sequence[Any]], gm: GraphModule) -> Callable[..., Sequence[Any]]:
    """`run`, the code of `gm`, which AOTAutograd's check of what users' operators return sees where `gm` has some: the
    check calls Python for each operator.
    """
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    # One that writes its arguments is an argument itself, of `auto_functionalized`.
    named = (value for graph in graphs for node in graph.nodes for value in (node.target, *node.args))
    if any(isinstance(value, OpOverload) and value.namespace not in _NAMESPACES for value in named):
        return run

    def run_unseen(args: list[Any]) -> Sequence[Any]:
        if _ALIAS_CHECK is None or type(_get_current_dispatch_mode()) is not _ALIAS_CHECK:
            return run(args)
        with _pop_mode_temporarily():
            return run(args)

    return run_unseen
