"""Puts the nodes of the block that Dynamo traced in the place of each of its twins, so that a captured graph is what it
had been if Dynamo had traced them all: see `graph.twin_calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from graphshard.capture.twins import LEAST_TWINS, Twins
from graphshard.compat.dynamo import add_input, checkpoint_graph, copy_captured, is_random
from graphshard.compat.inductor import module_like
from graphshard.compat.running_trace import guarded_names, has_met, reads_identities, trace_again
from graphshard.compat.tensors import is_known, mesh_of
from graphshard.errors import ModelDeleted, TwinsMoved
from graphshard.graph.equal_blocks import described, kind_of
from graphshard.graph.ir import is_call
from graphshard.graph.twin_calls import ASK, END, OTHER, TWIN, group_of, may_have_twins
from graphshard.reporting.report import Report


class Arguments:
    """Makes arguments of a graph without calls of twins of those that Dynamo brings.

    Args:
        order: where each is in Dynamo's arguments with `places` behind them.
        places: of what Dynamo does not bring, among tensors of `twins`.
        twins: blocks of the model.

    Raises:
        TwinsMoved: where a tensor of a twin is another argument too. Then no blocks are alike any more.
    """

    def __init__(self, order: Sequence[int], places: Sequence[tuple[str, int]], twins: Twins) -> None:
        self._order = order
        self._places = places
        self._twins = twins

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        both = [*args, *self._twins.tensors_at(self._places)]
        tensors = [id(value) for value in both if isinstance(value, Tensor)]
        if len(set(tensors)) < len(tensors):  # Dynamo guards it, but for what twins have
            self._twins.refuse("a tensor of one of them is found in another place too, since they were captured")
            raise TwinsMoved
        return [both[at] for at in self._order]


@dataclass(frozen=True)
class Expanded:
    """A captured graph without calls of twins.

    Attributes:
        module: takes what Dynamo's graph takes, and what twins read.
        inputs: its example inputs.
        arguments: makes its arguments.
        twins: how many calls there were.
    """

    module: GraphModule
    inputs: Sequence[Any]
    arguments: Arguments
    twins: int


def with_arguments(run: Callable[..., Any], arguments: Callable[[], Arguments | None] | None) -> Callable[..., Any]:
    """Runs a graph without calls of twins on Dynamo's arguments. None: it is Dynamo's own.

    Args:
        run: the graph.
        arguments: is asked for what makes its arguments, which lives as long as the model.
    """
    if arguments is None:
        return run

    def run_with(*args: Any) -> Any:
        if (made := arguments()) is None:
            raise ModelDeleted("forward")
        return run(*made(args))

    return run_with


def without_twins(
    gm: GraphModule, inputs: Sequence[Any], twins: Twins, report: Report, broken: bool = False
) -> Expanded | None:
    """A captured graph without calls of twins and all that blocks asked. Where the trace of an exemplar cannot stand
    for its twins, Dynamo traces once more.

    Args:
        gm: the graph; where nothing is returned, it has none, by now.
        inputs: its example inputs.
        twins: blocks of its model.
        report: says how many twins there were.
        broken: whether the graph ends where Dynamo could not go on.
    """
    if not twins.blocks:
        return None
    expanded = None
    try:
        calls = [node for scope in _scopes(gm) for node in scope.graph.nodes if is_call(node, ASK)]
        has_twins = any(is_call(node, TWIN) for scope in _scopes(gm) for node in scope.graph.nodes)
        if broken and not has_twins and any(not _has_other(node) for node in calls):
            raise _NotAlike("graph breaks between them")  # what is traced behind would differ for each block
        if not has_twins:
            _say_why(calls, report)
        else:
            if reads_identities(twins.names()):
                raise _NotAlike("code looks at which of them is which, as by id(self)")
            if twins.learn_read(guarded_names()):
                raise _NotAlike
            expanded = _Expansion(gm, inputs, twins).run()
            report.twins += expanded.twins
    except _NotAlike as why:
        if str(why):
            twins.refuse(str(why))
        trace_again()
    _drop_questions(gm if expanded is None else expanded.module)
    return expanded


def _has_other(ask: Node) -> bool:
    return OTHER in str(ask.args[3])


def _say_why(asks: Sequence[Node], report: Report) -> None:
    """Says why none of the blocks that ask is another's twin, if enough of them are alike."""
    if any(may_have_twins(ask.meta["example_value"]) for ask in asks):
        return  # but for their number
    alike: dict[str, dict[object, bool]] = {}
    for ask in asks:
        alike.setdefault(group_of(str(ask.args[2])), {})[ask.args[2]] = _has_other(ask)
    many = [blocks for blocks in alike.values() if len(blocks) >= LEAST_TWINS]
    if any(any(blocks.values()) for blocks in many):
        report.note_once(
            "blocks are captured one by one: they are called with more than tensors, None, ints, texts, flags and "
            "tuples of these, such as a cache: in transformers, want use_cache=False"
        )
    elif many:
        report.note_once(
            "blocks are captured one by one: each is called otherwise, they return more than tensors and None, or the "
            "code around them changes what they may read"
        )


