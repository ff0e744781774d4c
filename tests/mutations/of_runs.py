"""The list, where programs run and ranks agree, by room."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

OF_RUNS = (
    # -- runtime
    Mutation(
        "a graph of a frame that another calls passes for the whole call",
        "graphshard/runtime/backend.py",
        "broken or not is_entry_point(traced_code()),",
        "broken,",
        ("tests/dist/test_user_code.py", "-k", "left_out"),
    ),
    Mutation(
        "what the other engine holds unreduced is not taken back",
        "graphshard/runtime/engine.py",
        "self.backward.begin, self.backward.end = self._eager.take_held, self._eager.hand_held",
        "self.backward.end = self._eager.hand_held",
        ("tests/dist/test_engines.py", "-k", "accumulation"),
    ),
    Mutation(
        "memory that a gradient shares with an argument is held as it is",
        "graphshard/runtime/program_runner.py",
        "convention, not shared.isdisjoint(_storages([grad])))",
        "convention, False)",
        ("tests/dist/test_accumulation.py", "-k", "argument_of"),
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
        "hooks that were added later are not looked at",
        "graphshard/runtime/entry_points.py",
        "            self._kinds.clear()\n",
        "",
        ("tests/dist/test_user_code.py", "-k", "hook"),
    ),
    Mutation(
        "frames of users' functions do not look at hooks",
        "graphshard/runtime/entry_points.py",
        "            with guarded_hooks():\n",
        "            if True:\n",
        ("tests/dist/test_user_code.py", "-k", "function_calls"),
    ),
    Mutation(
        "what ranks hold of a leg before it is entered is gathered again",
        "graphshard/runtime/program_selection.py",
        'frozenset(followed.shards) - frozenset(members(followed.contract.buckets, "gather"))',
        "frozenset()",
        ("tests/dist/test_legs.py",),
    ),
    Mutation(
        "a backward for a stage's inputs leaves out those of its weights",
        "graphshard/runtime/running_backward.py",
        "            self._halves.append(self.deferred)",
        "            pass",
        ("tests/dist/test_pipelining.py", "-k", "Zero"),
    ),
    # -- following
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
        "parameters without elements are not told apart",
        "graphshard/state/shards.py",
        "self._source.detach().new_empty(1)[:0]",
        "self._source.detach()",
        ("tests/dist/test_empty_parameters.py", "-k", "get_gradients"),
    ),
    Mutation(
        "branches that need other parameters again in backward are one call",
        "graphshard/state/signatures.py",
        '" again" if slot in again else ""',
        '""',
        ("tests/dist/test_branches.py", "-k", "all_ranks and fsdp2"),
    ),
    Mutation(
        "backwards that reach other parameters are one",
        "graphshard/state/signatures.py",
        "usual = (REACHED,) if backward else (0, REACHED)",
        "usual = (0, REACHED)",
        ("tests/dist/test_backward_again.py", "-k", "other"),
    ),
    Mutation(
        "the other engine does not get what is held unreduced",
        "graphshard/state/shards.py",
        "self.held is not None and self.param.give_unreduced(self.held)",
        "self.held is not None and self.param is None",
        ("tests/dist/test_engines.py", "-k", "accumulation"),
    ),
    Mutation(
        "a call is forgotten behind the first of its backwards",
        "graphshard/state/calls.py",
        "            self._kept.append(call)",
        "            pass",
        ("tests/dist/test_backward_again.py", "-k", "several"),
    ),
    Mutation(
        "a unit of several modules is resharded behind the first",
        "graphshard/state/running_forward.py",
        "        return not left\n",
        "        return True\n",
        ("tests/dist/test_checkpointing.py", "-k", "composable"),
    ),
    Mutation(
        "what Dynamo keeps holds units, and so models",
        "graphshard/state/split_units.py",
        "weakref.WeakSet[Unit] = weakref.WeakSet()",
        "set[Unit] = set()",
        ("tests/dist/test_deleted_models.py",),
    ),
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
    # -- faults
    Mutation(
        "what an error of a silent rank had said is not told",
        "graphshard/faults/watchdog.py",
        "inquiry.say_raised(store, self._rank, said[:_MAX_SAID])",
        "None",
        ("tests/graph/test_fault_inquiry.py",),
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
    # -- reporting
    Mutation(
        "a bucket of several tensors has waited for the last of them only",
        "graphshard/reporting/measuring.py",
        "Timing(launched[bucket], end_us, waited_us + end_us - start_us)",
        "Timing(launched[bucket], end_us, end_us - start_us)",
        ("tests/graph/test_communication_order.py",),
    ),
    # -- plan_file
    Mutation(
        "a parameter may be in two buckets of a plan file",
        "graphshard/plan_file/soundness.py",
        "        if bucketed[kind, fqn] != 1:\n",
        "        if bucketed[kind, fqn] < 1:\n",
        ("tests/graph/test_plan_file.py",),
    ),
    # -- fsdp2
    Mutation(
        "set_requires_all_reduce is not read",
        "graphshard/fsdp2/units.py",
        "            raw.all_reduce_grads,\n",
        "            True,\n",
        ("tests/dist/test_control.py", "-k", "all_reduce"),
    ),
)
