"""`replicate`: whole parameters on every rank, one all-reduce per unit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from graphshard.testing import Bitwise, TrainingRun, Ulps, training_test

BITWISE = Bitwise(equal_zeros="a sum with a zero term loses the sign of zero")
MLPS = 3


class Mlp(nn.Module):
    def __init__(self, hidden: int = 2 * models.DIM) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(models.DIM, hidden), nn.Linear(hidden, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def mlps() -> Any:
    """The root owns the norm."""
    return nn.Sequential(nn.LayerNorm(models.DIM), *(Mlp() for _ in range(MLPS)))


def units_of(*classes: type[nn.Module], **policies: Any) -> Callable[[nn.Module, DeviceMesh], None]:
    """Replicates every module of these classes, then the root."""

    def annotate(model: nn.Module, mesh: DeviceMesh) -> None:
        for module in model.modules():
            if isinstance(module, classes):
                replicate(module, mesh=mesh, **policies)
        replicate(model, mesh=mesh, **policies)

    return annotate


def loss_of(model: nn.Module, run: TrainingRun, index: int) -> Tensor:
    takes_tokens = isinstance(model, models.Decoder)
    inputs = models.tokens(index, run.rank) if takes_tokens else models.features(index, run.rank)
    loss: Tensor = model(*inputs).square().mean()
    return loss


def train(run: TrainingRun, model: nn.Module, *, steps: int = 3, all_reduce: int) -> None:
    """Steps with gradients that differ on every rank; no gather, and that many all-reduces in each but the first."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for index in range(steps):
        with run.counted(f"step {index}") if index else nullcontext():
            loss = loss_of(model, run, index)
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()
    check_all_reduces(run, all_reduce)


def check_all_reduces(run: TrainingRun, count: int) -> None:
    for label, seen in run.counts:
        assert seen == {"all_gather": 0, "reduce_scatter": 0, "all_reduce": count}, label


@pytest.mark.row("R1")
@training_test()
def test_replicated_module_without_parameters_runs(run: TrainingRun) -> None:
    model = run.shard(models.Product(), annotate=units_of()).to("cpu")
    for index in range(2):
        leaves = [models.features(3 * index + i, run.rank)[0].requires_grad_() for i in range(3)]
        with run.counted(f"step {index}") if index else nullcontext():
            loss = model(leaves[0], (leaves[1], leaves[2])).sum()
            loss.backward()
        run.observe(loss, model, outputs=[leaf.grad for leaf in leaves])
    check_all_reduces(run, 0)


