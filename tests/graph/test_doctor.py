"""What `graphshard.doctor` finds without any other rank, how it says it, and that a model stays as it is."""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import graphshard
from graphshard.cli import main
from graphshard.compat import fake_forward
from graphshard.compat.fake import fake_process_group
from graphshard.compat.graph_breaks import parsed, recorded_graph_breaks
from graphshard.examining import Diagnosis, Finding

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.linear(x))
        return out


class Net(nn.Module):
    """Blocks around whatever `between` does."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.spare = nn.Linear(WIDTH, 3)
        self.drop, self.between = nn.Dropout(), between
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        x = self.between(self.drop(self.blocks[0](x)))
        assert self.spare.weight.dtype == torch.float32  # asks, and reads nothing
        out: Tensor = self.blocks[1](x)
        return out


def inputs() -> tuple[Tensor]:
    return (torch.ones(2, WIDTH),)


def kinds(diagnosis: Diagnosis) -> dict[str, tuple[str, ...]]:
    return {finding.kind: finding.where for finding in diagnosis.findings}


def test_units_and_shards_are_those_of_a_compile() -> None:
    diagnosis = graphshard.doctor(Net(), 3)
    assert diagnosis.units == ("units in blocks: 2 Block, equal blocks",)
    assert kinds(diagnosis)["uneven"][:1] == ("blocks.0.linear.weight",)
    assert "spare.bias" not in kinds(diagnosis)["uneven"]
    assert not kinds(graphshard.doctor(Net(), 3, strategy="replicate"))
    unknown = graphshard.doctor(Net())
    assert unknown.shards is None
    assert unknown.not_looked_at[0].startswith("uneven parameters: want a mesh")
    assert unknown.not_looked_at[1].startswith("unused parameters and graph breaks: want sample arguments")


def test_arguments_of_compile_shape_what_is_found() -> None:
    model = Net()
    given = {"ignored_params": {model.spare.weight}, "units": ["spare"], "shard_placement_fn": lambda _: Shard(1)}
    found = graphshard.doctor(model, 3, **given)  # type: ignore[arg-type]
    assert kinds(found)["in no unit"] == ("spare.weight",)
    assert found.units == ("units beside the root: 1 Linear",)
    messages = [finding.what for finding in found.of_kind("placement")]
    assert any("want a dim in [-1, 0]" in line for line in messages)
    assert any("does not divide evenly by 3 ranks" in line for line in messages)


def test_a_block_that_shares_a_module_stays_with_the_root() -> None:
    model = Net()
    model.blocks[0].norm = model.blocks[1].norm
    found = kinds(graphshard.doctor(model))
    assert found["shared by blocks"] == ("blocks.0", "blocks.1")
    assert found["tied"] == ("blocks.0.norm.weight = blocks.1.norm.weight", "blocks.0.norm.bias = blocks.1.norm.bias")


def test_buffers_on_meta_that_no_checkpoint_brings() -> None:
    with torch.device("meta"):
        model = Net()
        model.register_buffer("angles", torch.ones(2), persistent=False)
    diagnosis = graphshard.doctor(model, 2, inputs())
    assert kinds(diagnosis)["meta buffer"] == ("count",)
    assert kinds(diagnosis)["non-persistent meta buffer"] == ("angles",)
    assert diagnosis.of_kind("non-persistent meta buffer")[0].verdict == "ignored"
    assert kinds(diagnosis)["unused"] == ("spare.weight", "spare.bias")
    assert not diagnosis.not_looked_at


def test_lazy_modules_are_refused_and_no_forward_is_looked_at() -> None:
    diagnosis = graphshard.doctor(nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(3)), 2, inputs())
    assert [finding.kind for finding in diagnosis.refused] == ["uninitialized"] * 4
    assert diagnosis.not_looked_at == ("unused parameters and graph breaks: parameters are not initialized yet",)


# -- a forward


def breaks(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


def breaks_in_a_loop(x: Tensor) -> Tensor:
    for _ in range(2):
        torch._dynamo.graph_break()
        x = x + 1
    return x


def looks_at_data(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x


def fails(x: Tensor) -> Tensor:
    raise ValueError("no such thing")


def leaves(x: Tensor) -> Tensor:
    sys.exit(3)


def sends_objects(x: Tensor) -> Tensor:
    dist.broadcast_object_list([1])
    return x


def line_of(function: Any, ahead: int = 1) -> int:
    return int(function.__code__.co_firstlineno) + ahead


def test_unused_parameters_are_those_that_forward_does_not_read() -> None:
    diagnosis = graphshard.doctor(Net(), 2, inputs())
    assert kinds(diagnosis)["unused"] == ("spare.weight", "spare.bias")
    assert "graph break" not in kinds(diagnosis)
    assert not diagnosis.not_looked_at


@pytest.mark.parametrize(("between", "ahead"), [(breaks, 1), (breaks_in_a_loop, 2)])
def test_graph_breaks_are_listed_with_their_line(between: Callable[[Tensor], Tensor], ahead: int) -> None:
    for index in range(2):  # Dynamo says each once in a process
        (found,) = graphshard.doctor(Net(between), 2, inputs()).of_kind("graph break")
        assert found.verdict == "eager"
        assert found.where[0].endswith(f"test_doctor.py:{line_of(between, ahead)}")
        assert found.what.startswith("Call to `torch._dynamo.graph_break()`")
        assert ("whole function" in found.what) is (ahead == 2 and index == 0)  # it leaves that out from then on


def test_a_forward_that_looks_at_data_is_seen_up_to_there() -> None:
    diagnosis = graphshard.doctor(Net(looks_at_data), 2, inputs())
    line = f"test_doctor.py:{line_of(looks_at_data)}"
    assert diagnosis.of_kind("graph break")[0].where[0].endswith(line)
    assert [said.partition(":")[0] for said in diagnosis.not_looked_at] == [
        "unused parameters",
        "graph breaks behind that line",
    ]
    assert all(line in said for said in diagnosis.not_looked_at)
    assert "unused" not in kinds(diagnosis)


def test_inputs_of_a_model_on_a_gpu_are_there_in_a_forward_without_data() -> None:
    given = torch.ones(2, 3, requires_grad=True), [torch.zeros(2, dtype=torch.int64)]
    x, (tokens,) = fake_forward.fake_values(fake_forward.make_mode(), given, torch.device("cuda"))
    assert x.device.type == tokens.device.type == "cuda"
    assert x.requires_grad and x.shape == (2, 3) and tokens.dtype is torch.int64


def test_a_forward_that_fails_is_no_failure_of_the_doctor() -> None:
    for said in graphshard.doctor(Net(fails), 2, inputs()).not_looked_at:
        assert "the forward of a copy without data failed" in said
        assert "no such thing" in said
    for said in graphshard.doctor(Net(leaves), 2, inputs()).not_looked_at:
        assert "SystemExit: 3" in said


def test_arguments_that_forward_does_not_take_are_no_graph_break() -> None:
    diagnosis = graphshard.doctor(Net(), 2, (), {"none": 1})
    assert "graph break" not in kinds(diagnosis)
    assert "TypeError" in diagnosis.not_looked_at[0]
    assert diagnosis.not_looked_at[1] == "graph breaks: forward does not take these arguments"


def test_a_forward_that_sends_objects_is_not_gone_on_with() -> None:
    with fake_process_group(2):
        unread, broken = graphshard.doctor(Net(sends_objects), 2, inputs()).not_looked_at
    assert unread.startswith("unused parameters: forward communicates by itself")
    assert broken.startswith("graph breaks behind that line: ")


def test_a_model_that_cannot_be_copied_is_not_looked_at() -> None:
    model = Net()
    model.numbers = (number for number in range(2))  # type: ignore[assignment]
    (said,) = graphshard.doctor(model, 2, inputs()).not_looked_at
    assert "the model cannot be copied" in said


def test_a_model_stays_as_it_is() -> None:
    model = Net(breaks)
    model(*inputs()).sum().backward()
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    tensors = {name: value.clone() for name, value in (*model.named_parameters(), *model.named_buffers())}
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    state, python, level = torch.get_rng_state(), random.getstate(), logging.getLogger("torch._dynamo").disabled
    graphshard.doctor(model, 2, inputs())
    for name, module in model.named_modules():
        assert vars(module).keys() == attributes[name].keys()
        assert all(vars(module)[key] is value for key, value in attributes[name].items())
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        assert torch.equal(value, tensors[name])
    for name, param in model.named_parameters():
        grad = grads[name]
        assert (param.grad is None) if grad is None else torch.equal(param.grad, grad)
    assert model.calls == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    assert logging.getLogger("torch._dynamo").disabled is level


def test_texts_of_dynamo_that_are_no_breaks_are_left_out() -> None:
    assert parsed("something else") is None
    with recorded_graph_breaks() as found:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    assert found == []


# -- what is said


def test_printed_form_has_the_worst_first_and_what_to_do() -> None:
    model = Net(breaks)
    model.scale = nn.Parameter(torch.ones(()))
    text = str(graphshard.doctor(model, 2, inputs()))
    assert text.startswith("Net (plain, 2 shards): 1 refused, 1 eager, 2 handled\n  units in blocks: 2 Block")
    verdicts = [line.split()[0] for line in text.splitlines() if line.startswith(("  refused", "  eager", "  handled"))]
    assert verdicts == ["refused", "eager", "handled", "handled"]
    assert "-> make it a tensor of one element, shape [1]" in text
    assert max(map(len, text.splitlines())) <= 130


def test_places_that_differ_in_numbers_share_a_line() -> None:
    names = tuple(f"layers.{index}.weight" for index in range(12))
    shown = str(Diagnosis("Net", "plain", 2, findings=(Finding("frozen", names, "what", "handled"),)))
    assert "layers.*.weight (12)" in shown
    assert "layers.3" not in shown


def test_json_has_all_of_it() -> None:
    diagnosis = graphshard.doctor(Net(), 2, inputs())
    read = json.loads(diagnosis.to_json())
    assert read == json.loads(json.dumps(diagnosis.as_dict()))
    assert read["findings"][0] == {
        "kind": "uneven",
        "where": ["spare.weight", "spare.bias"],
        "what": diagnosis.findings[0].what,
        "verdict": "handled",
        "to_do": "",
    }


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((3,), TypeError, "model: got int"),
        ((Net(), "cpu"), TypeError, "mesh: got str"),
        ((Net(), True), TypeError, "mesh: got bool"),
        ((Net(), 0), ValueError, "mesh: got 0 ranks"),
        ((Net(), 2, "x"), TypeError, "args: got str, want a tuple"),
        ((Net(), 2, torch.ones(2)), TypeError, "args: got Tensor, want a tuple"),
        ((Net(), 2, (), [1]), TypeError, "kwargs: got list"),
    ],
)
def test_bad_arguments_are_named(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        graphshard.doctor(*given)
    with pytest.raises(ValueError, match="strategy: got 'ddp'"):
        graphshard.doctor(Net(), strategy="ddp")


# -- on the command line

MODULE = """
import torch
from torch import nn
def good():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
def bad():
    model = good()
    model.scale = nn.Parameter(torch.tensor(1.0))
    return model
def inputs():
    return torch.ones(2, 8)
def fails():
    raise RuntimeError("no weights")
def both():
    return (torch.ones(2, 8),), {}
number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "my_models.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_models"


def test_command_tells_by_its_status_whether_something_is_refused(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", f"{module}:good", "--world", "3", "--inputs", f"{module}:inputs"]) == 0
    assert capsys.readouterr().out.startswith("Sequential (plain, 3 shards): 1 handled\n")
    assert main(["doctor", f"{module}:bad", "--inputs", f"{module}:both", "--units", "0,1", "--json"]) == 1
    read = json.loads(capsys.readouterr().out)
    assert [finding["verdict"] for finding in read["findings"]] == ["refused", "handled"]
    assert read["units"] == ["units beside the root: 2 Linear"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["my_models"], "want module:function"),
        (["my_models:none"], "has no attribute 'none'"),
        ([":"], "want module:function"),
        (["my_models:fails"], "my_models:fails raised RuntimeError: no weights"),
        (["my_models:number"], "a int, want a function"),
        (["my_models:inputs"], "returned a Tensor, want an nn.Module"),
        (["my_models:good", "--world", "0"], "got 0 ranks"),
    ],
)
def test_command_says_what_it_cannot_look_at(
    module: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err
