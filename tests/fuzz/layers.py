"""The modules of random jobs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.cases import Case, Layer

VOCABULARY = 19
# What a layer gets: activations `[B, T, D]`, tokens `[B, T]`, activations of the embedding.
Given = tuple[Tensor, Tensor, Tensor]


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Attention(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        out: Tensor = self.out((scores @ v).transpose(1, 2).flatten(-2))
        return out


class Cross(nn.Module):
    """Reads the embedding's activations, as a decoder does its encoder's."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(dim, hidden), nn.Linear(dim, hidden)
        self.v = nn.Linear(dim, dim)

    def forward(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Tensor:
        scores = (self.q(x) @ self.k(memory).transpose(-1, -2)).softmax(-1)
        out: Tensor = scores @ self.v(memory)
        return out


class Conv(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(dim, dim, 3, padding=1)

    def forward(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Tensor:
        out: Tensor = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return out


class Norm(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm: nn.Module = nn.RMSNorm(dim) if hidden % 2 else nn.LayerNorm(dim)

    def forward(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


class LowRank(nn.Module):
    """A frozen base and two trained factors."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(hidden, dim) * 0.1), nn.Parameter(torch.randn(dim, hidden) * 0.1)

    def forward(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.a.t() @ self.b.t()
        return out


class Embedding(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, dim)

    def forward(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Tensor:
        out: Tensor = self.table(tokens)
        return out


class Lstm(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(dim, dim, batch_first=True)

    def forward(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Tensor:
        out: Tensor = self.lstm(x)[0]
        return out


class BatchNorm(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Tensor:
        out: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return out


class Buffer(nn.Module):
    """Writes a buffer in training, and reads it."""

    mean: Tensor

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.weight = nn.Parameter(torch.randn(dim))

    def forward(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.detach().float().mean((0, 1)))
        return x * self.weight + self.mean.to(x.dtype)


class Experts(nn.Module):
    """Mixes two experts by a router."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, 2)
        self.experts = nn.ModuleList([Mlp(dim, hidden) for _ in range(2)])

    def forward(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        mixed = [weights[..., i : i + 1] * expert(x, tokens, memory) for i, expert in enumerate(self.experts)]
        out: Tensor = mixed[0] + mixed[1]
        return out


class Listed(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(dim)) for _ in range(3)])

    def forward(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Tensor:
        for scale in self.scales:
            x = x + torch.tanh(x * scale)
        return x


class Scaled(nn.Module):
    """Reads a weight twice, once through `parameters()`."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.linear.weight.mean() + self.linear.bias
        return out


class Gathered(nn.Module):
    """Sends over all ranks; which of what came it reads depends on the rank."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Tensor:
        mean = self.linear(x).mean((0, 1))
        means = [torch.zeros_like(mean) for _ in range(dist.get_world_size())]
        dist.all_gather(means, mean)
        means[dist.get_rank()] = mean
        return x * torch.stack(means).mean(0)


class Reduced(nn.Module):
    """Sends over all ranks, in place of what backward needs."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Tensor:
        weights = self.linear(x).mean((0, 1)).exp()
        dist.all_reduce(weights)
        return x * weights / dist.get_world_size()


class Branch(nn.Module):
    """Which way it goes depends on its data: each rank its own."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out.sin() if out.detach().sum() > 0 else out.tanh() * 0.5


class Counter(nn.Module):
    """Counts its calls, in Python, and reads the number."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(dim, dim), 0

    def forward(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.linear(x) * (1.0 + 0.1 * (self.calls % 3))
        return out


class Kept(nn.Module):
    """Keeps a tensor from one call to the next."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        if self.kept is not None:
            out = out + self.kept
        self.kept = out.detach().mean((0, 1))
        return out


class Noisy(nn.Module):
    """Draws random numbers in training."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(dim))

    def forward(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Tensor:
        return x * self.scale + 0.1 * torch.randn_like(x) if self.training else x * self.scale


class Hooked(nn.Module):
    """Hooks of modules change what goes in and comes out."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.linear.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        self.linear.register_forward_hook(lambda module, args, out: out + args[0])

    def forward(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


class InPlace(nn.Module):
    """Writes activations in place, through views."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        out[..., 0].mul_(2.0)
        out[:, 1:].add_(x[:, :-1])
        return out.masked_fill_(tokens.eq(0).unsqueeze(-1), 0.1)


class Rounded(torch.autograd.Function):
    """Rounds; its gradient passes, scaled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return (x * scale).round() / 4

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.saved_tensors[0] / 4, None


class Custom(nn.Module):
    """A formula of its own for its gradient."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Tensor:
        out: Tensor = Rounded.apply(self.linear(x), self.linear.bias.detach().abs().mean() + 4.0)
        return out


class Nested(nn.Module):
    def __init__(self, dim: int, layer: Layer) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Block(dim, inner) for inner in layer.inner])

    def forward(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Tensor:
        for block in self.inner:
            x, _ = taken(block(x, tokens, memory))
        return x


PLAIN: dict[str, Any] = {
    "mlp": Mlp, "attention": Attention, "conv": Conv, "norm": Norm, "low_rank": LowRank, "embedding": Embedding,
    "lstm": Lstm, "batch_norm": BatchNorm, "buffer": Buffer, "cross": Cross, "experts": Experts, "list": Listed,
    "scaled": Scaled, "gathered": Gathered, "reduced": Reduced, "branch": Branch, "counter": Counter, "kept": Kept,
    "noisy": Noisy, "hooked": Hooked, "in_place": InPlace, "custom": Custom,
}  # fmt: skip


class Block(nn.Module):
    """A residual layer, with all that a `Layer` says."""

    def __init__(self, dim: int, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        self.body: nn.Module = Nested(dim, layer) if layer.kind == "nested" else PLAIN[layer.kind](dim, layer.hidden)
        self.dropout = nn.Dropout(layer.dropout)
        for number, parameter in enumerate(self.body.parameters()):
            if layer.frozen == "all" or (layer.frozen == "some" and number % 2):
                parameter.requires_grad_(False)

    def forward(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Any:
        if self.layer.checkpointed and self.training:
            out = checkpoint(self._compute, x, tokens, memory, use_reentrant=False)
        else:
            out = self._compute(x, tokens, memory)
        if self.layer.returns == "tuple":
            return out, out.square().mean()
        return {"out": out, "loss": out.abs().mean()} if self.layer.returns == "dict" else out

    def _compute(self, x: Tensor, tokens: Tensor, memory: Tensor) -> Tensor:
        x = F.layer_norm(x, x.shape[-1:])  # so that nothing overflows
        breaks = self.layer.breaks
        if breaks == "all" or (breaks == "one" and dist.get_rank() == 1):
            torch._dynamo.graph_break()
        out: Tensor = x + self.dropout(self.body(x, tokens, memory))
        return out


def taken(returned: Any) -> tuple[Tensor, Tensor | None]:
    """Activations and an auxiliary loss, of what a block returned."""
    if isinstance(returned, dict):
        return returned["out"], returned["loss"]
    if isinstance(returned, tuple):
        return returned
    return returned, None


class Net(nn.Module):
    """The model of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, case.dim)
        self.blocks = nn.ModuleList([Block(case.dim, layer) for layer in case.layers])
        self.head = nn.Linear(case.dim, VOCABULARY, bias=not case.tied)
        if case.tied:
            self.head.weight = self.embedding.weight
        if case.unused:
            self.unused = nn.Parameter(torch.randn(5, 3))
        self.again, self.recycled = [layer.again for layer in case.layers], case.recycled

    def forward(self, tokens: Tensor) -> Tensor:
        memory = x = self.embedding(tokens)
        losses: list[Tensor] = []
        if self.recycled:
            with torch.no_grad():
                before = self._through_blocks(x, tokens, memory, [])
            x = x + before
        x = self._through_blocks(x, tokens, memory, losses)
        loss = F.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten().roll(1))
        return loss + 0.1 * sum(losses)

    def _through_blocks(self, x: Tensor, tokens: Tensor, memory: Tensor, losses: list[Tensor]) -> Tensor:
        for i, block in enumerate(self.blocks):
            for called in [self.blocks[i - 1], block] if self.again[i] else [block]:
                x, loss = taken(called(x, tokens, memory))
                losses += [] if loss is None else [loss.float()]
        return x