@pytest.mark.row("R2", "R3")
@pytest.mark.parametrize("classes", [(), (Mlp,)], ids=["one unit", "four units"])
@training_test(tolerance=BITWISE)
def test_replicated_parameters_are_registered_as_in_eager(
    run: TrainingRun, classes: tuple[type[nn.Module], ...]
) -> None:
    model = run.shard(mlps(), annotate=units_of(*classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(2):
        run.note_registration(f"step {index}, before forward", model)
        loss = loss_of(model, run, index)
        run.note_registration(f"step {index}, after forward", model)
        loss.backward()
        run.note_registration(f"step {index}, after backward", model)
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, run, index)
        reshard_all(model)
        run.note_registration(f"step {index}, resharded", model)


def reshard_all(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@pytest.mark.row("R4")
@training_test(tolerance=BITWISE)
def test_replicated_parameters_change_dtype(run: TrainingRun) -> None:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = run.shard(mlps(), annotate=units_of(Mlp))
        model.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    run.note_registration("converted", model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
    for index in range(3):
        loss = model(models.features(index, run.rank)[0].double()).square().mean()
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=index % 2 == 1)
    run.note("dtypes", [str(p.dtype) for p in model.parameters()])


@pytest.mark.row("R5")
@pytest.mark.parametrize("build", [models.Uneven, models.ReadThrice, Mlp])
@training_test(tolerance=BITWISE)
def test_one_replicated_unit_has_one_all_reduce(run: TrainingRun, build: Callable[[], nn.Module]) -> None:
    train(run, run.shard(build(), annotate=units_of()), all_reduce=1)


@pytest.mark.row("R6")
@training_test(mesh_axes=("replicate",), tolerance=BITWISE)
def test_replicated_blocks_have_one_all_reduce_each(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(layers=2), annotate=units_of(models.DecoderBlock))
    train(run, model, all_reduce=3)


@pytest.mark.row("R6")
@training_test(
    backends=("inductor",),
    tolerance=Ulps(64, "Inductor fuses pointwise chains and sums in vector lanes", atol=2e-6),
)
def test_replicated_blocks_within_inductors_rounding(run: TrainingRun) -> None:
    model = run.shard(models.mlps(2), annotate=units_of(models.Mlp))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.train(model, optimizer, loss_of, steps=2)


@pytest.mark.row("R7")
@training_test(tolerance=BITWISE)
def test_offloaded_replicated_blocks(run: TrainingRun) -> None:
    annotate = units_of(models.DecoderBlock, offload_policy=CPUOffloadPolicy(pin_memory=False))
    train(run, run.shard(models.Decoder(layers=2), annotate=annotate), all_reduce=3)


@pytest.mark.row("R8")
@training_test(tolerance=BITWISE)
def test_replicated_child_runs_by_itself(run: TrainingRun) -> None:
    model = run.shard(nn.Sequential(*(Mlp() for _ in range(MLPS))), annotate=units_of(Mlp))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for index, module in enumerate([model, model[0], model, model[0]]):
        loss = loss_of(module, run, index)
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()
    run.observe(loss_of(model, run, 4), model)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = Mlp(), nn.Linear(models.DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.inner(torch.tanh(self.inner(x))))
        return out


@pytest.mark.row("R9")
@training_test(tolerance=BITWISE)
def test_unit_called_twice_is_all_reduced_once(run: TrainingRun) -> None:
    train(run, run.shard(Twice(), annotate=units_of(Mlp)), all_reduce=2)


@pytest.mark.row("R10")
@training_test(tolerance=BITWISE)
def test_prefetch_setters_have_no_effect_on_replicas(run: TrainingRun) -> None:
    model = run.shard(nn.Sequential(*(Mlp() for _ in range(4))), annotate=units_of(Mlp))
    layers: Any = list(model)
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 3])
        layer.set_modules_to_backward_prefetch(layers[max(i - 2, 0) : i][::-1])
    train(run, model, all_reduce=4)


@pytest.mark.row("R11")
@training_test(tolerance=BITWISE)
def test_event_after_the_optimizers_step_is_accepted(run: TrainingRun) -> None:
    model: Any = run.shard(mlps(), annotate=units_of(Mlp))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    optimizer.register_step_post_hook(lambda *_: model.set_post_optim_event(torch.cpu.current_stream().record_event()))
    run.train(model, optimizer, loss_of)


def blocks(model: Any, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        replicate(layer, mesh=mesh)
    replicate(model, mesh=mesh)


def embed_alone(model: Any, mesh: DeviceMesh) -> None:
    """An embedding's backward does not read its weight; the last modules are one unit."""
    replicate(model.embed, mesh=mesh)
    model.embed.set_unshard_in_backward(False)
    replicate([model.norm, model.head], mesh=mesh)
    blocks(model, mesh)


def tied_together(model: Any, mesh: DeviceMesh) -> None:
    replicate([model.embed, model.head], mesh=mesh)
    blocks(model, mesh)


@pytest.mark.row("R12")
@pytest.mark.parametrize(("annotate", "tied", "all_reduce"), [(embed_alone, False, 4), (tied_together, True, 4)])
@training_test(tolerance=BITWISE)
def test_checkpointed_replicated_blocks(
    run: TrainingRun, annotate: Callable[[nn.Module, DeviceMesh], None], tied: bool, all_reduce: int
) -> None:
    model = run.shard(models.Checkpointed(layers=2, tied=tied), annotate=annotate)
    run.note_registration("sharded", model)
    train(run, model, all_reduce=all_reduce)


@pytest.mark.row("R13")
@training_test(tolerance=BITWISE)
def test_replicated_ties_are_reduced_once(run: TrainingRun) -> None:
    model = run.shard(models.Checkpointed(layers=2, tied=True), annotate=blocks)
    train(run, model, all_reduce=3)
    run.note("tied", model.head.weight is model.embed.weight)


@pytest.mark.row("R14")
@pytest.mark.parametrize(
    ("part", "all_reduce", "flag"),
    [
        ("all", MLPS + 1, "set_requires_gradient_sync"),
        ("root", MLPS + 1 + 2 * MLPS, "set_requires_all_reduce"),
        ("some", MLPS + 1 + 2 * (MLPS - 1), "set_requires_gradient_sync"),
    ],
)
@training_test(tolerance=BITWISE)
def test_replicas_left_unsynchronized_are_reduced_once(run: TrainingRun, part: str, all_reduce: int, flag: str) -> None:
    model = run.shard(mlps(), annotate=units_of(Mlp))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(2):
        with run.counted(f"step {index}") if index else nullcontext():
            for microbatch in range(3):
                for module in [model] if part != "some" else list(model)[1:MLPS]:
                    getattr(module, flag)(microbatch == 2, recurse=part != "root")
                loss = loss_of(model, run, 3 * index + microbatch)
                loss.backward()
                run.note(f"loss {index}, {microbatch}", loss)
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(index % 2))
    check_all_reduces(run, all_reduce)


