"""`graphshard.debug` around real steps: several models, regions, errors, and ranks that differ."""

from __future__ import annotations

import importlib.util
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.testing import WorkerPool

pytestmark = pytest.mark.skipif(importlib.util.find_spec("depyf") is None, reason="depyf is not installed")


def compiled(model: nn.Module, **options: Any) -> Any:
    return graphshard.compile(model, init_device_mesh("cpu", (2,)), **{"backend": "aot_eager", **options})


def step(model: Any, inputs: Callable[[int, int], tuple[Tensor, ...]] = models.features) -> None:
    model(*inputs(0, dist.get_rank())).square().mean().backward()


def titles(page: str) -> list[str]:
    return re.findall(r'<details class="graph"><summary><code>([^<]*)</code>', page)


def several_models(folder: str) -> None:
    before, idle = compiled(models.mlps(1)), compiled(models.mlps(1))
    step(before)
    step(idle)
    with graphshard.debug(folder) as written:
        step(before)
        student = compiled(models.mlps(1), backend="inductor")
        step(student)
        by_unit = compiled(models.Decoder(), regions="unit")
        step(by_unit, models.tokens)
        del by_unit
    assert written == Path(folder, f"rank{dist.get_rank()}", "index.html")
    assert stat.S_IMODE(written.stat().st_mode) == 0o600 and stat.S_IMODE(written.parent.stat().st_mode) == 0o700
    assert [path.name for path in written.parent.iterdir()] == ["index.html"]
    text = written.read_text()
    shown = re.findall(r'<section id="model-\d+"><h2>([^<]*)</h2>', text)
    assert [re.sub(r"\d+$", "", name) for name in shown] == ["Sequential", "Sequential", "Decoder"]
    assert "2 of these programs were compiled before" in text
    (left_out,) = re.findall("compiled, and not run inside: ([^<]*)<", text)
    names = left_out.split(", ")  # those of other tests may live yet
    number = int(shown[0].removeprefix("Sequential"))
    assert f"Sequential{number + 1}" in names and not {*names} & {*shown}
    # each program of what was compiled inside, by its passes; code where a compiler made some; one timeline each
    for name, programs in ((shown[1], ("region0.0.forward", "region0.1.backward")), (shown[2], ("region0.0.forward",))):
        assert {f"{name}.{program}" for program in programs} <= set(titles(text))
    assert "2. share_reads" in text or "3. sum_by_units" in text
    assert re.search(r"7\. insert_collectives.*?<div class=\"added\">\+ %all_gather_into_tensor", text, re.DOTALL)
    assert "def program(_args):" in text and "async_compile" in text
    assert text.count('sandbox="allow-scripts"') == len(shown) - 1  # units of their own are not planned
    assert "def call_module(" in text and "__compiled_fn_" in text  # by depyf


def test_page_shows_all_models_that_ran_and_how_they_came_to_be(two_ranks: WorkerPool, tmp_path: Path) -> None:
    two_ranks.run(several_models, str(tmp_path))


class Broken(nn.Module):
    """Breaks its graph on the second rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = models.Mlp(), models.Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if dist.get_rank() == 1:
            torch._dynamo.graph_break()
        return self.second(x)


def differing_ranks(folder: str) -> tuple[list[str], str]:
    from torch._dynamo.convert_frame import _bytecode_hooks

    from graphshard.reporting.artifacts import _observers

    model = compiled(Broken(), units=["first", "second"])
    error = pytest.raises(ValueError, match="in the middle")
    with error, graphshard.debug(folder) as written:
        step(model)
        raise ValueError("</script>in the middle")
    assert not _observers and not _bytecode_hooks
    return titles(written.read_text()), written.read_text()


def test_page_is_written_with_an_error_and_each_rank_shows_its_own(two_ranks: WorkerPool, tmp_path: Path) -> None:
    (whole, text), (parts, _) = two_ranks.run(differing_ranks, str(tmp_path))
    assert any(".region0.captured" in title for title in whole) and not any(".region1.captured" in t for t in whole)
    assert any(".region1.captured" in title for title in parts)
    assert "&lt;/script&gt;in the middle" in text and "The steps ended with this error" in text


def one_rank_alone(folder: str) -> list[Tensor]:
    model = compiled(models.mlps(2))
    if dist.get_rank():
        step(model)
    else:
        with graphshard.debug(folder):
            step(model)
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def test_one_rank_alone_may_ask(two_ranks: WorkerPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(one_rank_alone, str(tmp_path))
    assert all(map(torch.equal, first, second))
    assert [path.name for path in tmp_path.iterdir()] == ["rank0"]
