"""The order of gathers: one unit ahead by default, and as the user's lists of modules say."""

from __future__ import annotations

import itertools
import re
from contextlib import nullcontext
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn

import graphshard
from graphshard.testing import TrainingRun, training_test

LAYERS = 4

_LAUNCH = re.compile(r"%(\w+) = all_gather_into_tensor\(.*# gather:([\w.]+):")
_WAIT = re.compile(r"= wait_tensor\(%(\w+)\)")
_MATMUL = re.compile(r"= (mm|addmm|bmm)\(")


def loss_of(model: nn.Module, run: TrainingRun, index: int) -> Tensor:
    loss: Tensor = model(*models.tokens(index, run.rank)).square().mean()
    return loss


def train(run: TrainingRun, model: nn.Module, *, first: int = 0, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(first, first + steps):
        with run.counted(f"step {index}") if index else nullcontext():
            loss = loss_of(model, run, index)
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


def ran_last(model: nn.Module, direction: str) -> str:
    """The program's graph: of those that ran, the one lowered last."""
    return [p.ir for p in graphshard.report(model).programs if p.direction == direction and p.runs][-1]


def events(ir: str) -> list[str]:
    """`launch UNIT`, `wait UNIT`, and `compute` where products lie between them, in the graph's order."""
    units: dict[str, str] = {}
    seen: list[str] = []
    for line in ir.splitlines():
        if launch := _LAUNCH.search(line):
            units[launch[1]] = launch[2]
            seen.append(f"launch {launch[2]}")
        elif (wait := _WAIT.search(line)) and wait[1] in units:
            seen.append(f"wait {units[wait[1]]}")
        elif _MATMUL.search(line) and seen[-1:] != ["compute"]:
            seen.append("compute")
    return seen


def launched(seen: list[str]) -> list[str]:
    return [event.removeprefix("launch ") for event in seen if event.startswith("launch ")]


def check_prefetched(seen: list[str], ahead: dict[str, list[str]], order: list[str], *, others: bool = False) -> None:
    """Each unit, when it has arrived and before its own compute, launches those of its list that are not on their way.

    Args:
        seen: events.
        ahead: the lists, by unit; a unit without one: nothing is demanded.
        order: of the units' waits.
        others: it may launch others, too, such as those that FSDP2 reaches by running ahead of the device.
    """
    assert [event.removeprefix("wait ") for event in seen if event.startswith("wait ")] == order
    for unit, following in ahead.items():
        arrived = seen.index(f"wait {unit}")
        before = set(launched(seen[:arrived]))
        compute = seen.index("compute", arrived)
        now = [name for name in launched(seen[arrived:compute]) if name in following or not others]
        assert now == [name for name in following if name not in before], (unit, seen)


def names(*layers: int) -> list[str]:
    return [f"layers.{i}" for i in layers]


def depth_one(order: list[str]) -> dict[str, list[str]]:
    return {unit: [following] for unit, following in itertools.pairwise(order)} | {order[-1]: []}


@pytest.mark.row("B1")
@pytest.mark.parametrize("root_too", [False, True])
@training_test()
def test_backward_gathers_the_layer_before_while_a_layer_computes(run: TrainingRun, root_too: bool) -> None:
    model = run.shard(models.Decoder(LAYERS), **({"reshard_after_forward": True} if root_too else {}))
    train(run, model)
    if run.is_reference:
        return
    forward, backward = (events(ran_last(model, direction)) for direction in ("forward", "backward"))
    order = ["root", *names(*range(LAYERS))]
    assert launched(forward) == order
    check_prefetched(
        forward, {unit: following for unit, following in depth_one(order).items() if unit != "root"}, order
    )
    order = ["root"] * root_too + names(*reversed(range(LAYERS)))
    assert launched(backward) == order
    check_prefetched(backward, depth_one(order), order)


def set_two_ahead(layers: Any) -> None:
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 3])
        layer.set_modules_to_backward_prefetch(layers[max(i - 2, 0) : i][::-1])


def check_two_ahead(model: nn.Module) -> None:
    forward, backward = (events(ran_last(model, direction)) for direction in ("forward", "backward"))
    ahead = {f"layers.{i}": names(*range(i + 1, min(i + 3, LAYERS))) for i in range(LAYERS)}
    order = ["root", *names(*range(LAYERS))]
    check_prefetched(forward, ahead, order)
    assert launched(forward) == order
    ahead = {f"layers.{i}": names(*range(max(i - 2, 0), i))[::-1] for i in range(LAYERS)}
    order = names(*reversed(range(LAYERS)))
    check_prefetched(backward, ahead, order)
    assert launched(backward) == order


@pytest.mark.row("S14", "B1")
@training_test()
def test_modules_to_prefetch_are_launched_two_ahead(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(LAYERS))
    set_two_ahead(list(model.layers))
    train(run, model)
    if not run.is_reference:
        check_two_ahead(model)


@pytest.mark.row("S14")
@training_test()
def test_modules_to_prefetch_may_be_chosen_between_steps(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(LAYERS))
    train(run, model, steps=1)
    regions = None if run.is_reference else graphshard.report(model).regions
    set_two_ahead(list(model.layers))
    train(run, model, first=1, steps=2)
    if not run.is_reference:
        check_two_ahead(model)
        assert graphshard.report(model).regions == regions


@pytest.mark.row("S14")
@training_test()
def test_prefetching_may_skip_a_layer(run: TrainingRun) -> None:
    model: Any = run.shard(models.Decoder(LAYERS))
    first, *_, last = layers = list(model.layers)
    first.set_modules_to_forward_prefetch([last])
    last.set_modules_to_backward_prefetch([layers[1], first])
    train(run, model)
    if not run.is_reference:
        forward, backward = (events(ran_last(model, direction)) for direction in ("forward", "backward"))
        check_prefetched(forward, {"layers.0": ["layers.3"]}, ["root", *names(*range(LAYERS))], others=True)
        check_prefetched(backward, {"layers.3": names(1, 0)}, names(*reversed(range(LAYERS))))


class Reused(nn.Module):
    """One layer runs twice: its gather is not launched again while it is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(models.DecoderBlock() for _ in range(2))
        self.embed = nn.Embedding(models.VOCAB, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in (self.layers[0], self.layers[1], self.layers[0]):
            h = layer(h)
        return h


@pytest.mark.row("S14")
@training_test()
def test_prefetching_a_module_that_runs_twice(run: TrainingRun) -> None:
    model: Any = run.shard(Reused())
    first, second = model.layers
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_forward_prefetch([first])
    second.set_modules_to_backward_prefetch([first])
    train(run, model)