@pytest.mark.row("R15")
@pytest.mark.parametrize("unshard_first", [False, True])
@training_test(tolerance=BITWISE)
def test_replicas_under_a_pipelines_flags(run: TrainingRun, unshard_first: bool) -> None:
    model = run.shard(mlps(), annotate=units_of(Mlp))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(2):
        with run.counted(f"step {index}") if index else nullcontext():
            for module in model.modules():
                if unshard_first and isinstance(module, FSDPModule):
                    module.unshard(async_op=True)
            for microbatch in range(3):
                model.set_requires_gradient_sync(microbatch == 2)
                model.set_is_last_backward(microbatch == 2)
                model.set_reshard_after_backward(microbatch == 2)
                loss = loss_of(model, run, 3 * index + microbatch)
                loss.backward()
                run.note_registration(f"{index}, {microbatch}", model)
                run.note(f"loss {index}, {microbatch}", loss)
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()
    check_all_reduces(run, MLPS + 1)


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(models.DIM), nn.Linear(models.DIM, 3)

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        normed: Tensor = self.norm(x)
        return normed

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x))
        return out


class Parent(nn.Module):
    """Calls another method of its child than `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = Features(), nn.Linear(models.DIM, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.inner.features(x))
        return out


@pytest.mark.row("R16")
@training_test(tolerance=BITWISE)
def test_registered_method_gathers_and_reduces(run: TrainingRun) -> None:
    def annotate(model: nn.Module, mesh: DeviceMesh) -> None:
        assert isinstance(model, Parent)
        units_of(Mlp)(model.inner, mesh)
        replicate(model, mesh=mesh)
        register_fsdp_forward_method(model.inner, "features")

    train(run, run.shard(Parent(), annotate=annotate), all_reduce=4)


def rows_and_columns(model: nn.Module, mesh: DeviceMesh) -> None:
    for module in list(model.modules()):
        if isinstance(module, Mlp):
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(module, mesh["tp"], plan)
            replicate(module, mesh=mesh["dp_replicate"])
    replicate(model, mesh=mesh["dp_replicate"])


@pytest.mark.row("R17")
@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=("dp_replicate", "tp"), tolerance=BITWISE)
def test_replicas_of_tensor_parallel_blocks(run: TrainingRun) -> None:
    plain = [p.detach().clone() for p in seeded_mlps().parameters()]
    model = run.shard(seeded_mlps(), annotate=rows_and_columns)
    for parameter, want in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.full_tensor(), want, rtol=0, atol=0)
    run.note_registration("sharded", model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    replica = run.mesh["dp_replicate"].get_local_rank()
    for index in range(3):
        with run.counted(f"step {index}") if index else nullcontext():
            loss = model(*models.features(index, replica)).square().mean()
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()
    run.note_registration("trained", model)


def seeded_mlps() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Mlp() for _ in range(2)))