class _NotAlike(Exception):
    """A trace of one block cannot stand for another. Its text says why, unless that is known now."""


def _drop_questions(gm: GraphModule) -> None:
    for inner in gm.modules():
        if isinstance(inner, GraphModule):
            said = [node for node in inner.graph.nodes if is_call(node, ASK) or is_call(node, END)]
            for node in said:
                inner.graph.erase_node(node)
            if said:
                inner.recompile()


class _Scope:
    """The captured graph, or that of a checkpoint in it.

    Args:
        module: that holds the graph.
        call: the node of the captured graph that runs it; None: it is the captured graph.
    """

    def __init__(self, module: GraphModule, call: Node | None = None) -> None:
        self.module = module
        self.graph: Graph = module.graph
        self.call = call
        self._inside: dict[Node, Node] = {}  # by the node of the captured graph
        self._captured: dict[Node, Node] = {}
        if call is not None:
            for placeholder, operand in zip(self.graph.find_nodes(op="placeholder"), call.args[1:], strict=True):
                if isinstance(operand, Node):
                    self._note(placeholder, operand)

    def _note(self, placeholder: Node, operand: Node) -> None:
        self._inside.setdefault(operand, placeholder)
        self._captured[placeholder] = operand

    def captured(self, node: Node) -> Node:
        """The node of the captured graph that a node of this one is."""
        return self._captured.get(node, node)

    def inside(self, node: Node) -> Node:
        """The node of this graph that a node of the captured one is here."""
        if self.call is None:
            return node
        if node not in self._inside:
            last = self.graph.find_nodes(op="placeholder")[-1]
            with self.graph.inserting_after(last):
                placeholder = self.graph.placeholder(f"{node.name}_inside")
            placeholder.meta = {**last.meta, "example_value": node.meta["example_value"]}
            self.call.args = (*self.call.args, node)
            self._note(placeholder, node)
        return self._inside[node]


def _scopes(gm: GraphModule) -> Iterator[_Scope]:
    """The captured graph, and those of its checkpoints in their order."""
    yield _Scope(gm)
    for node in gm.graph.nodes:
        if (inner := checkpoint_graph(gm, node)) is not None:
            yield _Scope(inner, node)


@dataclass(frozen=True)
class _Body:
    """What the trace of an exemplar is: where, its mark, what goes in, its nodes, what comes out."""

    scope: _Scope
    mark: str
    inputs: Sequence[Node]
    nodes: Sequence[Node]
    outputs: Sequence[Node]


