"""Equal blocks are traced and parted once: results, and what is saved, are those of blocks traced one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import traced_model
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from traced_model import Traced

from graphshard.lowering.traced_blocks import compile_traced_once

BATCH, DIM = 3, 8


class Block(nn.Module):
    def __init__(self, last: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.last = last or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(torch.relu(self.up(self.norm(x))).view(x.shape[0], -1))
        out: Tensor = x + self.last(hidden)
        return out


Step = Callable[[nn.Module, Tensor, Tensor], Tensor]


def plain(layer: nn.Module, x: Tensor, first: Tensor) -> Tensor:
    out: Tensor = layer(x)
    return out


def skip(layer: nn.Module, x: Tensor, first: Tensor) -> Tensor:
    """Every block reads one value, more than once each."""
    out: Tensor = layer(x * first) + functional.normalize(first) * first
    return out


def checkpointed(layer: nn.Module, x: Tensor, first: Tensor) -> Tensor:
    out: Tensor = checkpoint(layer, x, use_reentrant=False)
    return out


def in_other_modes(layer: nn.Module, x: Tensor, first: Tensor) -> Tensor:
    """As of a model that does some of each block in other modes."""
    with torch.no_grad():
        scale = first.abs().mean(-1, keepdim=True)
    with torch.autocast("cpu", torch.bfloat16):
        out: Tensor = layer(x)
    return out.float() * scale


def making_a_module(layer: nn.Module, x: Tensor, first: Tensor) -> Tensor:
    """Dynamo keeps a node of what torch logs of it."""
    out: Tensor = nn.ModuleList([layer])[:1][0](x)
    return out


def written(layer: nn.Module, x: Tensor, first: Tensor) -> Tensor:
    out: Tensor = layer(x).mul_(2)
    return out


def written_in_part(layer: nn.Module, x: Tensor, first: Tensor) -> Tensor:
    out: Tensor = layer(x)
    out[:, 1:] = out[:, 1:] * 2
    return out


def scaled(layer: nn.Module, x: Tensor, first: Tensor) -> Tensor:
    out: Tensor = layer(x) / (first.shape[0] + 1)
    return out


class Stack(nn.Module):
    def __init__(self, step: Step, layers: int = 6, **of: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(**of) for _ in range(layers))
        self.step = step

    def forward(self, x: Tensor) -> Any:
        x = first = x.sin()
        for layer in self.layers:
            x = self.step(layer, x, first)
        return x


@pytest.mark.parametrize("dynamic", [False, True], ids=["numbers", "symbols"])
@pytest.mark.parametrize(
    ("step", "calls"),
    [
        (plain, 6),
        (skip, 4),
        (checkpointed, 6),
        (written, 6),
        (in_other_modes, 5),
        (written_in_part, 6),
        (making_a_module, 6),
        (scaled, 6),
    ],
)
def test_results_and_gradients_are_those_of_blocks_traced_one_by_one(
    step: Step, calls: int, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Stack(step, last=nn.Dropout(0.5))
    found = []
    for disabled in ("", "collapse_blocks"):
        monkeypatch.setenv("GRAPHSHARD_DISABLE", disabled)
        traced = Traced(model, None if dynamic else False)
        torch.manual_seed(1)
        x = torch.randn(BATCH, DIM, requires_grad=True)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        model.zero_grad()
        traced.run(x).square().sum().backward()
        first_counts = dynamic and step is scaled  # for all others
        assert traced.calls == (0 if disabled else calls - first_counts) and not traced.report.notes
        found.append((traced.saved_bytes(), [x.grad, *(p.grad for p in model.parameters())]))
    (saved_bytes, grads), (want_bytes, want_grads) = found
    # What several blocks compute of one value alike is one node where they are traced one by one, and saved once.
    assert saved_bytes <= (1.05 if step in (skip, in_other_modes) else 1.0) * want_bytes
    for grad, want in zip(grads, want_grads, strict=True):
        assert torch.equal(grad, want)


def budgeted(model: nn.Module, x: Tensor) -> Any:
    with torch.autograd.graph.region_activation_memory_budget(0.2):
        return model(x)


@pytest.mark.parametrize("annotated", [False, True])
def test_blocks_of_a_graph_with_a_budget_of_activations_are_traced_one_by_one(annotated: bool) -> None:
    if annotated and not hasattr(torch.autograd.graph, "region_activation_memory_budget"):
        pytest.skip("this torch has no budgets of regions")
    model = Stack(plain)
    traced = Traced(functools.partial(budgeted, model) if annotated else model)
    with torch._functorch.config.patch(activation_memory_budget=1.0 if annotated else 0.2):
        traced.run(torch.ones(BATCH, DIM, requires_grad=True)).square().sum().backward()
    assert traced.calls == 0
    assert traced.report.notes == ["equal blocks are traced one by one: a budget of activations is for all of a graph"]


def test_values_that_are_also_returned_keep_the_order_of_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hidden(Stack):
        def forward(self, x: Tensor) -> Any:
            states = [x.sin()]
            for layer in self.layers:
                states.append(layer(states[-1]))
            return torch.stack(states).square().sum() + states[2].sum()

    model, found = Hidden(plain, layers=8), []
    for disabled in ("", "collapse_blocks"):
        monkeypatch.setenv("GRAPHSHARD_DISABLE", disabled)
        traced, x = Traced(model), torch.ones(BATCH, DIM, requires_grad=True)
        model.zero_grad()
        traced.run(x).backward()
        found.append((traced.calls, x.grad, *(p.grad for p in model.parameters())))
    (calls, *grads), (none, *want_grads) = found
    assert calls >= 5 and none == 0
    assert all(map(torch.equal, grads, want_grads))


def test_inference_is_traced_once_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = Stack(plain), []
    for disabled in ("", "collapse_blocks"):
        monkeypatch.setenv("GRAPHSHARD_DISABLE", disabled)
        traced = Traced(model)
        with torch.no_grad():
            found.append((traced.run(torch.ones(BATCH, DIM)), traced.lines("inference"), traced.calls))
    (result, lines, calls), (want, want_lines, _) = found
    assert torch.equal(result, want) and lines == want_lines and calls == 6


class Overwritten(Stack):
    """What all blocks read has another view, and is written behind them or between them."""

    def __init__(self, between: bool) -> None:
        super().__init__(plain, layers=10)
        self.between = between

    def forward(self, x: Tensor) -> Any:
        read = x.sin()
        view = read.view(-1)
        for number, layer in enumerate(self.layers):
            x = layer(x) + read
            if self.between and number == 4:
                view.mul_(3.0)
        if not self.between:
            read.mul_(3.0)
        return x + view.view_as(x)


class Conjugated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(6))

    def forward(self, x: Tensor) -> Any:
        z = torch.complex(x, x)
        for layer in self.layers:
            y = torch.view_as_real(z.resolve_conj()).sum(-1)
            z = (z * torch.complex(layer(y), y)).conj()
        return torch.view_as_real(z.resolve_conj())


class Unread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor) -> Any:
        sums = []
        for layer in self.layers:
            x = layer(x)
            sums.append(x.mean(0).exp())
        return x, torch.stack(sums).detach()


class Transposed(nn.Module):
    """What is behind its blocks is in other strides than what they return, and so are the gradients that come."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor) -> Any:
        x = x.sin()
        for layer in self.layers:
            x = layer(x)
        return (x.t().contiguous() * 2,)


