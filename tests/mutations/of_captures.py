"""The list, of what Dynamo captures of a forward, and of what it must not."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_INNER = "tests/dist/test_inner_gradients.py"
_SENT, _PLANNED = "tests/dist/test_collectives_in_forward.py", "tests/dist/test_auto_plan.py"
_RANDOM = "tests/graph/test_random_calls.py"
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
        "graphshard/state/parameter_watch.py",
        "if param.flat_shard is not flat and found is not None:",
        "if False:",
        ("tests/dist/test_shared_parameters.py", "-k", "assigned"),
    ),
    Mutation(
        "the gradient of what a forward reduces in place is lost",
        "passes/detach_collectives.py",
        "(_data(written), source)",
        "(written, source)",
        (_SENT, "-k", "reduce_in_place"),
    ),
    Mutation(
        "each copy of what was sent is taken for c10d's",
        "graphshard/compat/dynamo.py",
        "return frame.startswith(_functional_collectives.__file__)",
        "return True",
        ("tests/graph/test_detach_collectives.py",),
    ),
    Mutation(
        "attention without dropout takes up a state of random numbers",
        "graphshard/compat/partitioner.py",
        "node.target = _not_random(node.target)",
        "pass",
        (_RANDOM,),
    ),
    Mutation(
        "a generator is equal to itself alone",
        "graphshard/graph/stretches.py",
        "value.device if isinstance(value, torch.Generator) else value",
        "value",
        (_RANDOM,),
    ),
    Mutation(
        "modules have gathered parameters of what a plan keeps for backward",
        "graphshard/state/holdings.py",
        "                    shard.hide()",
        "                    pass",
        (_PLANNED, "-k", "modules_have_shards"),
    ),
    Mutation(
        "what stays gathered for backward stays hidden from who gathers it by hand",
        "graphshard/state/unit_gathers.py",
        "                shard.show()",
        "                pass",
        (_PLANNED, "-k", "modules_have_shards"),
    ),
    Mutation(
        "a backward's contract does not know what stays of frozen units",
        "graphshard/runtime/program_selection.py",
        'state_text(binding, states, graph.direction == "backward", forward)',
        'state_text(binding, states, graph.direction == "backward", Binding(()))',
        (_PLANNED, "-k", "is_frozen_for"),
    ),
    Mutation(
        "blocks of copies are made anew for each address",
        "graphshard/kernels/launch.py",
        "self.blocks.get((*where, layout),",
        "self.blocks.get((*where, addresses, layout),",
        ("tests/graph/test_kernels.py", "-k", "interpreted"),
    ),
    Mutation(
        "a gradient that is the same whatever comes is reduced in forward",
        "passes/tag_reshard.py",
        "            tag_backward(node)\n",
        "            pass\n",
        ("tests/graph/test_tag_reshard.py", "-k", "what_comes"),
    ),
    Mutation(
        "what a method asks a part to record breaks the first graph",
        "graphshard/compat/recorded_outputs.py",
        "(module in asked and bool(keys))",
        "False",
        ("tests/dist/test_recorded_outputs.py", "-k", "Seeing"),
    ),
    Mutation(
        "outputs that are views are not counted among those that the loss does not use",
        "graphshard/compat/autograd.py",
        "        node, number = node.next_functions[0] if node.next_functions else (None, 0)\n",
        "        break\n",
        ("tests/dist/test_models.py", "-k", "unused_views"),
    ),
    Mutation(
        "what is checked of a number is part of a stretch",
        "graphshard/graph/stretches.py",
        " or checks_number(node):\n        return True  # checks too",
        ":\n        return True  # checks too",
        ("tests/dist/test_control_flow.py", "-k", "checks_breaks_no_graph"),
    ),
    Mutation(
        "a gradient of as many rows as a mask has ends the graph",
        "graphshard/compat/value_sizes.py",
        "replace(settings, allow_dynamic_output_shape_ops=True)",
        "settings",
        ("tests/dist/test_control_flow.py", "-k", "break_no_graph"),
    ),
    Mutation(
        "sizes that depend on values are sizes of a stretch",
        "graphshard/graph/stretches.py",
        ".union(_depending_on_values(graph))",
        "",
        ("tests/graph/test_stretches.py", "-k", "depend_on_values"),
    ),
    Mutation(
        "behind a number that is read off a value no block is found",
        "graphshard/graph/equal_blocks.py",
        "_NUMBERS = (bool, float, torch.SymBool, torch.SymFloat)",
        "_NUMBERS = ()",
        ("tests/dist/test_control_flow.py", "-k", "checks_breaks_no_graph"),
    ),
    Mutation(
        "seams of what recurs are not those of the blocks that have it",
        "graphshard/graph/recurring.py",
        "            blocks.add_seams(at, [*seams, length])",
        "            pass",
        ("tests/graph/test_outline_blocks.py", "-k", "recurs_elsewhere"),
    ),
    Mutation(
        "what recurs may end where it is read otherwise",
        "graphshard/graph/recurrences.py",
        "                        and agreeing(first, more, length) == length\n",
        "",
        ("tests/graph/test_recurrences.py",),
    ),
    Mutation(
        "all units of what recurs are gathered at once",
        "graphshard/graph/recurring.py",
        "for at in borders if at in own",
        "for at in () if at in own",
        ("tests/graph/test_outline_blocks.py", "-k", "each_unit_begins"),
    ),
)