class _Expansion:
    def __init__(self, gm: GraphModule, inputs: Sequence[Any], blocks: Twins) -> None:
        gm = self._gm = module_like(gm, copy_captured(gm))  # Dynamo reads the inputs of its own
        self._blocks = blocks
        self._inputs = list(inputs)
        self._placeholders: list[Node] = gm.graph.find_nodes(op="placeholder")
        self._mesh_of = {
            node: mesh for node, value in zip(self._placeholders, inputs, strict=True) if (mesh := mesh_of(value))
        }
        self._input_of = {id(value): node for node, value in zip(self._placeholders, inputs, strict=True)}
        self._brought = frozenset(self._input_of)
        self._added: dict[Node, tuple[int, tuple[str, int]]] = {}  # where it is first used, where it is found
        self._bodies: dict[object, _Body] = {}
        self._twins = 0

    def run(self) -> Expanded:
        graph = self._gm.graph
        position = {node: at for at, node in enumerate(graph.nodes)}
        # As Dynamo orders inputs, by their first uses: slots are numbered so.
        uses = [min((position[user] for user in node.users), default=0) for node in self._placeholders]
        first_uses = [*accumulate(uses, max)]
        scopes = [*_scopes(self._gm)]
        exemplars = {node.args[3] for scope in scopes for node in scope.graph.nodes if is_call(node, TWIN)}
        for scope in scopes:
            self._expand(scope, position, exemplars)
        first_uses += [at for at, _ in self._added.values()]
        order = sorted(range(len(first_uses)), key=lambda at: (first_uses[at], at))
        first = next(node for node in graph.nodes if node.op != "placeholder")
        for at in order:
            first.prepend(self._placeholders[at])
        places = [place for _, place in self._added.values()]
        arguments = Arguments(order, places, self._blocks)
        return Expanded(self._gm, [self._inputs[at] for at in order], arguments, self._twins)

    def _expand(self, scope: _Scope, position: dict[Node, int], exemplars: Set[object]) -> None:
        """`exemplars`: those that have twins."""
        nodes = list(scope.graph.nodes)
        asked: dict[object, int] = {}
        for at, node in enumerate(nodes):
            if is_call(node, ASK):
                asked[node.meta["example_value"].shape[1]] = at
            elif is_call(node, END) and (exemplar := node.args[1]):
                of = nodes[asked[exemplar]].meta["example_value"].shape[2]
                if exemplars.isdisjoint((exemplar, of)):
                    continue
                body = self._bodies[exemplar] = _body(scope, nodes[asked[exemplar] : at + 1])
                if of:
                    self._compare(self._bodies[of], body)
            elif is_call(node, TWIN):
                self._replace(scope, node, position[scope.call or node])
                self._twins += 1

    def _compare(self, body: _Body, witness: _Body) -> None:
        """Sees that a witness does what its exemplar does, with its own tensors in the place of the exemplar's."""
        theirs, mine = (self._blocks.tensors(one.mark) for one in (body, witness))
        pairs: dict[Node | None, Node | None] = {
            self._input_of.get(id(one)): self._input_of.get(id(other)) for one, other in zip(theirs, mine, strict=True)
        }
        pairs |= dict(zip(body.inputs, witness.inputs, strict=True))
        inside = {*witness.inputs, *witness.nodes}

        def expected(read: Node) -> Any:
            captured = read if read in pairs else body.scope.captured(read)
            return pairs.get(captured, self._mesh_of.get(captured, captured))

        def found(read: Node) -> Any:
            captured = read if read in inside else witness.scope.captured(read)
            return self._mesh_of.get(captured, captured)

        same = len(body.nodes) == len(witness.nodes)
        for one, other in zip(body.nodes, witness.nodes, strict=False):
            wanted = map_arg((one.args, one.kwargs), expected)
            same = same and _does_the_same(one, other) and wanted == map_arg((other.args, other.kwargs), found)
            pairs[one] = other
        if not same or [pairs[node] for node in body.outputs] != [*witness.outputs]:
            raise _NotAlike("two that look alike are traced otherwise")

    def _replace(self, scope: _Scope, twin: Node, at: int) -> None:
        """Puts the nodes of its exemplar before a twin, and their outputs in the place of the twin's."""
        _, _, mark, exemplar = twin.args
        body = self._bodies[exemplar]
        copies: dict[Node, Node] = dict(zip(body.inputs, _brought(twin), strict=True))
        pairs = enumerate(zip(self._blocks.tensors(body.mark), self._blocks.tensors(str(mark)), strict=True))
        own = {self._input_of.get(id(theirs)): (theirs, mine, (str(mark), place)) for place, (theirs, mine) in pairs}
        if not own.keys().isdisjoint(map(body.scope.captured, body.inputs)):
            raise _NotAlike("a block is called with what it has")
        alone = self._blocks.held_alone(str(mark), body.mark)
        if not self._is_traced(str(mark)) and (has_met(alone) or not alone.isdisjoint(self._brought)):
            raise _NotAlike("what a block has is read elsewhere too")  # nothing would guard that it stays so

        def copy_of(node: Node) -> Node:
            if node not in copies:
                read = body.scope.captured(node)
                copies[node] = scope.inside(self._input_at(*own[read], read, at) if read in own else read)
            return copies[node]

        with scope.graph.inserting_before(twin):
            for node in body.nodes:
                copies[node] = scope.graph.node_copy(node, copy_of)
                if node.op == "get_attr" and scope is not body.scope:
                    name = f"{node.target}_of_{exemplar}"
                    setattr(scope.module, name, getattr(body.scope.module, str(node.target)))
                    copies[node].target = name
        for item in list(twin.users):
            item.replace_all_uses_with(copy_of(body.outputs[item.args[1]]))  # type: ignore[index]
            scope.graph.erase_node(item)
        scope.graph.erase_node(twin)

    def _input_at(self, theirs: Tensor, mine: Tensor, place: tuple[str, int], read: Node, at: int) -> Node:
        """The input that is for a twin what `read` is for its exemplar."""
        if (node := self._input_of.get(id(mine))) is None:
            with self._gm.graph.inserting_before(self._placeholders[0]):
                node = add_input(self._gm.graph, (read, theirs), mine, f"twin_input_{len(self._added)}")
            self._input_of[id(mine)] = node
            self._placeholders.append(node)
            self._inputs.append(mine)
            self._added[node] = at, place
        return node

    def _is_traced(self, mark: str) -> bool:
        """Whether Dynamo has traced a block, and guards what it reads."""
        return any(body.mark == mark for body in self._bodies.values())


