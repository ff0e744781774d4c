"""Small ordinary models, and their inputs, for parity tests. Nothing here knows of graphshard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DIM = 16
# Why some are skipped: where a gradient is computed in fp32, FSDP2 of torch 2.15 (`Tensor.grad_dtype`) never rounds it
# to param_dtype before it is reduced; a traced graph does, as all versions before.
ROUNDS_GRADIENTS = torch.__version__ < "2.15"
VOCAB = 31


def generator(index: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * index + rank)


def features(index: int, rank: int) -> tuple[Tensor]:
    return (torch.randn(4, DIM, generator=generator(index, rank)),)


def growing_features(index: int, rank: int) -> tuple[Tensor]:
    """A batch size that changes every step."""
    return (torch.randn(3 + index, DIM, generator=generator(index, rank)),)


def tokens(index: int, rank: int) -> tuple[Tensor]:
    return (torch.randint(0, VOCAB, (2, 6), generator=generator(index, rank)),)


def images(index: int, rank: int) -> tuple[Tensor]:
    return (torch.randn(2, 3, 8, 8, generator=generator(index, rank)),)


def sequences(index: int, rank: int) -> tuple[Tensor]:
    return (torch.randn(2, 5, DIM, generator=generator(index, rank)),)


class Mlp(nn.Module):
    """A residual block without a norm, to be a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def mlps(count: int = 3) -> Any:
    """Blocks behind a norm that is the root's own."""
    return nn.Sequential(nn.LayerNorm(DIM), *(Mlp() for _ in range(count)))


class Scale(nn.Module):
    """Scales by a parameter of its own: in a graph, or around them where told to."""

    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM), requires_grad=trained)
        self.is_plain = False

    def _scaled(self, x: Tensor) -> Tensor:
        return x * self.scale

    @torch.compiler.disable
    def _scaled_plainly(self, x: Tensor) -> Tensor:
        return x * self.scale

    def scaled(self, x: Tensor) -> Tensor:
        return self._scaled_plainly(x) if self.is_plain else self._scaled(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


def norm() -> nn.Module:
    """One operator, where `nn.RMSNorm` is traced as thirty."""
    return nn.LayerNorm(DIM, bias=False)


class DecoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(), norm()
        self.attention = Attention()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, layers: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(DecoderBlock() for _ in range(layers))
        self.norm = norm()
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        logits: Tensor = self.head(self.norm(h))
        return logits


def tied_decoder() -> nn.Module:
    return Decoder(layers=2, tied=True)


class Checkpointed(Decoder):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False)
        logits: Tensor = self.head(self.norm(h))
        return logits


class ReadThrice(nn.Module):
    """One layer is used three times in a forward, and one weight is read by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.other = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.shared(x))
        x = torch.tanh(self.shared(self.other(x)))
        x = self.shared(x)
        return x @ self.other.weight


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.BatchNorm2d(5)
        )
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x).mean((2, 3)))
        return logits


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.rnn = nn.LSTM(DIM, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rnn(self.inner(x))[0])
        return logits


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.3), nn.GELU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class LowRank(nn.Module):
    """Frozen blocks, each a unit without anything trainable, with trainable adapters beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(DIM, 2, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(2, DIM, bias=False) for _ in range(2))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for frozen, down, up in zip(self.frozen, self.down, self.up, strict=True):
            x = torch.tanh(frozen(x) + up(down(x)))
        return x


class PartlyFrozen(nn.Module):
    """Units of frozen and trainable parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)) for _ in range(2)
        )
        for layer in self.layers:
            layer[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Uneven(nn.Module):
    """Dim 0 that no world size divides, smaller than the world size, and of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(DIM, 7), nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.randn(3, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x))) * self.scale + self.bias.sum()


class Buffered(nn.Module):
    """Parameters in the root itself, and buffers, one of which each forward changes."""

    running: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / DIM)
        self.register_buffer("running", torch.zeros(DIM))
        self.register_buffer("table", torch.arange(DIM) / DIM, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        before = self.running.clone()  # which backward reads, behind the write
        with torch.no_grad():
            self.running.copy_(self.running * 0.5 + x.mean(0) * 0.5)  # exact products: some torch versions fuse them
        return ((x + self.table) @ self.weight) * (before + 1) - self.running


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Batch:
    x: Tensor
    scale: Tensor


class Nested(nn.Module):
    """kwargs and nested inputs; outputs in a dict of tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, 3)

    def forward(self, batch: Batch, *, extra: dict[str, Any], pair: Pair | None = None) -> dict[str, Any]:
        h = self.a(batch.x) * batch.scale + extra["bias"][0]
        if pair is not None:
            h = h + pair.first - pair.second
        return {"logits": self.b(torch.tanh(h)), "states": (h, [h * 2])}


def nested_inputs(index: int, rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x, y, z = torch.randn(3, 4, DIM, generator=generator(index, rank))
    return (Batch(x, torch.tensor(0.5)),), {"extra": {"bias": (y, None)}, "pair": Pair(y, z)}


class TwoHeads(nn.Module):
    """Three outputs, of which the loss uses one; a parameter that no forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(DIM, DIM)
        self.main, self.auxiliary, self.unread = nn.Linear(DIM, 3), nn.Linear(DIM, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = torch.tanh(self.body(x))
        return {"main": self.main(h), "auxiliary": (self.auxiliary(h), h)}


class Views(nn.Module):
    """Outputs that are views of what it computes, two of one tensor; the loss uses none of these."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.unused = nn.Linear(DIM, DIM), nn.Linear(DIM, 4)
        self.main, self.halves = nn.Linear(DIM, 6), nn.Linear(DIM, 8)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = torch.tanh(self.body(x))
        first, second = self.halves(h).chunk(2, 1)
        unused = self.unused(h)
        rest = second, unused[:, 1:], unused[:, :1], h[1:]
        return {"main": torch.cat([self.main(h)[:, 1:], first], 1), "rest": rest}


def main_loss(output: Any) -> Tensor:
    loss: Tensor = output["main"].square().mean()
    return loss


class BrokenBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return x + self.second(y)


class Broken(nn.Module):
    """A graph break inside every block."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(BrokenBlock() for _ in range(layers))
        self.head = nn.Linear(DIM, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class ListParameters(nn.Module):
    """Parameters in lists and dicts of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(DIM, DIM) / DIM for _ in range(3))
        self.gates = nn.ParameterDict({"a": torch.ones(DIM), "b": torch.zeros(DIM)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x * self.gates["a"] + self.gates["b"]


class Product(nn.Module):
    """No parameters; tensors inside a tuple."""

    def forward(self, x: Tensor, others: tuple[Tensor, Tensor]) -> Tensor:
        return torch.tanh(x + others[0]) * others[1]


class Biased(Mlp):
    """Has a parameter more than its base, which may be None."""

    def __init__(self, has_bias: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(DIM)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out if self.bias is None else out + self.bias


def unlike_blocks() -> nn.Sequential:
    """A block of another class, then one that has a parameter more than those behind it; each is a unit."""
    return nn.Sequential(Mlp(), *(Biased(i == 0) for i in range(3)), nn.Linear(DIM, DIM))
