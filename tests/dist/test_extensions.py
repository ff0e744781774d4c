"""All-gather extensions of tensor subclasses: what they send travels with the unit's other parameters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from extended_tensors import Packed, Rounded, RoundedForOne, Wrapped, extended, given
from test_training import BITWISE
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.testing import TrainingRun, Ulps, WorkerPool, training_test

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Mlp(nn.Module):
    def __init__(self, hidden: int, breaks: bool = False, twice: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(models.DIM)
        self.up, self.down = nn.Linear(models.DIM, hidden), nn.Linear(hidden, models.DIM)
        self.breaks, self.twice = breaks, twice

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(self.norm(x)))
        if self.breaks:
            torch._dynamo.graph_break()
        y = self.down(hidden)
        return x + y @ self.down.weight[: models.DIM, : models.DIM] if self.twice else x + y


class Net(nn.Module):
    def __init__(self, hidden: int = 48, checkpointed: bool = False, **how: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList([Mlp(hidden, **how) for _ in range(3)])
        self.head = nn.Linear(models.DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        out: Tensor = self.head(x)
        return out


def loss_of(model: nn.Module, run: TrainingRun, index: int) -> Tensor:
    loss: Tensor = model(*models.features(index, run.rank)).float().square().mean()
    return loss


def train(run: TrainingRun, model: nn.Module, steps: int = 3) -> None:
    run.train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_of, steps=steps)


KINDS: dict[str, tuple[Callable[[Tensor], Wrapped], dict[str, bool], MixedPrecisionPolicy]] = {
    "one tensor": (Rounded, {}, BF16),
    "one tensor, the older signature": (RoundedForOne, {}, MixedPrecisionPolicy()),
    "several tensors": (Packed, {}, BF16),
    "a frozen base": (Packed, {"frozen": True}, MixedPrecisionPolicy()),
}


@pytest.mark.row("X1")
@pytest.mark.parametrize("kind", KINDS)
@training_test(tolerance=BITWISE)
def test_what_a_subclass_sends_is_gathered_in_its_units_bucket(run: TrainingRun, kind: str) -> None:
    make, how, policy = KINDS[kind]
    model = run.shard(extended(Net(), make, **how), mp_policy=policy, **({} if run.is_reference else {"plan": "fsdp2"}))
    train(run, model)
    if not run.is_reference:
        (forward,) = (record for record in graphshard.report(model).programs if record.direction == "forward")
        for launch in forward.launched:
            assert {fqn.rpartition(".")[2] for fqn, _ in launch.members} == {"weight", "bias"}


@training_test(tolerance=BITWISE)
def test_uneven_shards_are_sent_padded(run: TrainingRun) -> None:
    train(run, run.shard(extended(Net(hidden=33), Rounded)))


@pytest.mark.parametrize(
    "how, regions", [("breaks", "model"), ("breaks", "unit"), ("twice", "model"), ("checkpointed", "model")]
)
@training_test(tolerance=BITWISE)
def test_graph_breaks_second_reads_and_checkpoints(run: TrainingRun, how: str, regions: str) -> None:
    train(run, run.shard(extended(Net(**{how: True}), RoundedForOne), regions=regions))


@pytest.mark.parametrize("reshard", [True, False])
@training_test(tolerance=BITWISE)
def test_accumulation_gathers_by_hand_and_evaluation(run: TrainingRun, reshard: bool) -> None:
    model: Any = run.shard(extended(Net(), Rounded), reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(4):
        model.set_requires_gradient_sync(index % 2 == 1)
        if index == 2:
            model.unshard()
            run.note("gathered", model.head.weight.detach().clone())
        loss = loss_of(model, run, index)
        loss.backward()
        run.observe(loss, model)
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            run.note("evaluated", loss_of(model, run, index))


@training_test(tolerance=BITWISE)
def test_the_engine_may_change(run: TrainingRun) -> None:
    model = run.shard(extended(Net(), RoundedForOne))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(4):
        eager = index % 2 and not run.is_reference
        with graphshard.eager(model) if eager else nullcontext():
            loss = loss_of(model, run, index)
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


@training_test(tolerance=BITWISE, backends=("eager",))
def test_captured_graphs_may_run_uncompiled(run: TrainingRun) -> None:
    train(run, run.shard(extended(Net(twice=True), Rounded)))


@training_test(tolerance=BITWISE, mesh_shape=(2, 2), mesh_axes=("dp_replicate", "dp_shard"), world_size=4)
def test_shards_with_copies(run: TrainingRun) -> None:
    train(run, run.shard(extended(Net(), Rounded)))


@training_test(tolerance=BITWISE, world_size=1)
def test_one_rank(run: TrainingRun) -> None:
    train(run, run.shard(extended(Net(), Rounded), mp_policy=BF16))


class BreaksOnOneRank(Net):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if torch.distributed.get_rank() == 1:
                torch._dynamo.graph_break()
        out: Tensor = self.head(x)
        return out


@training_test(tolerance=BITWISE)
def test_ranks_whose_graphs_differ(run: TrainingRun) -> None:
    train(run, run.shard(extended(BreaksOnOneRank(), RoundedForOne)))


@training_test(tolerance=BITWISE)
def test_blocks_with_other_settings_are_told_apart(run: TrainingRun) -> None:
    model = Net()
    for number, block in enumerate(model.blocks):
        extended(block, lambda data, setting=1.0 - number / 4: Rounded(data, setting))
    train(run, run.shard(model))


# torchao's float8 training, as it runs without a GPU that has float8: values are rounded, products are not.


needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao has float8 training: pip install it")


def float8(model: nn.Module) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    converted: nn.Module = convert_to_float8_training(model, config=config)
    return converted


def train_float8(run: TrainingRun, model: nn.Module, precomputes: bool = True) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if precomputes:  # one all-reduce for the whole model; else each weight's hook has one
        optimizer.register_step_post_hook(lambda *_: precompute_float8_dynamic_scale_for_fsdp(model))
    run.train(model, optimizer, loss_of)


def gathered_bytes(model: nn.Module) -> int:
    """What one rank sends of weights of linear layers in a forward."""
    (forward,) = (record for record in graphshard.report(model).programs if record.direction == "forward")
    found = 0
    for launch in forward.launched:
        sizes = {fqn: numel for fqn, numel in launch.members if ".norm" not in fqn and fqn.endswith("weight")}
        found += sum(sizes.values()) * (1 if launch.dtype == "uint8" else getattr(torch, launch.dtype).itemsize)
    return found


@pytest.mark.row("X2")
@needs_torchao
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("precomputes", [True, False])
@training_test(tolerance=BITWISE)
def test_float8_training_of_torchao(run: TrainingRun, policy: MixedPrecisionPolicy, precomputes: bool) -> None:
    torch.manual_seed(0)
    train_float8(run, run.shard(float8(Net()), mp_policy=policy), precomputes)


@pytest.mark.row("X2")
@needs_torchao
@training_test(
    tolerance=Ulps(64, "Inductor fuses pointwise chains and sums in vector lanes", atol=2e-5), backends=("inductor",)
)
def test_float8_training_with_inductor(run: TrainingRun) -> None:
    torch.manual_seed(0)
    train_float8(run, run.shard(float8(Net())))


@pytest.mark.row("X2")
@needs_torchao
@training_test(tolerance=BITWISE, world_size=4, mesh_shape=(2, 2), mesh_axes=("dp", "tp"))
def test_float8_training_with_tensor_parallelism(run: TrainingRun) -> None:
    torch.manual_seed(0)
    train_float8(run, run.shard(float8(Net()), annotate=tensor_parallel), precomputes=False)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    assert isinstance(model, Net)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": Float8ColwiseParallel(), "down": Float8RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


@needs_torchao
@training_test(tolerance=BITWISE)
def test_float8_gathers_send_half_of_what_bf16_sends(run: TrainingRun) -> None:
    model, plain = run.shard(float8(Net()), mp_policy=BF16), run.shard(Net(), mp_policy=BF16)
    for each in (model, plain):
        train(run, each, steps=1)
    if not run.is_reference:
        assert 2 * gathered_bytes(model) == gathered_bytes(plain) > 0


# Eager FSDP2 cannot gather them again from shards over a smaller group. All bits are those of other shards.
@training_test(tolerance=BITWISE, world_size=4)
def test_shards_over_a_smaller_group_after_forward(run: TrainingRun) -> None:
    train(run, run.shard(extended(Net(), Packed), reshard_after_forward=True if run.is_reference else 2))


class Set(Wrapped):
    """What it is gathered as depends on a setting that may change."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:
        return (self.data_inside,), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        return given(outputs[0] * self.setting, out)


