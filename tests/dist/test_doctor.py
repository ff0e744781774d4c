"""Verdicts of `graphshard.doctor` are what `compile` and a step do: each is shown by both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from extended_tensors import Rounded
from models import DIM
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor

import graphshard
from graphshard.examining import Diagnosis, Finding
from graphshard.testing import WorkerPool


def linears(count: int = 2, **options: Any) -> Any:
    return nn.Sequential(*(nn.Linear(DIM, DIM, **options) for _ in range(count)))


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def the(diagnosis: Diagnosis, kind: str) -> Finding:
    (found,) = diagnosis.of_kind(kind)
    return found


def step(model: Any) -> Tensor:
    model.zero_grad()
    loss: Tensor = model(*models.features(0, torch.distributed.get_rank())).float().square().mean()
    loss.backward()
    return loss.detach()


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    return graphshard.compile(model, mesh(), backend="aot_eager", plan="fsdp2", **options)


# In torch 2.11 FSDP2 shards no integers, and Dynamo traces no compiled module.
NEWER = torch.__version__ >= "2.12"


# -- refused


class Scripted(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), torch.jit.trace(inner, torch.zeros(2, DIM))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


class Scaled(nn.Module):
    """A layer and a parameter."""

    def __init__(self, scale: Tensor, trained: bool = True) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(DIM, DIM), nn.Parameter(scale, trained)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale.abs().float()


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, DIM, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.embed((x[:, 0] > 0).long())
        return out


REFUSED_BY_COMPILE: dict[str, Callable[[], nn.Module]] = {
    "script module": lambda: Scripted(nn.Linear(DIM, DIM)),
    "scalar": lambda: Scaled(torch.ones(())),
    "uninitialized": lambda: nn.Sequential(nn.LazyLinear(DIM)),
    "strides": lambda: Scaled(torch.ones(DIM, DIM).t()),
    "complex": lambda: Scaled(torch.ones(DIM, dtype=torch.complex64)),
    "tensor subclass": lambda: Scaled(TwoTensor(torch.ones(DIM), torch.ones(DIM))),
}
REFUSED_BY_A_STEP: dict[str, Callable[[], nn.Module]] = {
    "mixed dtypes": lambda: Scaled(torch.ones(DIM, dtype=torch.bfloat16)),
    "sparse gradient": Tokens,
}


def refused() -> None:
    for kind, build in REFUSED_BY_COMPILE.items():
        found = graphshard.doctor(build(), mesh()).of_kind(kind)[0]
        with pytest.raises((ValueError, NotImplementedError)) as caught:
            compiled(build())
        assert found.verdict == "refused"
        assert found.what in str(caught.value), kind
        assert found.to_do, kind
        assert found.to_do in str(caught.value)
    for kind, build in REFUSED_BY_A_STEP.items():
        found = the(graphshard.doctor(build(), mesh()), kind)
        model = compiled(build())
        with pytest.raises(Exception, match="several dtypes" if kind == "mixed dtypes" else "sparse"):
            step(model)
        assert found.verdict == "refused", kind
    if not NEWER:
        assert the(graphshard.doctor(CompiledInside(), mesh()), "compiled inside").verdict == "refused"
        with pytest.raises(Exception, match="does not support len"):
            step(compiled(CompiledInside()))
        with pytest.raises(ValueError, match="shards floating-point numbers only"):
            compiled(Scaled(torch.arange(DIM), trained=False))
    shared = models.mlps(2)
    shared[1].up = shared[2].up
    found = the(graphshard.doctor(shared, mesh(), units=["1"]), "units")
    with pytest.raises(ValueError, match=r"'1' shares a parameter") as caught:
        compiled(shared, units=["1"])
    assert found.what in str(caught.value)


def test_what_is_refused(two_ranks: WorkerPool) -> None:
    two_ranks.run(refused)


# -- without effect


class Keeping(nn.Module):
    """Keeps a parameter, and a layer, where PyTorch does not look."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)
        self.kept, self.hidden = [self.layer.weight], [nn.Linear(DIM, DIM)]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.hidden[0](self.layer(x)) @ self.kept[0]
        return out


def ignored() -> None:
    model = Keeping()
    called: list[str] = []
    model.layer.bias.register_hook(lambda grad: called.append("hook"))
    diagnosis = graphshard.doctor(model, mesh())
    wheres = {"own parameter list": "kept", "not registered": "hidden", "parameter hook": "layer.bias"}
    for kind, where in wheres.items():
        assert (the(diagnosis, kind).where, the(diagnosis, kind).verdict) == ((where,), "ignored")
    compiled(model)
    loss = step(model)
    assert model.kept[0] is not model.layer.weight
    assert not isinstance(model.hidden[0].weight, DTensor)
    assert called == []
    with graphshard.eager(model):  # as eager FSDP2
        assert torch.equal(step(model), loss)
    assert called == []

    partly = linears()
    fully_shard(partly[0], mesh=mesh())
    found = the(graphshard.doctor(partly), "in no unit")
    assert (found.where, found.verdict) == (("1.weight", "1.bias"), "ignored")
    compile_annotated(partly)
    partly[1].weight.register_hook(lambda grad: called.append("plain"))
    step(partly)
    assert called == ["plain"]
    assert not isinstance(partly[1].weight.grad, DTensor)


def compile_annotated(model: nn.Module) -> nn.Module:
    return graphshard.compile(model, backend="aot_eager", plan="fsdp2")


def test_what_has_no_effect(two_ranks: WorkerPool) -> None:
    two_ranks.run(ignored)


