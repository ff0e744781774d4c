"""The list, of what stays in memory between programs."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_AROUND = "tests/dist/test_read_memory.py"
_STEPS = "tests/graph/test_memory_of_steps.py"

OF_MEMORY = (
    Mutation(
        "what code around graphs has read stays until backward",
        "graphshard/runtime/read_memory.py",
        "        _empty(handed)\n        for output",
        "        for output",
        (_STEPS, "-k", "Around"),
    ),
    Mutation(
        "what was emptied comes back with other values",
        "graphshard/runtime/read_memory.py",
        "            alias.copy_(gathered)\n",
        "            alias.zero_()\n",
        (_AROUND, "-k", "full_in_backward and Around-once"),
    ),
    Mutation(
        "what is read around graphs alone stays until backward ends",
        "graphshard/runtime/read_memory.py",
        "        if filled.left:\n            return\n",
        "        return\n",
        (_STEPS, "-k", "Recurrent"),
    ),
    Mutation(
        "what is read around graphs stays behind backward",
        "graphshard/runtime/read_memory.py",
        "        ended, self._filled = self._filled, []\n",
        "        ended, self._filled = [], []\n",
        (_STEPS, "-k", "Frozen"),
    ),
    Mutation(
        "the parameter that was registered last is kept",
        "graphshard/state/shards.py",
        "            self._watched = weakref.ref(parameter)\n",
        "            self._watched = lambda: parameter\n",
        (_STEPS, "-k", "Broken"),
    ),
    Mutation(
        "programs of units are lowered again for parameters that have changed",
        "graphshard/state/unit_programs.py",
        "        self._programs.clear()\n",
        "        self._programs.clear()\n        self._shared.clear()\n",
        ("tests/dist/test_unshard.py", "-k", "lowered_once"),
    ),
    Mutation(
        "a rank that follows does not reduce what the budget has reduced",
        "graphshard/following/follower.py",
        "            states = reducing_each(binding, states, frozenset())\n",
        "            pass\n",
        ("tests/dist/test_contract.py", "-k", "that_accumulates and tight"),
    ),
    Mutation(
        "each call leaves a variable in the thread's context",
        "graphshard/compat/dynamo.py",
        "    try:\n        yield\n    finally:\n        dynamo_config.skip",
        "    try:\n        with dynamo_config.patch(skip_nnmodule_hook_guards=False):\n            yield\n"
        "    finally:\n        dynamo_config.skip",
        ("tests/dist/test_calls.py", "-k", "leave_no_more"),
    ),
    Mutation(
        "a graph of one call is compiled",
        "graphshard/runtime/uncompiled.py",
        "return len(calls) < 2 and",
        "return len(calls) < 1 and",
        ("tests/dist/test_calls.py", "-k", "one_call"),
    ),
    Mutation(
        "what earlier microbatches left is reduced before code around graphs has added to it",
        "graphshard/runtime/outside_reads.py",
        "self._follower.outside_call(shard, node) or self._call(shard, node)",
        "self._follower.outside_call(shard, node)",
        ("tests/dist/test_fuzz.py", "-k", "earlier and microbatches"),
    ),
    Mutation(
        "copies that hooks of saved tensors hand back are no shards",
        "graphshard/runtime/region.py",
        "            if forward is None:\n                raise\n",
        "            raise\n",
        ("tests/dist/test_saved_tensors.py",),
    ),
    Mutation(
        "without a budget, units that stay gathered are added to FSDP2's memory",
        "graphshard/planning/planning.py",
        "max(fsdp2.peak_bytes - kept_bytes, self._step_bytes)",
        "max(fsdp2.peak_bytes, self._step_bytes)",
        ("tests/dist/test_auto_plan.py", "-k", "without_a_budget"),
    ),
    Mutation(
        "units that were planned to stay count as FSDP2's where a region is captured again",
        "graphshard/runtime/region_lowering.py",
        "if residency.stays_by_flag(unit)",
        "if residency.behind_forward(unit) == 1",
        ("tests/dist/test_auto_plan.py", "-k", "captured_again"),
    ),
    Mutation(
        "AOTAutograd's check looks at programs without users' operators",
        "graphshard/compat/dispatch.py",
        "if _ALIAS_CHECK is None or ",
        "if True or ",
        ("tests/graph/test_alias_check.py",),
    ),
    Mutation(
        "units that users keep as well leave less than FSDP2 needs for them",
        "graphshard/lowering/within_budget.py",
        "            if number or planner.keeps_units:\n                return None\n            raise\n",
        "            raise\n",
        ("tests/graph/test_within_budget.py", "-k", "on_top"),
    ),
    Mutation(
        "a final graph that allocates least is not taken",
        "graphshard/lowering/within_budget.py",
        "if least.peak_bytes <= needed:",
        "if False:",
        ("tests/graph/test_within_budget.py", "-k", "without_a_budget"),
    ),
    Mutation(
        "what a late program takes for granted of sizes is not looked at",
        "graphshard/runtime/region.py",
        "if not self._broken and (failed := self._lowering.guards.failed(args)):",
        'if failed := "":',
        ("tests/dist/test_sizes.py", "-k", "Convolution"),
    ),
    Mutation(
        "sizes differ, and the call is not made again",
        "graphshard/runtime/entry_points.py",
        "                    self.capture_each_size(str(differ))\n",
        "                    raise\n",
        ("tests/dist/test_sizes.py", "-k", "Convolution"),
    ),
    Mutation(
        "a program runs for other sizes than it is compiled for",
        "graphshard/runtime/program_runner.py",
        "        return program.for_any_size()",
        "        return program.run",
        ("tests/dist/test_sizes.py", "-k", "runs_as_it_is"),
    ),
    Mutation(
        "what comes of a graph for all sizes keeps its marks",
        "graphshard/compat/dynamo.py",
        "            del value._dynamo_propagated_dynamic_indices\n",
        "            pass\n",
        ("tests/dist/test_sizes.py", "-k", "for_one_size_alone"),
    ),
    Mutation(
        "a part of a program is given a size by a symbol that is none any more",
        "graphshard/compat/inductor.py",
        "[*map(_by_its_symbol, inputs)]",
        "inputs",
        ("tests/graph/test_body_strides.py", "-k", "turned_out"),
    ),
    Mutation(
        "a program keeps the strides that Inductor has changed",
        "graphshard/lowering/bodies.py",
        "undivided(gm.graph) or _in_other_strides(gm, inputs)",
        "undivided(gm.graph)",
        ("tests/graph/test_stretches.py", "-k", "other_strides"),
    ),
    Mutation(
        "collectives of torch's own with other memory are done before a program goes on",
        "graphshard/fsdp2/units.py",
        "async_op=_is_torchs(comm))",
        "async_op=False)",
        ("tests/dist/test_reductions.py", "-k", "other_memory"),
    ),
    Mutation(
        "programs that run as they are keep views where values may have other strides",
        "graphshard/runtime/plain_code.py",
        "            node.target = aten.reshape.default\n",
        "            pass\n",
        ("tests/dist/test_training.py", "-k", "than_tracing_foresees"),
    ),
)
