"""The list, where graphs are captured and become programs, by room."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

OF_GRAPHS = (
    # -- capture
    Mutation(
        "a parameter without elements shares no bucket with wider dtypes",
        "graphshard/graph/emit_gather.py",
        "    if val(node).numel() == 0:",
        "    if False:",
        ("tests/graph/test_emit_gather.py", "-k", "without_elements"),
    ),
    Mutation(
        "a tensor subclass makes another parameter of each read",
        "passes/share_reads.py",
        "elif is_call(node, EXTENDED):",
        "elif False:",
        ("tests/dist/test_extensions.py", "-k", "later_reads"),
    ),
    Mutation(
        "parameters() in forward gathers those of units whose forward does not run",
        "graphshard/capture/parameters_in_forward.py",
        "gathered = FORWARD in held and held[FORWARD].runs",
        "gathered = True",
        ("tests/dist/test_parameters_in_forward.py", "-k", "param_dtype"),
    ),
    Mutation(
        "blocks that share a tensor with others are like those that share none",
        "graphshard/capture/twins.py",
        "{at: (state.structure, shared[at]) for",
        "{at: (state.structure, len(shared) and 0) for",
        ("tests/graph/test_alike.py", "tests/dist/test_twins.py", "-k", "in_common or shared"),
    ),
    Mutation(
        "a class's own call is not called",
        "graphshard/capture/marked_classes.py",
        "if may_have_twins else cls.__call__)",
        "if may_have_twins else nn.Module.__call__)",
        ("tests/dist/test_user_code.py", "-k", "call_of_their_own"),
    ),
    Mutation(
        "outputs are not cast to output_dtype",
        "graphshard/capture/unit_hooks.py",
        "return None if output_dtype is None else cast_floating(output, output_dtype)",
        "return None",
        ("tests/graph/test_unit_hooks.py",),
    ),
    Mutation(
        "blocks that share a module become units",
        "graphshard/capture/units.py",
        "                counts[id(child)] += 1\n",
        "                pass\n",
        ("tests/graph/test_units.py",),
    ),
    Mutation(
        "gradients are summed over the data-parallel axes of a whole mesh before they are reduced",
        "graphshard/capture/spmd_parameters.py",
        "came if dim in layout.data_dims else own",
        "own",
        ("tests/dist/test_whole_mesh.py", "-k", "one_axis"),
    ),
    # -- lowering
    Mutation(
        "a twin has what code has met elsewhere",
        "graphshard/lowering/twins.py",
        "(has_met(alone) or not alone.isdisjoint(self._brought))",
        "False",
        ("tests/dist/test_twins.py", "-k", "elsewhere or tensor"),
    ),
    Mutation(
        "a call that brings a block's tensor is taken for one that does not",
        "graphshard/lowering/twins.py",
        "if len(set(tensors)) < len(tensors):",
        "if False:",
        ("tests/dist/test_twins.py", "-k", "may_bring"),
    ),
    Mutation(
        "twins are believed though two traces differ",
        "graphshard/lowering/twins.py",
        'raise _NotAlike("two that look alike are traced otherwise")',
        "pass",
        ("tests/dist/test_twins.py", "-k", "differ"),
    ),
    Mutation(
        "what a final graph allocates above its plan is not planned for",
        "graphshard/lowering/within_budget.py",
        "short_bytes += peak - latest.budget_bytes",
        "short_bytes += 0",
        ("tests/graph/test_within_budget.py",),
    ),
    Mutation(
        "ranks of a host compile what others have begun",
        "graphshard/lowering/bodies.py",
        "if ranks == 1 or is_first_to_ask(_digest(key)):",
        "if True:",
        ("tests/graph/test_bodies.py",),
    ),
    # -- planning
    Mutation(
        "bytes of the model's own collectives are asked of symbolic sizes",
        "graphshard/planning/own_collectives.py",
        "sum(map(num_bytes, both))",
        "sum(tensor.nbytes for tensor in both)",
        ("tests/dist/test_expert_parallel.py", "-k", "turns"),
    ),
    # -- passes
    Mutation(
        "a last block that ends otherwise shares nothing",
        "passes/outline_blocks.py",
        "while end < len(kinds) and kinds[end] == kinds[end - repeat.period]:",
        "while False:",
        ("tests/graph/test_stretches.py", "-k", "last_block"),
    ),
    Mutation(
        "the backward of a block restores other values than its forward saved",
        "passes/split_blocks.py",
        "given = [*arguments, *_saving(graph, node, arguments, call)]",
        "given = [*_saving(graph, node, arguments, call), *arguments]",
        ("tests/graph/test_traced_blocks.py",),
    ),
    Mutation(
        "an accumulated gradient is added before a cast that eager makes first",
        "passes/apply_flags.py",
        "ctx.params[name].adds_in_reduce_dtype and dtype",
        "False and dtype",
        ("tests/graph/test_apply_flags.py",),
    ),
    Mutation(
        "two reduce-scatters are in flight where FSDP2 has one",
        "passes/order_launches.py",
        "(settings.scatter_buffers for _, settings in ctx.flags.units), default=1)",
        "(settings.scatter_buffers for _, settings in ctx.flags.units), default=2)",
        ("tests/graph/test_order_launches.py", "tests/graph/test_golden.py"),
    ),
    Mutation(
        "aliases at the entries of units are all taken away",
        "passes/sum_by_units.py",
        "return any(user is not alias and user not in unused for user in source.users)",
        "return False",
        ("tests/dist/test_sums_of_units.py", "-k", "cross"),
    ),
    Mutation(
        "a read behind a write does not see it",
        "passes/share_reads.py",
        "        if others:\n",
        "        if others and False:\n",
        ("tests/graph/test_share_reads.py",),
    ),
    Mutation(
        "an edit of a pass that finds a kept gather again keeps it twice",
        "passes/apply_residency.py",
        "if _KEPT not in node.meta),",
        "),",
        ("tests/graph/test_passes.py", "tests/graph/test_apply_residency.py"),
    ),
    # -- graph
    Mutation(
        "a block that changes objects stands for its twins",
        "graphshard/graph/twin_calls.py",
        "(exemplar.brought, exemplar.before) != (brought, before)",
        "exemplar.brought != brought",
        ("tests/dist/test_twins.py", "-k", "counting or item"),
    ),
    Mutation(
        "backward reads inputs behind their writes",
        "graphshard/graph/saved_values.py",
        "isinstance(saved, Node) and _memory_of(saved) in written",
        "False",
        ("tests/dist/test_models.py", "-k", "buffers"),
    ),
    Mutation(
        "stretches of other inputs share a body",
        "graphshard/graph/stretches.py",
        'lines = [_kind(node.meta.get("val")) for node in self.inputs]',
        "lines = []",
        ("tests/graph/test_stretches.py",),
    ),
    Mutation(
        "constants that equal blocks share come into their bodies from outside",
        "graphshard/graph/stretches.py",
        'return constants.union(graph.find_nodes(op="get_attr"))',
        'return set(graph.find_nodes(op="get_attr"))',
        ("tests/graph/test_stretches.py", "-k", "constant"),
    ),
    Mutation(
        "what blocks that were traced once pass on has no gradient",
        "graphshard/graph/equal_blocks.py",
        'passed = (node for node in again if getattr(value_of_captured(node), "requires_grad", False))',
        "passed = (node for node in again if False)",
        ("tests/graph/test_traced_blocks.py",),
    ),
    Mutation(
        "the input of a collective is free before it is awaited",
        "graphshard/graph/liveness.py",
        "                end[allocation] = max(end[allocation], wait)\n",
        "                pass\n",
        ("tests/graph/test_planned_programs.py", "tests/graph/test_within_budget.py"),
    ),
    Mutation(
        "shards of a parameter sharded on its second axis are taken row by row",
        "graphshard/graph/emit_reduction.py",
        "    if dim > 0 and world_size > 1:\n",
        "    if dim > 1 and world_size > 1:\n",
        ("tests/graph/test_emit_reduction.py", "tests/graph/test_numerics.py"),
    ),
    Mutation(
        "members of unlike dtypes are gathered as the first one's",
        "graphshard/graph/emit_gather.py",
        "wire = dtypes[0] if len(set(dtypes)) == 1 else torch.uint8",
        "wire = dtypes[0]",
        ("tests/graph/test_emit_gather.py", "tests/graph/test_numerics.py"),
    ),
    # -- kernels
    Mutation(
        "an empty dimension is not padded in a copy's layout",
        "graphshard/kernels/segments.py",
        "length = -(-size[dim] // world_size)",
        "length = size[dim] // world_size",
        ("tests/graph/test_copy_operators.py",),
    ),
    # -- cost
    Mutation(
        "an all-reduce sends as much as a reduce-scatter",
        "graphshard/cost/collectives.py",
        "yield protocol.base_us + 2 * steps_us, 2 * moved / (bytes_per_us * share)",
        "yield protocol.base_us + steps_us, moved / (bytes_per_us * share)",
        ("tests/graph/test_cost_collectives.py",),
    ),
    # -- compat
    Mutation(
        "backward overwrites what forward saves",
        "graphshard/compat/inductor.py",
        "    metadata.bw_donated_idxs = []\n",
        "    del metadata\n",
        ("tests/graph/test_compat.py", "-k", "overwrites"),
    ),
    Mutation(
        "Inductor rewrites the graph that the report shows",
        "graphshard/compat/inductor.py",
        "compile_fx_inner(GraphModule(gm, copy_graph(gm)), list(inputs), **kwargs)",
        "compile_fx_inner(gm, list(inputs), **kwargs)",
        ("tests/graph/test_compat.py", "-k", "inductor_leaves"),
    ),
)