class HandingOn(nn.Module):
    """Blocks that a value enters by an alias, and leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(6))
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Any:
        bias = self.last(x)
        for layer in self.layers:
            bias = torch.ops.aten.alias.default(bias)
            x = (layer(x + bias) * bias).sin() + bias.exp()
        return x * bias, bias.detach()


def compared(model: nn.Module) -> Traced:
    """A captured model whose results and gradients are those of eager."""
    traced, found = Traced(model), []
    for run in (traced.run, model):
        x = torch.linspace(-1, 1, BATCH * DIM).view(BATCH, DIM).requires_grad_()
        model.zero_grad()
        results = run(x)
        results[0].square().sum().backward()
        found.append([*results, x.grad, *(param.grad for param in model.parameters())])
    assert all(map(torch.equal, *found))
    return traced


def test_blocks_hand_on_what_they_are_given() -> None:
    traced = compared(HandingOn())
    assert traced.calls >= 5 and not traced.report.notes


def test_gradients_in_other_strides_than_their_values(recwarn: pytest.WarningsRecorder) -> None:
    traced = compared(Transposed())
    if torch.__version__ < "2.13":  # AOTAutograd traces with contiguous gradients only
        said = "equal blocks are traced one by one: a gradient has strides (1, 3), another (8, 1)"
        assert traced.calls == 0 and traced.report.notes == [said]
    else:
        assert traced.calls == 6 and not traced.report.notes
    assert not [warning for warning in recwarn if "Error detected" in str(warning.message)]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Stack(plain, last=nn.BatchNorm1d(DIM)), "they write what they read"),
        (Unread(), "the loss does not depend on all that a block returns"),
        (Overwritten(between=False), "what they read is written in place elsewhere"),
        (Overwritten(between=True), "what they read is written in place elsewhere"),
        (Conjugated(), "what goes in or out is conjugated or negated lazily"),
    ],
)
def test_blocks_that_cannot_be_traced_once_are_traced_one_by_one(model: nn.Module, said: str) -> None:
    traced, found = Traced(model), []
    for run in (traced.run, model):
        x = torch.ones(BATCH, DIM, requires_grad=True)
        result = run(x)
        loss = result[0] if isinstance(result, tuple) else result
        loss.sum().backward()
        found.append((loss, x.grad))
    assert all(map(torch.equal, *found))
    assert traced.calls == 0
    assert traced.report.notes == [f"equal blocks are traced one by one: {said}"]


def test_gradients_that_fake_values_did_not_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_stale(gm: GraphModule, *rest: Any) -> Any:
        for node in gm.graph.find_nodes(op="placeholder"):
            node.meta["example_value"] = node.meta["example_value"].detach()
        return compile_traced_once(gm, *rest)

    monkeypatch.setattr(traced_model, "compile_traced_once", compile_stale)
    model, x, found = Stack(plain), torch.ones(BATCH, DIM), []
    traced = Traced(model)
    for run in (traced.run, model):
        model.zero_grad()
        run(x).sum().backward()
        found.append([param.grad for param in model.parameters()])
    assert all(map(torch.equal, *found))
    (note,) = traced.report.notes
    assert note.endswith("a value needs a gradient that it did not need when it was captured")


def test_blocks_in_other_modes_are_left_alone() -> None:
    class Modes(Stack):
        def forward(self, x: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                x = super().forward(x)
            with torch.no_grad():
                return super().forward(x.float())

    traced = Traced(Modes(plain))
    traced.run(torch.ones(BATCH, DIM))
    assert traced.calls == 0 and not traced.report.notes


def test_blocks_of_other_sizes_or_flags_have_bodies_of_their_own() -> None:
    model = Stack(plain, layers=8)
    for layer in model.layers[4:]:
        layer.norm.eps = 1e-3
    traced = Traced(model)
    traced.run(torch.ones(BATCH, DIM, requires_grad=True)).sum().backward()
    assert traced.calls == 8 and traced.report.traced_once == (8, 2)


def test_blocks_of_a_sliced_list_are_traced_once() -> None:
    """A slice is a module that is made in forward, of which Dynamo leaves a trace in the graph."""

    class Sliced(Stack):
        def forward(self, x: Tensor) -> Any:
            x = x.sin()
            for layer in self.layers[:5]:
                x = layer(x)
            return x

    model = Sliced(plain)
    traced, found = Traced(model), []
    for run in (traced.run, model):
        x = torch.ones(BATCH, DIM, requires_grad=True)
        loss = run(x).sum()
        loss.backward()
        found.append((loss, x.grad))
    assert all(map(torch.equal, *found))
    assert traced.report.traced_once == (5, 1)


def saving_matmuls(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


def saving_nothing(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


class Selective(Stack):
    """Each half of the layers is checkpointed by a policy of its own; each call makes its contexts anew."""

    def forward(self, x: Tensor) -> Any:
        x = x.sin()
        for number, layer in enumerate(self.layers):
            policy = saving_matmuls if 2 * number < len(self.layers) else saving_nothing
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        return x


def test_blocks_that_are_checkpointed_otherwise_have_bodies_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, saved_bytes = Selective(plain, layers=8), []
    for disabled in ("", "collapse_blocks"):
        monkeypatch.setenv("GRAPHSHARD_DISABLE", disabled)
        traced = Traced(model)
        traced.run(torch.ones(BATCH, DIM, requires_grad=True)).sin().sum().backward()
        saved_bytes.append(traced.saved_bytes())
        assert traced.report.traced_once == ((0, 0) if disabled else (8, 2))
    assert saved_bytes[0] == saved_bytes[1]
