"""What users do besides a plain step, with each system as its page shows it: does it train as eager FSDP2 does?

Losses of three steps are compared within a bound, since most systems compile; a backend without Inductor's rounding is
enough to see what fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import graphshard
from bench.harness.systems import SystemName
from graphshard.testing import RankFailed, pool

WIDTH, VOCAB, BATCH, STEPS = 16, 11, 4, 3
BOUND = 1e-5  # of a loss: systems sum in other orders
TIMEOUT_S = 90.0
BACKEND = "aot_eager"


class Feature(NamedTuple):
    """Something that users do.

    Attributes:
        model: options of `Net` that are on.
        microbatches: of a step; all but the last communicate nothing.
        rows: of the batch in each step, on each rank.
        clip: whether gradients are clipped by their norm.
        evaluates: whether a forward without gradients stands between steps.
    """

    model: tuple[str, ...] = ()
    microbatches: int = 1
    rows: Callable[[int, int], int] = lambda step, rank: BATCH
    clip: bool = False
    evaluates: bool = False


FEATURES = {
    "plain steps": Feature(),
    "tied embedding and head": Feature(("tied",)),
    "a graph break in each block": Feature(("breaks",)),
    "checkpointed blocks": Feature(("checkpointed",)),
    "frozen parameters": Feature(("frozen",)),
    "a parameter without a gradient": Feature(("unused",)),
    "a branch by the data": Feature(("branches",)),
    "accumulation without communication": Feature(microbatches=3),
    "batches of changing size": Feature(rows=lambda step, rank: BATCH + step),
    "other batches on each rank": Feature(rows=lambda step, rank: BATCH + step * rank),
    "clipped by the norm of all": Feature(clip=True),
    "evaluation between steps": Feature(evaluates=True),
    "a penalty on a gradient, in forward": Feature(("penalized",)),
    "features of all ranks in a loss": Feature(("contrasted",)),
}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _outside_graphs() -> None:
    """A graph break."""


class Block(nn.Module):
    """A feed-forward block, with what a feature asks for."""

    def __init__(self, breaks: bool, unused: bool, branches: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH)) if unused else None
        self._breaks, self._branches = breaks, branches

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        if self._breaks:
            _outside_graphs()
        if self._branches and h.sum() > 0:
            h = -h
        out: Tensor = x + self.down(torch.tanh(h))
        return out


class Net(nn.Module):
    """A small language model; called with tokens and targets, it gives the loss."""

    def __init__(
        self,
        *,
        tied: bool = False,
        checkpointed: bool = False,
        frozen: bool = False,
        breaks: bool = False,
        unused: bool = False,
        branches: bool = False,
        penalized: bool = False,
        contrasted: bool = False,
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block(breaks, unused, branches) for _ in range(3))
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            for block in self.blocks:
                block.up.requires_grad_(False)  # type: ignore[union-attr, operator]
        self._checkpointed, self._penalized, self._contrasted = checkpointed, penalized, contrasted

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = embedded = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._checkpointed else block(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        if self._penalized:
            (grad,) = torch.autograd.grad(loss, embedded, create_graph=True)
            loss = loss + 10 * grad.square().sum()
        return loss + _contrast(x.mean(1)) if self._contrasted else loss


def _contrast(features: Tensor) -> Tensor:
    """Beside those of other ranks, which have no gradient, as in CLIP without `gather_with_grad`."""
    gathered = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, features)
    gathered[dist.get_rank()] = features
    likely = nn.functional.log_softmax(features @ torch.cat(gathered).T, dim=1)
    first = dist.get_rank() * len(features)
    return -likely[:, first : first + len(features)].diagonal().mean()


# -- systems, by the lines that a user adds


def prepared(name: SystemName | None, model: nn.Module, mesh: DeviceMesh) -> Any:
    """What is called instead of the model. None: eager DDP, which shards nothing."""
    blocks: Any = model.blocks
    if name is None:
        return DistributedDataParallel(model)
    if name == "graphshard":
        return graphshard.compile(model, mesh, backend=BACKEND)
    if name == "ddp+compile":
        return DistributedDataParallel(torch.compile(model, backend=BACKEND))
    if name == "simplefsdp":
        from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

        return torch.compile(data_parallel(model, mesh, "fully_shard"), backend=BACKEND)
    shard: Any = replicate if name == "replicate+compile" else fully_shard
    for i, block in enumerate(blocks):
        if name != "fsdp2":
            blocks[i] = torch.compile(block, backend=BACKEND)
        shard(blocks[i], mesh=mesh)
    shard(model, mesh=mesh)
    return model


def without_reductions(called: Any) -> AbstractContextManager[object]:
    """Backwards inside communicate no gradients.

    Raises:
        NotImplementedError: the system has nothing for it.
    """
    if isinstance(called, DistributedDataParallel):
        return called.no_sync()
    if not hasattr(called, "set_requires_gradient_sync"):
        raise NotImplementedError("no way to leave reductions out")
    return nullcontext(called.set_requires_gradient_sync(False))


def _synchronize(called: Any) -> None:
    if hasattr(called, "set_requires_gradient_sync"):
        called.set_requires_gradient_sync(True)


def train(name: SystemName | None, feature: str) -> list[float]:
    """Losses of each forward on this rank."""
    torch.compiler.reset()
    torch.manual_seed(0)
    options, rank = FEATURES[feature], dist.get_rank()
    model = Net(**dict.fromkeys(options.model, True))
    called = prepared(name, model, init_device_mesh("cpu", (dist.get_world_size(),)))
    # Sums of gradients train as their mean does, but for what is clipped (see `bench.harness.systems`).
    divisor = dist.get_world_size() if name == "simplefsdp" else 1
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(STEPS):
        for number, (tokens, targets) in enumerate(_batches(options, step, rank)):
            is_last = number == options.microbatches - 1
            with nullcontext() if is_last else without_reductions(called):
                if is_last:
                    _synchronize(called)
                loss = called(tokens, targets)
                (loss / divisor).backward()
                losses.append(loss.item())
        if options.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        if options.evaluates:
            called.eval()
            with torch.no_grad():
                losses.append(called(tokens, targets).item())
            called.train()
    return losses


def _batches(options: Feature, step: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    for _ in range(options.microbatches):
        yield tuple(torch.randint(VOCAB, (2, options.rows(step, rank), 5), generator=generator).unbind())  # type: ignore[misc]


# -- the table


def outcome(got: Sequence[Sequence[float]], want: Sequence[Sequence[float]]) -> str:
    """Of the losses of all ranks beside those of the reference: ``"yes"``, or by how much they differ."""
    pairs = [pair for ours, theirs in zip(got, want, strict=True) for pair in zip(ours, theirs, strict=True)]
    most = max(abs(ours - theirs) for ours, theirs in pairs)
    return "yes" if most <= BOUND else f"other losses, by {most:.0e}"


def try_features(
    names: Sequence[SystemName], features: Sequence[str], num_ranks: int, say: Callable[[str], object]
) -> dict[str, dict[SystemName, str]]:
    """What comes out, by feature and system.

    Args:
        names: of systems; the first is the reference, or where it fails, eager DDP.
        features: of `FEATURES`.
        num_ranks: that train.
        say: is told of each.
    """
    found: dict[str, dict[SystemName, str]] = {}
    for feature in features:
        want: list[list[float]] = []
        found[feature] = {}
        for name in names:
            say(f"{feature}: {name}")
            try:
                got = pool(num_ranks).run(train, name, feature, timeout_s=TIMEOUT_S)
            except RankFailed as error:
                found[feature][name] = _first_failure(error)
                continue
            if not want:
                want = got if name == names[0] else pool(num_ranks).run(train, None, feature, timeout_s=TIMEOUT_S)
            found[feature][name] = outcome(got, want)
    return found


def _first_failure(error: RankFailed) -> str:
    """In a few words."""
    line = str(error).splitlines()[0].partition("raised: ")[2] or str(error).splitlines()[0]
    return line[:80]