# -- in eager


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(DIM, DIM, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rnn(x[None])[0]
        return out


class CompiledInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), torch.compile(nn.Linear(DIM, DIM), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.spare = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        out: Tensor = self.second(x)
        return out


EAGER: dict[str, Callable[[], nn.Module]] = {
    "recurrent": Recurrent,
    **({"compiled inside": CompiledInside} if NEWER else {}),
    "graph break": Broken,
}


def eager() -> None:
    for kind, build in EAGER.items():
        torch.manual_seed(0)
        model = build()
        diagnosis = graphshard.doctor(model, mesh(), models.features(0, 0))
        assert the(diagnosis, kind).verdict == "eager"
        compiled(model)
        loss = step(model)
        report = graphshard.report(model)
        outside = report.eager_unshards or any(record.region < 0 for record in report.programs) or report.regions > 1
        assert outside, (kind, str(report))
        assert not report.eager_unshards or kind == "recurrent"
        said = [line for finding in graphshard.doctor(model).of_kind("said by the run") for line in [finding.what]]
        assert said, kind
        if isinstance(model, Broken):
            assert "gathered with its unit" in the(diagnosis, "unused").what
            assert model.spare.grad is None
            assert {"unshard": 1}.items() <= Counter(record.direction for record in report.programs).items()
        with graphshard.eager(model):
            assert torch.equal(step(model), loss), kind


def test_what_runs_in_eager(two_ranks: WorkerPool) -> None:
    two_ranks.run(eager)


# -- handled


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Frozen(nn.Module):
    """Numbers that are no floats, others of another dtype, and none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(DIM, DIM))
        self.norm = nn.LayerNorm(DIM, dtype=torch.bfloat16).requires_grad_(False)
        order = torch.arange(DIM)
        if NEWER:
            self.order = nn.Parameter(order, requires_grad=False)
        else:
            self.register_buffer("order", order)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.uneven, self.spare = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))
        self.also = self.uneven
        self.layer.register_forward_hook(lambda _, inputs, output: output * 2)
        self.layer.register_full_backward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x * self.uneven.sum() * self.also.mean())[:, self.order]
        return self.norm(x.bfloat16()).float() + self.empty.sum()


HANDLED = {
    "frozen": ("norm.weight", "norm.bias", "order"),
    **({"not floating": ("order",)} if NEWER else {}),
    "no elements": ("empty",),
    "mixed dtypes": ("",),
    "uneven": ("uneven", "spare", "layer.parametrizations.weight.original0"),
    "tied": ("uneven = also",),
    "unused": ("spare",),
    "parametrization": ("layer",),
    "forward hook": ("layer",),
    "backward hook": ("layer",),
}


def handled() -> None:
    model = Frozen()
    diagnosis = graphshard.doctor(model, mesh(), models.features(0, 0))
    for kind, where in HANDLED.items():
        found = the(diagnosis, kind)
        assert found.verdict == "handled", kind
        assert set(found.where) <= set(where), (kind, found.where)
    assert not diagnosis.refused
    compiled(model, strict=True)
    loss = step(model)
    assert model.spare.grad is None
    assert model.norm.weight.grad is None
    report = graphshard.report(model)
    assert not report.eager_unshards or not NEWER  # Dynamo of torch 2.11 breaks the graph at the backward hook
    with graphshard.eager(model), torch.no_grad():
        assert torch.equal(model(*models.features(0, torch.distributed.get_rank())).float().square().mean(), loss)

    with torch.device("meta"):
        model = linears()
    found = the(graphshard.doctor(model, mesh()), "meta parameter")
    assert (found.verdict, len(found.where)) == ("handled", 4)
    compiled(model)
    with pytest.raises(RuntimeError, match="materialized from meta"):
        step(model)
    model.to_empty(device="cpu")
    nn.init.ones_(model[0].weight)
    step(model)

    scripted = Scripted(Doubling())
    assert the(graphshard.doctor(scripted, mesh()), "script module").verdict == "handled"
    compiled(scripted)
    loss = step(scripted)
    with graphshard.eager(scripted):
        assert torch.equal(step(scripted), loss)

    extended = Scaled(torch.ones(DIM))
    extended.layer.weight = nn.Parameter(Rounded(extended.layer.weight.detach()))
    found = the(graphshard.doctor(extended, mesh()), "all-gather extension")
    assert (found.where, found.verdict) == (("layer.weight",), "handled")
    compiled(extended)  # what it trains like: test_extensions


def test_what_is_handled(two_ranks: WorkerPool) -> None:
    two_ranks.run(handled)


# -- when it is called


def at_any_time() -> None:
    """On one rank alone: nothing is sent. The same is found of a plain, an annotated and a compiled model."""
    alone = torch.distributed.get_rank() == 0
    first, second = models.mlps(2), models.mlps(2)
    found: list[Any] = []

    def look(model: nn.Module, *given: Any) -> None:
        if alone:
            diagnosis = graphshard.doctor(model, *given, models.features(0, 0))
            found.append((diagnosis.state, diagnosis.shards, [finding.kind for finding in diagnosis.findings]))

    for layer in (*first, *second):
        layer.register_parameter("spare", nn.Parameter(torch.ones(3)))
    look(first, mesh())
    compiled(first)
    look(first, None)
    step(first)
    look(first, None)
    step(first)
    for layer in (*second, second):
        fully_shard(layer, mesh=mesh())
    look(second, None)
    step(second)
    look(second, None)
    if alone:
        states = ["plain", "compiled", "compiled", "annotated", "annotated"]
        assert found == [(state, 2, ["uneven", "unused"]) for state in states]
    assert not graphshard.report(first).notes
    assert graphshard.report(first).regions == 1


def test_a_look_at_any_time(two_ranks: WorkerPool) -> None:
    two_ranks.run(at_any_time)