class Clamped(nn.Module):
    """Writes into what was gathered, then reads it by another read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.DIM, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(max=0.05)
        out: Tensor = self.linear(x)
        return out


@training_test(tolerance=BITWISE)
def test_what_forward_writes_its_later_reads_see(run: TrainingRun) -> None:
    model = nn.Sequential(Clamped(), nn.Linear(models.DIM, 4))
    train(run, run.shard(extended(model, RoundedForOne), reshard_after_forward=False), steps=1)


@training_test(tolerance=BITWISE)
def test_settings_of_a_subclass_may_change(run: TrainingRun) -> None:
    model = run.shard(extended(Net(), Set))
    for index in range(3):
        for parameter in model.parameters():
            if isinstance(local := parameter.to_local(), Set):
                local.setting = 1.0 + index % 2
        loss = loss_of(model, run, index)
        loss.backward()
        run.observe(loss, model)


def written_before_backward() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = graphshard.compile(extended(Net(), RoundedForOne), mesh, backend="aot_eager", plan="fsdp2")
    loss = model(*models.features(0, dist.get_rank())).square().mean()
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight: it was written between a forward and its backward"):
        loss.backward()
    model(*models.features(0, dist.get_rank())).square().mean().backward()


def test_parameter_written_between_a_forward_and_its_backward_is_refused(two_ranks: WorkerPool) -> None:
    two_ranks.run(written_before_backward)
