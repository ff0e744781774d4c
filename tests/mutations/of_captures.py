"""The list, of what Dynamo captures of a forward, and of what it must not."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_INNER = "tests/dist/test_inner_gradients.py"
_WINDOW = ("tests/dist/test_parameters_in_forward.py", "-k", "parametrization")

OF_CAPTURES = (
    Mutation(
        "the gradient of one read of several is taken for the parameter's",
        "graphshard/graph/inner_gradients.py",
        "(len(reads[read.args]) > 1 or {*asked.users} == {node})",
        "{*asked.users} == {node}",
        (_INNER, "-k", "one_read_of_several"),
    ),
    Mutation(
        "backward in forward is a part of the graph",
        "graphshard/runtime/backend.py",
        "if any(id(inputs[at]) in shards for at in asked_of_inputs(gm)):",
        "if False:",
        (_INNER, "-k", "backward_in_forward"),
    ),
    Mutation(
        "a parameter that is out of its module is not noticed while it is not gathered",
        "graphshard/state/shards.py",
        "return parameter is not None and (",
        "return (",
        _WINDOW,
    ),
    Mutation(
        "code is captured while a parametrization of forward's own is there",
        "graphshard/runtime/backend.py",
        "(is_entry_point(traced_code()) or not shards.some_taken_out())",
        "True",
        _WINDOW,
    ),
    Mutation(
        "what a pass takes before it leaves anything was not there",
        "graphshard/planner/regions.py",
        "before = -min(0, *gone)",
        "before = max(0, -sum(taken) - sum(left))",
        ("tests/graph/test_pass_plan.py", "-k", "recomputes"),
    ),
    Mutation(
        "a state dict that is assigned unties weights",
        "graphshard/state/shards.py",
        "if param.flat_shard is not flat and found is not None:",
        "if False:",
        ("tests/dist/test_shared_parameters.py", "-k", "assigned"),
    ),
)