def _body(scope: _Scope, nodes: Sequence[Node]) -> _Body:
    ask, *inner, end = nodes
    inputs = _brought(ask)
    returned: Any = end.args[0]
    outputs = [output for output in returned if output not in inputs]
    if not set(outputs) <= set(inner):
        raise _NotAlike("a block returns what it has not made")
    inside = {*inner, *inputs}
    for node in inner:
        if not is_known(node.meta.get("example_value")):
            raise _NotAlike("sizes depend on data")
        for read in map(scope.captured, (read for read in node.all_input_nodes if read not in inside)):
            if read.op != "placeholder" or is_random(read):
                raise _NotAlike("a block reads what no argument of its call brings")
    return _Body(scope, str(ask.args[2]), inputs, inner, outputs)


def _does_the_same(one: Node, other: Node) -> bool:
    """Whether two nodes do the same with what they read, as far as their targets and results say."""
    a, b = one.target, other.target
    if not (isinstance(a, FunctionType) and isinstance(b, FunctionType)) or a is b:
        return described(one) == described(other)
    # Of a call of a DTensor's method Dynamo makes a function that holds what is no tensor.
    cells = [[cell.cell_contents for cell in target.__closure__ or ()] for target in (a, b)]
    no_tensors = not any(isinstance(value, Tensor) for value in cells[0] + cells[1])
    return a.__code__ is b.__code__ and no_tensors and cells[0] == cells[1] and kind_of(one) == kind_of(other)


def _brought(call: Node) -> list[Node]:
    """What the call of a block brings, of a node that says so."""
    tensors: Any = call.args[0]
    numbers: Any = call.args[1]
    return [*tensors, *(number for number in numbers if isinstance(number, Node))]
