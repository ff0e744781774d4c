"""The list, where ranks agree."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

OF_RANKS = (
    Mutation(
        "who waits in vain for a rank does not say whether it is dead",
        "graphshard/agree/agreement.py",
        "said if waited_s is None else waited(said, missing)",
        "said",
        ("tests/graph/test_agreement.py", "-k", "waited_in_vain"),
    ),
    Mutation(
        "a contract keeps its order where no rank's graph can",
        "graphshard/agree/any_order.py",
        "        if key not in self._keys:\n            return contract\n",
        "        return contract\n",
        ("tests/dist/test_order_of_modules.py", "-k", "any_order"),
    ),
    Mutation(
        "programs stay that were made before ranks agreed on another order",
        "graphshard/agree/any_order.py",
        "        self.changes += 1\n",
        "",
        ("tests/dist/test_order_of_modules.py", "-k", "other_orders"),
    ),
    Mutation(
        "calls that run a leg another number of times are not told",
        "graphshard/following/route.py",
        "(leg in legs or shards[0].unit not in split)",
        "False",
        ("tests/graph/test_route.py", "-k", "number_of_times"),
    ),
    Mutation(
        "Dynamo traces what is told that it traces",
        "graphshard/faults/watched_run.py",
        "@uncaptured\ndef _begin_tracing(",
        "def _begin_tracing(",
        ("tests/dist/test_inside_forward.py", "-k", "gradient_of_an_input"),
    ),
    Mutation(
        "a backward that fails is not noticed",
        "graphshard/runtime/running_backward.py",
        "        if self._end_of is None or self._end_of() is not None:\n",
        "        if True:\n",
        ("tests/dist/test_reductions.py", "-k", "leaves_no"),
    ),
    Mutation(
        "what generate needs is sharded by the modules that it calls",
        "graphshard/runtime/generating.py",
        "    holdings.residency.pinned |= {*own}\n",
        "",
        ("tests/dist/test_generate.py", "-k", "layers_alone"),
    ),
    Mutation(
        "a collective of a number is captured",
        "graphshard/runtime/backend.py",
        "        _check_collectives(runtime, gm, fullgraph)\n",
        "",
        ("tests/dist/test_inside_forward.py", "-k", "collective_of_a_number"),
    ),
    Mutation(
        "sizes that torch cannot trace as symbols end the job",
        "graphshard/runtime/entry_points.py",
        "if self._dynamic is not None or not self._make_static(module, kind, method, failed):",
        "if True:",
        ("tests/dist/test_tensor_parallel.py", "-k", "several_lengths"),
    ),
    Mutation(
        "numbers that torch cannot trace as symbols behind a graph break end the job",
        "graphshard/runtime/backend.py",
        "if fullgraph or is_entry_point(traced_code()):",
        "if True:",
        ("tests/dist/test_fuzz.py", "-k", "such and number"),
    ),
    Mutation(
        "a contract's steps are taken whatever stands between them",
        "graphshard/planning/realising.py",
        "            if own_places(problem, schedule) == contract.own:\n                return problem, schedule\n",
        "            return problem, schedule\n",
        ("tests/dist/test_collectives_in_forward.py", "-k", "order_among"),
    ),
    Mutation(
        "an all-reduce is launched on any side of a model's own collective",
        "graphshard/planner/realised.py",
        "            for turn, bucket in enumerate(passing_on):",
        "            for turn, bucket in ():",
        ("tests/graph/test_realised.py", "-k", "own"),
    ),
    Mutation(
        "what one rank recomputes in graphs of its own takes places in the order",
        "graphshard/runtime/region_orders.py",
        "if running.goes_on(step, gathers, run):",
        "if False:",
        ("tests/dist/test_fuzz.py", "-k", "recomputed"),
    ),
    Mutation(
        "blocks of one class share code, whatever is inside them",
        "graphshard/capture/marking.py",
        "return type(module), tuple(inside), ",
        "return type(module), (), ",
        ("tests/dist/test_fuzz.py", "-k", "looks and parameters"),
    ),
    Mutation(
        "Inductor removes copies of buffers",
        "graphshard/compat/inductor.py",
        "        for run in (self._run, *self._others):",
        "        for run in self._others:",
        ("tests/dist/test_saved_tensors.py", "-k", "removes"),
    ),
    Mutation(
        "views of inputs are saved",
        "graphshard/runtime/backend.py",
        '        save_inputs_themselves(forward, backward, kwargs["num_fwd_outputs"])\n',
        "",
        ("tests/dist/test_saved_tensors.py", "-k", "would_change and one"),
    ),
    Mutation(
        "tokens stand in front of placeholders",
        "graphshard/runtime/region.py",
        "        placeholders_first(gm.graph)\n",
        "",
        ("tests/dist/test_inside_forward.py", "-k", "effects"),
    ),
    Mutation(
        "lengths of jagged tensors are sizes",
        "graphshard/compat/symbol_places.py",
        "size if isinstance(size, int) else None",
        "size",
        ("tests/dist/test_sizes.py", "-k", "jagged"),
    ),
)
