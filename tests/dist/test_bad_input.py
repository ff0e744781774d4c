"""Bad input: a clear error that names the argument, module or parameter, on every rank, before any collective."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest import mock

import models
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode

import graphshard
from graphshard.testing import WorkerPool


@contextmanager
def refused(error: type[Exception], message: str) -> Any:
    with CommDebugMode() as communication, pytest.raises(error, match=message):
        yield
    assert communication.get_total_counts() == 0


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def arguments() -> None:
    compile: Callable[..., Any] = graphshard.compile
    with refused(TypeError, "model: got int, want an nn.Module"):
        compile(3)
    with refused(ValueError, "backend: got 'tensorrt', want one of 'inductor', 'aot_eager', 'eager'"):
        compile(models.Decoder(), mesh(), backend="tensorrt")
    with refused(ValueError, "strategy: got 'ddp'"):
        compile(models.Decoder(), mesh(), strategy="ddp")
    with refused(ValueError, "plan: got 'best'"):
        compile(models.Decoder(), mesh(), plan="best")
    with refused(ValueError, "hardware: got 'h1000', want one of a100, b200, cpu-gloo, "):
        compile(models.Decoder(), mesh(), hardware="h1000")
    with refused(ValueError, r"memory_budget: got 0\.0, want bytes, .* or a share in \(0, 1\]"):
        compile(models.Decoder(), mesh(), memory_budget=0.0)
    with refused(TypeError, "memory_budget: got '8GB'"):
        compile(models.Decoder(), mesh(), memory_budget="8GB")
    with refused(ValueError, "memory_budget: got 100 with plan='fsdp2'"):
        compile(models.Decoder(), mesh(), plan="fsdp2", memory_budget=100)
    with refused(ValueError, "regions: got 'layer'"):
        compile(models.Decoder(), mesh(), regions="layer")
    with refused(ValueError, r"units: got 'layers\.7'"):
        compile(models.Decoder(), mesh(), units=["layers.7"])
    with refused(TypeError, "units: got 7"):
        compile(models.Decoder(), mesh(), units=[7])
    with refused(TypeError, r"units: got 'layers\.0', want a list"):
        compile(models.Decoder(), mesh(), units="layers.0")
    with refused(ValueError, "units: got 'layers', a ModuleList, which has no forward"):
        compile(models.Decoder(), mesh(), units=["layers"])
    with refused(TypeError, "mp_policy: got torch.bfloat16, want .*MixedPrecisionPolicy"):
        compile(models.Decoder(), mesh(), mp_policy=torch.bfloat16)
    for dtype in ("bf16", torch.int8):
        with refused(TypeError, f"mp_policy: got reduce_dtype={dtype!r}, want a floating-point torch.dtype"):
            compile(models.Decoder(), mesh(), mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    if not torch.accelerator.is_available():
        with refused(ValueError, "offload_policy: got pin_memory=True without an accelerator"):
            compile(models.Decoder(), mesh(), offload_policy=CPUOffloadPolicy())
    with refused(TypeError, "hardware: got 5, want a name"):
        compile(models.Decoder(), mesh(), hardware=5)
    with refused(ValueError, "reshard_after_forward: got a value with strategy='replicate', which shards nothing"):
        compile(models.Decoder(), mesh(), strategy="replicate", reshard_after_forward="auto")
    with pytest.raises(KeyError) as raised:
        compile(models.Decoder(), mesh(), shard_placement_fn=lambda param: {}["none"])
    assert "shard_placement_fn: it was called for 'embed.weight'" in raised.value.__notes__[0]
    with refused(TypeError, "dynamic: got 'no', want bool | None"):
        compile(models.Decoder(), mesh(), dynamic="no")
    with refused(TypeError, "ignored_params: got 'embed.weight' in the set"):
        compile(models.Decoder(), mesh(), ignored_params={"embed.weight"})
    with refused(TypeError, "compare_every: got True, want a number of calls, or None"):
        compile(models.Decoder(), mesh(), compare_every=True)
    with refused(ValueError, "compare_every: got 0, want at least 1 call"):
        compile(models.Decoder(), mesh(), compare_every=0)
    with refused(ValueError, "mesh: got 2 axes without names"):
        compile(models.Decoder(), init_device_mesh("cpu", (1, 2)))
    with mock.patch.dict("os.environ", GRAPHSHARD_VERIFY="9"), refused(ValueError, "GRAPHSHARD_VERIFY: got '9'"):
        compile(models.Decoder(), mesh())
    with refused(TypeError, "mesh: got str"):
        compile(models.Decoder(), "cpu")
    with refused(ValueError, "not compiled; call graphshard.compile first"):
        graphshard.report(models.Decoder())
    with refused(TypeError, "eager: got str"), graphshard.eager("model"):  # type: ignore[arg-type]
        pass


def test_arguments(two_ranks: WorkerPool) -> None:
    two_ranks.run(arguments)


def meshes() -> None:
    with refused(ValueError, "mesh: got 3 axes, want 1"):
        graphshard.compile(models.Decoder(), init_device_mesh("cpu", (1, 1, 2)))
    elsewhere = mock.Mock(spec=DeviceMesh, ndim=1, device_type="cuda")
    elsewhere.__class__ = DeviceMesh
    with refused(ValueError, r"parameter 'embed\.weight' is on cpu, but the mesh is on cuda"):
        graphshard.compile(models.Decoder(), elsewhere)
    annotated = models.Decoder()
    fully_shard(annotated, mesh=mesh())
    with refused(ValueError, "the model is annotated with"):
        graphshard.compile(annotated, init_device_mesh("cpu", (1, 2)))
    with refused(ValueError, "reshard_after_forward: the model is annotated already"):
        graphshard.compile(annotated, reshard_after_forward=True)
    with refused(ValueError, "strategy: got 'replicate', but fully_shard has sharded the model"):
        graphshard.compile(annotated, strategy="replicate")


def test_meshes(two_ranks: WorkerPool) -> None:
    two_ranks.run(meshes)


def compiled_twice() -> None:
    model = graphshard.compile(models.Decoder(), mesh(), backend="aot_eager")
    with refused(RuntimeError, "compiled already"):
        graphshard.compile(model, mesh())
    with refused(RuntimeError, "compiled already"):
        graphshard.compile(nn.Sequential(model))


def test_compiling_twice(two_ranks: WorkerPool) -> None:
    two_ranks.run(compiled_twice)


def refused_parameters() -> None:
    model = models.Decoder()
    model.scale = nn.Parameter(torch.tensor(1.0))
    with refused(ValueError, "parameter 'scale' is a scalar"):
        graphshard.compile(model, mesh())
    assert not isinstance(model.layers[0], torch.distributed.fsdp.FSDPModule)  # nothing was sharded before
    model.scale = nn.Parameter(torch.ones(3, 2).t())
    with refused(NotImplementedError, "parameter 'scale' of shape .* not contiguous ones"):
        graphshard.compile(model, mesh())
    with refused(ValueError, "parameter 'weight' is not initialized yet"):
        graphshard.compile(nn.LazyLinear(3), mesh())


def test_parameters_that_fsdp2_refuses(two_ranks: WorkerPool) -> None:
    two_ranks.run(refused_parameters)


def torch_version() -> None:
    with mock.patch("torch.__version__", "2.9.1"), refused(RuntimeError, r"got torch 2\.9\.1, want 2\.11 to 2\.15"):
        graphshard.compile(models.Decoder(), mesh())


def test_torch_version(two_ranks: WorkerPool) -> None:
    two_ranks.run(torch_version)


def test_no_process_group() -> None:
    with pytest.raises(RuntimeError, match="init_process_group first"):
        graphshard.compile(models.Decoder())


def tie_across_units() -> None:
    model = models.Decoder()
    model.layers[0].up.weight = model.layers[1].up.weight
    for layer in model.layers:
        fully_shard(layer, mesh=mesh())
    fully_shard(model, mesh=mesh())
    graphshard.compile(model, backend="aot_eager")
    with refused(ValueError, "already managed by another"):
        model(*models.tokens(0, 0))


@pytest.mark.skipif(torch.__version__ < "2.12", reason="FSDP2 checks ties across units from torch 2.12 on")
def test_tie_across_units(two_ranks: WorkerPool) -> None:
    two_ranks.run(tie_across_units)


def strict_under_a_dispatch_mode() -> None:
    model = graphshard.compile(models.mlps(1), mesh(), backend="aot_eager", strict=True)
    x = models.features(0, torch.distributed.get_rank())[0]
    with refused(graphshard.UnsupportedModel, "a call under a TorchDispatchMode would run in eager FSDP2.*strict=True"):
        model(x)  # `refused` has such a mode
    model(x).sum().backward()


def test_strict_model_refuses_a_call_that_would_run_in_eager_fsdp2(two_ranks: WorkerPool) -> None:
    two_ranks.run(strict_under_a_dispatch_mode)


def small_budget() -> str:
    model = graphshard.compile(models.Decoder(), mesh(), backend="aot_eager", memory_budget=1000)
    with pytest.raises(ValueError) as caught:
        model(*models.tokens(0, 0))
    with graphshard.eager(model):  # nothing was lost
        model(*models.tokens(0, 0)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return str(caught.value)


def test_budget_below_any_plan_says_the_least_and_the_unit_on_every_rank(two_ranks: WorkerPool) -> None:
    one, other = two_ranks.run(small_budget)
    assert one == other
    assert re.match(
        r"memory_budget: got 1000 bytes for forward, want at least \d{5}: .*, where unit '.*' gathers \d+ bytes; "
        r"memory_budget: got 1000 bytes for backward, want at least \d{5}: ",
        one,
    )


# What the ranks say that they have -> arguments on the first and the second.
OTHERS: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {
    ("memory_budget as FSDP2", "memory_budget 1000000000"): ({}, {"memory_budget": 10**9}),
    ("hardware cpu-gloo ", "hardware h100 "): ({}, {"hardware": "h100"}),
    ("reshard_after_forward planned", "reshard_after_forward given"): ({}, {"reshard_after_forward": False}),
    (", freed after forward: ", ", kept after forward: "): (
        {"reshard_after_forward": True},
        {"reshard_after_forward": False},
    ),
    ("(16,) torch.float32,", "(16,) torch.float32 gathered as torch.bfloat16"): (
        {},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    ),
}


def other_settings() -> list[str]:
    odd = torch.distributed.get_rank() == 1
    found = []
    for options in OTHERS.values():
        model = graphshard.compile(models.Decoder(layers=1), mesh(), backend="aot_eager", **options[odd])
        with pytest.raises(graphshard.RanksDiffer) as caught:
            model(*models.tokens(0, 0))
        found.append(str(caught.value))
        with pytest.raises(graphshard.RanksDiffer):  # again: nothing may run
            model(*models.tokens(0, 0))
    model = graphshard.compile(models.Decoder(layers=3 if odd else 2), mesh(), backend="aot_eager")
    with pytest.raises(graphshard.RanksDiffer) as caught:
        model(*models.tokens(0, 0))
    return [*found, str(caught.value)]


def test_ranks_with_other_settings_or_models_are_told_so_before_any_collective(two_ranks: WorkerPool) -> None:
    for rank, lines in enumerate(two_ranks.run(other_settings)):
        assert all("ranks differ in what their programs depend on" in line for line in lines)
        for line, said in zip(lines, OTHERS, strict=False):
            mine, other = said[rank], said[1 - rank]
            assert re.search(rf"got '[^']*{re.escape(mine)}[^']*' on rank {rank} and '[^']*{re.escape(other)}", line)
        assert "'the end'" in lines[-1] and "'unit layers.2, freed after forward: " in lines[-1]


def bad_placements() -> None:
    def compile_with(placement: object) -> nn.Module:
        model = nn.Sequential(nn.Linear(16, 7))
        before = list(model.parameters())
        try:
            return graphshard.compile(model, mesh(), shard_placement_fn=lambda parameter: placement)
        finally:
            assert list(model.parameters()) == before  # nothing was sharded

    for placement, error, message in (
        ("row", ValueError, r"parameter '0\.weight' of shape \(7, 16\): got 'row', want a Shard or None"),
        (Shard(2), ValueError, r"got S\(2\)|Shard\(dim=2\), want a dim in \[-2, 1\]"),
    ):
        with pytest.raises(error, match=message):
            compile_with(placement)
    with pytest.raises(NotImplementedError, match=r"'weight' of shape \(16, 7\).* does not divide evenly by 2 ranks"):
        graphshard.compile(nn.Linear(7, 16), mesh(), shard_placement_fn=lambda p: Shard(p.ndim - 1))


def test_bad_placements_are_refused_before_anything_is_sharded(two_ranks: WorkerPool) -> None:
    two_ranks.run(bad_placements)


def replaced_parameter() -> None:
    model = graphshard.compile(models.Decoder(layers=2), mesh(), backend="aot_eager")
    model(*models.tokens(0, 0)).square().mean().backward()
    model.head.weight = nn.Parameter(torch.zeros(models.VOCAB, models.DIM))
    with pytest.raises(RuntimeError, match=r"parameter 'head\.weight' was replaced"):
        model(*models.tokens(0, 0))


def test_replaced_parameter_is_noticed(two_ranks: WorkerPool) -> None:
    two_ranks.run(replaced_parameter)


def sparse_gradient() -> None:
    model = graphshard.compile(
        nn.Sequential(nn.Embedding(8, 16, sparse=True), models.mlps()), mesh(), backend="aot_eager"
    )
    with pytest.raises(graphshard.UnsupportedModel, match=r"0\.weight: its gradient is a sparse tensor.*sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()


def test_sparse_gradient_is_named(two_ranks: WorkerPool) -> None:
    two_ranks.run(sparse_gradient)
