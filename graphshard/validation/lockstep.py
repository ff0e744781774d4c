"""Runs a graph for all ranks of a world, node by node: what is the same on several ranks is computed once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from graphshard.compat.dispatch import each_operator
from graphshard.compat.tensors import is_torch_operator, no_fake_mode
from graphshard.graph.block_calls import BLOCK, BLOCK_BACKWARD, BLOCK_SAVING, PASS_ON, body_of, call_block
from graphshard.graph.ir import WAIT, is_call, output_args, spec_of
from graphshard.graph.markers import REDUCE_GRAD, UNSHARD
from graphshard.graph.user_comms import ALL_REDUCE_HOOK
from graphshard.validation.collectives import OWN, InFlight
from graphshard.validation.markers import Reductions, gathered
from graphshard.validation.unchecked import Unchecked

Values = list[Any]
_COMMUNICATE = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem", "fsdp")
_KNOWN = ("aten", "prims", "prim", "inductor", "rngprims", "quantized", "higher_order", "graphshard")
_OF_MARKERS = ("unshard", "reduce_grad", "custom_all_gather", "custom_reduce_scatter", "all_reduce_hook")


class NodeFailed(Exception):
    """A node could not be run.

    Attributes:
        node: which.
    """

    def __init__(self, node: Node, error: Exception) -> None:
        said = str(error).strip().splitlines()
        super().__init__(f"%{node.name} raises {type(error).__name__}: {said[0] if said else ''}")
        self.node = node


def _refuse_communication(called: Any) -> None:
    space = getattr(called, "namespace", "")
    if space in _COMMUNICATE or (space == "graphshard" and str(called).split(".")[1] in _OF_MARKERS):
        raise Unchecked(f"it communicates by {called}, inside what is called as a whole")
    if space and space not in _KNOWN:
        raise Unchecked(f"it calls {called}, which is not torch's own and may do anything")


@contextmanager
def alone() -> Iterator[None]:
    """A world of its own: real tensors, random numbers from seed 0, given back behind, and no communication."""
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with (
        no_fake_mode(),
        torch.random.fork_rng(cuda),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        each_operator(_refuse_communication),
    ):
        torch.manual_seed(0)
        yield


class LockStep:
    """One graph, run once.

    Args:
        reductions: how gradients are reduced, with the world.
        gather: gathers a parameter; None: as its marker says.
        blocks: what calls of blocks stand for in a captured graph, by name.
        seen: is told the values of each node; None: nobody is.
    """

    def __init__(
        self,
        reductions: Reductions,
        gather: Callable[[Node, Values, Values | None], Values] | None = None,
        blocks: Mapping[str, GraphModule] | None = None,
        seen: Callable[[Node, Values], None] | None = None,
    ) -> None:
        self._reductions, self._blocks, self._seen = reductions, blocks or {}, seen
        self._gather = gather or self._gathered
        self._ranks = range(reductions.world.size)
        self._forwards: dict[str, list[Values]] = {}  # of blocks, what goes in and comes out

    def run(self, graph: Graph, inputs: list[Values]) -> list[Values]:
        """The results of a graph, each on every rank.

        Args:
            graph: whose attributes are those of its module.
            inputs: of its placeholders, each of every rank.

        Raises:
            Unchecked: it has what cannot be run in this process alone.
            NodeFailed: a node raises something.
        """
        values, given, last = dict[Node, Values](), iter(inputs), _last_uses(graph)
        for node in graph.nodes:
            if node.op == "output":
                continue
            if node.op == "placeholder":
                values[node] = next(given)
            else:
                try:
                    values[node] = self._values(graph, node, values)
                except (Unchecked, NodeFailed):
                    raise
                except Exception as error:
                    raise NodeFailed(node, error) from error
            if self._seen is not None:
                self._seen(node, values[node])
            for source in last.get(node, ()):
                del values[source]
        return [values[out] if isinstance(out, Node) else [out] * len(self._ranks) for out in output_args(graph)]

    def _values(self, graph: Graph, node: Node, values: dict[Node, Values]) -> Values:
        if node.op == "get_attr":
            found: Any = graph.owning_module
            for name in str(node.target).split("."):
                found = getattr(found, name)
            return [found] * len(self._ranks)
        target = node.target
        if is_call(node, UNSHARD):
            shards, *wires = (values[source] for source in node.args if isinstance(source, Node))
            return self._gather(node, shards, wires[0] if wires else None)
        if is_call(node, REDUCE_GRAD):
            return self._reductions.reduced(node, *(values[cast(Node, source)] for source in node.args[:2]))
        if is_call(node, WAIT):
            launched = values[node.all_input_nodes[0]]
            return launched[0].arrived() if isinstance(launched[0], InFlight) else launched
        if target in OWN:
            args: list[Any] = [self._of_rank(node.args, values, rank) for rank in self._ranks]
            return [InFlight(node, [given[0] for given in args], args, self._reductions.world)] * len(self._ranks)
        if target in (ALL_REDUCE_HOOK, PASS_ON):  # what users' hooks do is left out, here as where they are asked for
            return values[node.all_input_nodes[0]]
        if target in (BLOCK, BLOCK_SAVING, BLOCK_BACKWARD) or target is call_block:
            return self._block(node, values)
        if target is torch.ops.higher_order.tag_activation_checkpoint:  # it computes the same once more, in backward
            part, *rest = self._each(node.args, values)
            return _by_rank(self._inner(part[0], rest))
        for source in node.all_input_nodes:
            if any(isinstance(value, InFlight) for value in values[source]) and target is not operator.getitem:
                raise RuntimeError(f"%{source.name} is read before it is awaited")
        return self._alike(node, values, self._function(graph, node, values))

    def _each(self, args: Sequence[Any], values: dict[Node, Values]) -> list[Values]:
        return [values[one] if isinstance(one, Node) else [one] * len(self._ranks) for one in args]

    def _of_rank(self, args: Any, values: dict[Node, Values], rank: int) -> Any:
        return map_arg(args, lambda one: values[one][rank])

    def _gathered(self, node: Node, shards: Values, wires: Values | None) -> Values:
        return cast(Values, gathered(wires or shards, spec_of(node), self._reductions.world))

    def _function(self, graph: Graph, node: Node, values: dict[Node, Values]) -> Callable[..., Any]:
        if node.op == "call_method":
            return lambda one, *args, **kwargs: getattr(one, str(node.target))(*args, **kwargs)
        if node.op == "call_module":
            module: Any = graph.owning_module
            found: Callable[..., Any] = module.get_submodule(str(node.target))
            return found
        function: Any = node.target
        namespace = getattr(function, "namespace", "")
        module_name = str(getattr(function, "__module__", ""))
        if namespace in _COMMUNICATE or module_name.startswith("torch.distributed"):
            raise Unchecked(f"%{node.name} calls {function}, which communicates in a way of its own")
        return cast(Callable[..., Any], function)

    def _alike(self, node: Node, values: dict[Node, Values], function: Callable[..., Any]) -> Values:
        """Calls a function once for ranks that bring the same arguments."""
        sources = node.all_input_nodes
        keys = [tuple(id(values[source][rank]) for source in sources) for rank in self._ranks]
        if len(set(keys)) > 1 and _writes(node):
            self._check_written(node, values, keys)
        known: dict[tuple[int, ...], Any] = {}
        for rank, key in enumerate(keys):
            if key not in known:
                args, kwargs = self._of_rank((node.args, node.kwargs), values, rank)
                known[key] = function(*args, **kwargs)
        return [known[key] for key in keys]

    def _check_written(self, node: Node, values: dict[Node, Values], keys: list[tuple[int, ...]]) -> None:
        written = {id(value) for value in values[node.all_input_nodes[0]] if isinstance(value, Tensor)}
        if written and len(written) < len(set(keys)):
            raise Unchecked(f"%{node.name} writes other values on ranks that share a tensor here")

    def _block(self, node: Node, values: dict[Node, Values]) -> Values:
        args: Any = node.args
        if node.target is call_block:
            name, given = args[0], [values[one] for one in args[1:]]
            return _by_rank(self._inner(self._blocks[name.partition("#")[0]], given))
        given, name = [values[one] for one in args[0]], args[1]
        body = body_of(name)
        if not is_call(node, BLOCK_BACKWARD):
            found = self._inner(body.forward, given)
            self._forwards[name] = [*given, *found]
            return _by_rank(found)
        assert body.backward is not None, name
        if len(given) < len(body.backward.graph.find_nodes(op="placeholder")):  # nothing hands it what is saved yet
            given = [*(self._forwards[name][place] for place in body.saved), *given]
        grads = zip(self._inner(body.backward, given), body.grads, strict=True)
        return _by_rank([one for one, like in grads if like is not None])

    def _inner(self, part: GraphModule, given: list[Values]) -> list[Values]:
        return LockStep(self._reductions, self._gather, self._blocks).run(part.graph, given)


def _by_rank(results: list[Values]) -> Values:
    return list(zip(*results, strict=True))


def _writes(node: Node) -> bool:
    if is_torch_operator(node.target):
        return bool(node.target._schema.is_mutable)  # noqa: SLF001
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in ("setitem", "iadd", "imul", "isub")


def _last_uses(graph: Graph) -> dict[Node, list[Node]]:
    """By node, what no node behind it reads."""
    found, seen = dict[Node, list[Node]](), set[Node]()
    for node in reversed(graph.nodes):
        if node.op == "placeholder":
            continue
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                if node.op != "output" and source.op != "placeholder":
                    found.setdefault(node, []).append(source)
    return found
