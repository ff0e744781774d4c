"""Runs one case on ranks, under eager FSDP2 and compiled, and compares every bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.testing import Bitwise, TrainingRun, training_test
from tests.fuzz.cases import Case
from tests.fuzz.layers import VOCABULARY, Block, Nested, Net

BITWISE = Bitwise(equal_zeros="a sum with a zero term loses the sign of zero")
POLICIES = {
    "f32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "bf16_reduce_f32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
MIB = 2**20


class EagerRefuses(Exception):
    """Eager FSDP2 itself raised: there is nothing to compare with."""


class _Job:
    def __init__(self, run: TrainingRun, case: Case) -> None:
        self.run, self.case = run, case
        torch.manual_seed(case.seed)
        self.model: Any = self._sharded(Net(case))
        make = torch.optim.AdamW if case.optimizer == "adamw" else torch.optim.SGD
        self.optimizer: Any = make(self.model.parameters(), lr=1e-2)
        self.batches, self.rows = 0, 2

    def _sharded(self, net: Net) -> nn.Module:
        case, options = self.case, dict[str, Any](mp_policy=POLICIES[self.case.policy])
        if case.reshard is not None:
            options["reshard_after_forward"] = case.reshard
        compiled: dict[str, Any] = {"regions": case.regions, "plan": case.plan}
        if case.budget_mib:
            compiled["memory_budget"] = case.budget_mib * MIB
        if case.mesh == "replicate":
            options.pop("reshard_after_forward", None)
            return self.run.shard(net, strategy="replicate", **options, **compiled)
        if case.units == "auto":
            return self.run.shard(net, **options, **compiled)

        def annotate(model: nn.Module, mesh: DeviceMesh) -> None:
            for unit in _units(net, case.units):
                fully_shard(unit, mesh=mesh, **options)
            fully_shard(model, mesh=mesh, **options)

        return self.run.shard(net, annotate=annotate, **compiled)

    def tokens(self) -> Tensor:
        self.batches += 1
        draw = torch.Generator().manual_seed(1000 * self.batches + self.run.rank)
        return torch.randint(VOCABULARY, (self.rows, 5), generator=draw)

    def play(self, move: str) -> None:
        getattr(self, move)()

    def train(self) -> None:
        for index in range(self.case.microbatches):
            last = index + 1 == self.case.microbatches
            self.model.set_requires_gradient_sync(last or self.case.sync == "every")
            torch.manual_seed(self.batches * 10 + self.run.rank)
            loss = self.model(self.tokens())
            loss.backward()
        self.run.observe(loss, self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.run.note("buffers", dict(self.model.named_buffers()))

    def evaluate(self) -> None:
        torch.manual_seed(self.batches)
        with torch.no_grad():
            self.run.note("evaluated", self.model(self.tokens()))

    def drop(self) -> None:
        """A forward without its backward."""
        torch.manual_seed(self.batches)
        self.run.note("dropped", self.model(self.tokens()).detach())

    def clip(self) -> None:
        torch.manual_seed(self.batches)
        loss = self.model(self.tokens())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.run.note("norm", norm.full_tensor() if isinstance(norm, DTensor) else norm)
        self.run.observe(loss, self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def infer(self) -> None:
        torch.manual_seed(self.batches)
        with torch.inference_mode():
            self.run.note("inferred", self.model(self.tokens()).clone())

    def twice(self) -> None:
        """Two forwards, one backward."""
        torch.manual_seed(self.batches)
        loss = self.model(self.tokens()) + self.model(self.tokens())
        loss.backward()
        self.run.observe(loss, self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def eager(self) -> None:
        self.model.reshard()  # as a switch does: what was frozen while it was gathered is so no longer
        with nullcontext() if self.run.is_reference else graphshard.eager(self.model):
            self.train()

    def unshard(self) -> None:
        self.model.unshard()
        self.train()

    def freeze(self) -> None:
        parameter = next(iter(self.model.blocks[-1].parameters()), None)
        if parameter is not None:
            parameter.requires_grad_(not parameter.requires_grad)
            parameter.grad = None

    def mode(self) -> None:
        self.model.train(not self.model.training)

    def load(self) -> None:
        state = self.model.state_dict()
        for value in state.values():
            local = value.to_local() if isinstance(value, DTensor) else value
            if local.is_floating_point():
                local.mul_(0.75)
        self.model.load_state_dict(state)

    def other_rows(self) -> None:
        self.rows = 3 - (self.run.rank + self.rows) % 2


def _units(net: Net, which: str) -> list[Any]:
    blocks: list[Any] = list(net.blocks)
    if which == "pairs":
        return [blocks[i : i + 2] for i in range(0, len(blocks), 2)]
    if which == "root":
        return []
    chosen = blocks[::2] if which == "some" else blocks
    inner: list[Any] = []
    if which == "inner":
        inner = [block for nest in net.modules() if isinstance(nest, Nested) for block in nest.inner]
    return [block for block in (*inner, *chosen) if isinstance(block, Block) and any(True for _ in block.parameters())]


def _play(run: TrainingRun, text: str) -> None:
    case = Case.parse(text)
    try:
        with torch._dynamo.config.patch(recompile_limit=case.recompile_limit):
            job = _Job(run, case)
            for move in case.moves:
                job.play(move)
    except Exception as error:
        if run.is_reference:
            raise EagerRefuses(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
        raise


@training_test(tolerance=BITWISE, allow_eager=("",), timeout_s=180)
def on_two_ranks(run: TrainingRun, text: str) -> None:
    """On two ranks."""
    _play(run, text)


@training_test(tolerance=BITWISE, allow_eager=("",), mesh_shape=(2, 2), mesh_axes=("copies", "shards"), world_size=4)
def on_four_ranks(run: TrainingRun, text: str) -> None:
    """On four ranks: two copies of two shards."""
    _play(run, text)


def test_of(case: Case) -> Callable[..., None]:
    """What runs a case: takes ``backend`` and ``text``, raises where the passes differ."""
    return on_four_ranks if case.mesh == "hybrid" else on_two_ranks
