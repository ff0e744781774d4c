"""The list, by room, from what users call down to torch."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MUTATIONS = (
    # -- runtime
    Mutation(
        "unreduced gradients do not stop a change to the other engine",
        "graphshard/runtime/eager_mode.py",
        "    if names:\n        raise RuntimeError(",
        "    if names and not names:\n        raise RuntimeError(",
        ("tests/dist/test_calls.py", "-k", "switching_engines"),
    ),
    Mutation(
        "memory that a gradient shares with an argument is held as it is",
        "graphshard/runtime/program_runner.py",
        "convention, not shared.isdisjoint(_storages([grad])))",
        "convention, False)",
        ("tests/dist/test_accumulation.py", "-k", "argument_of"),
    ),
    Mutation(
        "a body overwrites arguments that only the whole program may overwrite",
        "graphshard/compat/inductor.py",
        "        metadata.bw_donated_idxs = None\n",
        "        pass\n",
        ("tests/graph/test_compat.py", "-k", "overwrites"),
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
        "a last block that ends otherwise shares nothing",
        "passes/outline_blocks.py",
        "while end < len(kinds) and kinds[end] == kinds[end - repeat.period]:",
        "while False:",
        ("tests/graph/test_stretches.py", "-k", "last_block"),
    ),
    Mutation(
        "what blocks that were traced once pass on has no gradient",
        "graphshard/graph/equal_blocks.py",
        'passed = (node for node in again if getattr(value_of_captured(node), "requires_grad", False))',
        "passed = (node for node in again if False)",
        ("tests/graph/test_traced_blocks.py",),
    ),
    Mutation(
        "an order that other ranks do not have is followed",
        "graphshard/runtime/region_orders.py",
        "                posted.compare()\n",
        "                pass\n",
        ("tests/dist/test_order_agreement.py", "-k", "backwards_of_other"),
    ),
    Mutation(
        "the last reduction of a region is not left to go on behind it",
        "graphshard/runtime/region_orders.py",
        "self.follows_backward = order is not None and len(order.steps) > 1",
        "self.follows_backward = False",
        ("tests/dist/test_across_regions.py", "-k", "each_region_gathers"),
    ),
    Mutation(
        "a class's own call is not called",
        "graphshard/capture/marked_classes.py",
        "_call if cls.__call__ is nn.Module.__call__ else _calling(cls.__call__)",
        "_call",
        ("tests/dist/test_user_code.py", "-k", "call_of_their_own"),
    ),
    Mutation(
        "a unit of several modules is resharded behind the first",
        "graphshard/state/running_forward.py",
        "        return not left\n",
        "        return True\n",
        ("tests/dist/test_checkpointing.py", "-k", "composable"),
    ),
    Mutation(
        "hooks that were added later are not looked at",
        "graphshard/runtime/entry_points.py",
        "            self._kinds.clear()\n",
        "",
        ("tests/dist/test_user_code.py", "-k", "hook"),
    ),
    # -- following
    Mutation(
        "what ranks hold of a leg before it is entered is gathered again",
        "graphshard/runtime/program_selection.py",
        'frozenset(followed.shards) - frozenset(members(followed.contract.buckets, "gather"))',
        "frozenset()",
        ("tests/dist/test_legs.py",),
    ),
    Mutation(
        "a split unit is freed when its module ends, though a leg is followed",
        "graphshard/following/follower.py",
        "return self.forward is None or (self._is_in_legs and unit in self._holdings.split.units)",
        "return self.forward is None",
        ("tests/dist/test_legs.py",),
    ),
    Mutation(
        "gradients that others reduce behind a leg are reduced at once",
        "graphshard/following/part_programs.py",
        "is_held = not unit.reduce_grads or unit in followed.unreduced",
        "is_held = not unit.reduce_grads",
        ("tests/dist/test_legs.py",),
    ),
    Mutation(
        "a whole call has the direction of its first part",
        "graphshard/following/follower.py",
        "self.forward = self._followed_pass(self.role.whole, self.role.whole.direction, states)",
        "self.forward = self._followed_pass(self.role.whole, direction, states)",
        ("tests/dist/test_contract.py", "-k", "frozen_blocks"),
    ),
    Mutation(
        "legs of a first call are compared when they run, not when they are compiled",
        "graphshard/following/route.py",
        "        names = [shard.fqn for shard in binding.shards if not shard.unit.reduce_unused]\n",
        "        if not runs:\n            return\n"
        "        names = [shard.fqn for shard in binding.shards if not shard.unit.reduce_unused]\n",
        ("tests/dist/test_legs.py", "-k", "told_before"),
    ),
    # -- state
    Mutation(
        "a parameter that was written after the launch of its gather is used as it was",
        "graphshard/state/unit_gathers.py",
        "if found.ahead and found.is_outdated():",
        "if False:",
        ("tests/dist/test_across_regions.py", "-k", "written_between_regions"),
    ),
    Mutation(
        "reset_iter_state keeps gradients",
        "graphshard/state/holdings.py",
        "            shard.drop_grads()\n",
        "            pass\n",
        ("tests/dist/test_unshard.py", "-k", "reset"),
    ),
    Mutation(
        "what an inference gathered for a backward stays",
        "graphshard/state/residency.py",
        "return RESHARD if self._forward.is_inference and only_decided else self.behind_forward(unit)",
        "return self.behind_forward(unit)",
        ("tests/dist/test_auto_plan.py",),
    ),
    Mutation(
        "a retained graph is not refused",
        "graphshard/state/calls.py",
        "        if keeps_graph():\n",
        "        if False:\n",
        ("tests/dist/test_calls.py", "-k", "retained"),
    ),
    Mutation(
        "a gradient is held in its own dtype",
        "graphshard/state/shards.py",
        "held = grad.to(self.param.reduce_dtype).contiguous()",
        "held = grad.contiguous()",
        ("tests/dist/test_policies.py", "tests/dist/test_accumulation.py"),
    ),
    Mutation(
        "the bits of a frozen parameter count in the state of a backward",
        "graphshard/state/signatures.py",
        "counts = {shard for shard in binding.shards if shard.leaf.requires_grad or not backward}",
        "counts = set(binding.shards)",
        ("tests/graph/test_signatures.py",),
    ),
    Mutation(
        "a program keeps what its graph does not gather",
        "graphshard/state/calling_convention.py",
        "if slot in gathered and not binding.shards[slot].is_whole:",
        "if not binding.shards[slot].is_whole:",
        ("tests/graph/test_calling_convention.py",),
    ),
    # -- capture
    Mutation(
        "outputs are not cast to output_dtype",
        "graphshard/capture/casts.py",
        "return None if output_dtype is None else cast_floating(output, output_dtype)",
        "return None",
        ("tests/graph/test_casts.py",),
    ),
    Mutation(
        "blocks that share a module become units",
        "graphshard/capture/units.py",
        "                counts[id(child)] += 1\n",
        "                pass\n",
        ("tests/graph/test_units.py",),
    ),
    # -- lowering
    Mutation(
        "what a final graph allocates above its plan is not planned for",
        "graphshard/lowering/within_budget.py",
        "short_bytes += peak - latest.budget_bytes",
        "short_bytes += 0",
        ("tests/graph/test_within_budget.py",),
    ),
    # -- passes
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
    # -- agree
    Mutation(
        "each rank decides for itself",
        "graphshard/agree/consensus.py",
        "leads = self._store is None or self.rank == leader",
        "leads = True",
        ("tests/graph/test_consensus.py",),
    ),
    Mutation(
        "ranks that differ are counted as alike",
        "graphshard/agree/agreement.py",
        "        if not alike:\n",
        "        if False:\n",
        ("tests/graph/test_agreement.py", "-k", "first_difference"),
    ),
    # -- reporting, plan files
    Mutation(
        "a bucket of several tensors has waited for the last of them only",
        "graphshard/reporting/measuring.py",
        "Timing(launched[bucket], end_us, waited_us + end_us - start_us)",
        "Timing(launched[bucket], end_us, end_us - start_us)",
        ("tests/graph/test_communication_order.py",),
    ),
    Mutation(
        "a parameter may be in two buckets of a plan file",
        "graphshard/plan_file/soundness.py",
        "        if bucketed[kind, fqn] != 1:\n",
        "        if bucketed[kind, fqn] < 1:\n",
        ("tests/graph/test_plan_file.py",),
    ),
    # -- graph
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
    Mutation(
        "ranks of a host compile what others have begun",
        "graphshard/lowering/bodies.py",
        "if ranks == 1 or is_first_to_ask(_digest(key)):",
        "if True:",
        ("tests/graph/test_bodies.py",),
    ),
    # -- faults
    Mutation(
        "what an error of a silent rank had said is not told",
        "graphshard/faults/watchdog.py",
        "inquiry.say_raised(store, self._rank, said[:_MAX_SAID])",
        "None",
        ("tests/graph/test_fault_inquiry.py",),
    ),
    # -- compat, FSDP2
    Mutation(
        "Inductor rewrites the graph that the report shows",
        "graphshard/compat/inductor.py",
        "compile_fx_inner(GraphModule(gm, copy_graph(gm)), list(inputs), **kwargs)",
        "compile_fx_inner(gm, list(inputs), **kwargs)",
        ("tests/graph/test_compat.py", "-k", "inductor_leaves"),
    ),
    Mutation(
        "set_requires_all_reduce is not read",
        "graphshard/fsdp2/units.py",
        "            raw.all_reduce_grads,\n",
        "            True,\n",
        ("tests/dist/test_control.py", "-k", "all_reduce"),
    ),
)
