"""The pretended network serves eager FSDP2, DTensor, functional collectives and graphshard, and takes its time."""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import graphshard
from bench.networks.loopback import Loopback, Network
from graphshard.agree.agreement import without_peers
from graphshard.compat.groups import resolve_process_group, takes_several_tensors

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning"),  # names of torch 2.11 and 2.12
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning"),  # Triton 3.9's
]

RANKS = 4
ALPHA_US = 20_000.0


@pytest.fixture
def network() -> Iterator[Loopback]:
    with Loopback(RANKS, alpha_us=ALPHA_US) as network:
        yield network


def test_time_is_latency_and_bytes_over_bandwidth() -> None:
    assert Network(32.0, 361.0).us(361e6) == pytest.approx(1032.0)


def test_collective_arrives_behind_its_time_and_not_before() -> None:
    latency_s = 0.5  # long enough for a launch on a machine that is busy
    with Loopback(RANKS, alpha_us=1e6 * latency_s) as network:
        start_s = time.perf_counter()
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        launched: Any = torch.ops._c10d_functional.all_gather_into_tensor(torch.ones(3), RANKS, group)
        assert time.perf_counter() - start_s < latency_s / 2
        gathered = torch.ops._c10d_functional.wait_tensor(launched)
        assert time.perf_counter() - start_s >= latency_s
        assert torch.equal(gathered, torch.ones(3 * RANKS))
        (launch,) = network.launches
        assert (launch.kind, launch.sent_bytes) == ("all_gather", 3 * 4 * (RANKS - 1))


def test_peers_mirror_this_rank(network: Loopback) -> None:
    group = dist.group.WORLD
    x = torch.arange(8.0)
    assert torch.equal(functional.all_gather_tensor(x, 0, group), x.repeat(RANKS))
    assert torch.equal(functional.reduce_scatter_tensor(x, "sum", 0, group), x[:2] * RANKS)
    assert torch.equal(functional.reduce_scatter_tensor(x, "avg", 0, group), x[:2])
    assert torch.equal(functional.all_reduce(x, "sum", group), x * RANKS)
    dist.all_reduce(summed := x.clone())
    assert torch.equal(summed, x * RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    sharded = distribute_tensor(x, mesh, [Shard(0)])
    assert torch.equal(sharded.redistribute(placements=[Replicate()]).to_local(), x[:2].repeat(RANKS))


def test_late_bytes_move_when_the_time_is_up() -> None:
    """What a program writes into a buffer before the wait shows: as a use of freed memory would."""
    launched = []
    with Loopback(RANKS, alpha_us=ALPHA_US, late=True, on_launch=lambda: launched.append(1)):
        x, out = torch.ones(2), torch.zeros(2 * RANKS)
        work: Any = dist.all_gather_into_tensor(out, x, async_op=True)
        x.fill_(2.0)
        assert torch.equal(out, torch.zeros(2 * RANKS))
        work.wait()
        assert torch.equal(out, torch.full((2 * RANKS,), 2.0))
    assert launched == [1]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="a process that interprets cannot compile")
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_held_stream_reads_the_clock_in_its_loop(arch: int) -> None:
    triton = pytest.importorskip("triton")
    compiler: Any = importlib.import_module("triton.compiler")
    target: Any = importlib.import_module("triton.backends.compiler")
    hold_stream: Any = importlib.import_module("bench.networks.hold_stream")
    forms = {"mark_time": {"mark": "*i64"}, "hold_until": {"mark": "*i64", "ns": "i32"}}
    ptx = {}
    for name, signature in forms.items():
        aligned = {(0,): [["tt.divisibility", 16]]}
        source = compiler.ASTSource(fn=getattr(hold_stream, name), signature=signature, attrs=aligned)
        ptx[name] = triton.compile(source, target=target.GPUTarget("cuda", arch, 32)).asm["ptx"]
    assert ptx["mark_time"].count("%globaltimer") == 1
    (loop,) = re.findall(r"(?s)(\$L__BB\d+_\d+):(.*?)bra\s+\1;", ptx["hold_until"])
    assert "%globaltimer" in loop[1]
    assert re.search(r"add\.s32\s+\S+, \S+, -1;", loop[1]), "the loop counts down, too"


def test_held_stream_refuses_times_without_end() -> None:
    pytest.importorskip("triton")
    hold_stream: Any = importlib.import_module("bench.networks.hold_stream")
    with pytest.raises(ValueError, match=r"hold: us: got 3e\+06, want at most 2e\+06"):
        hold_stream.hold(torch.zeros(1, dtype=torch.int64), 3e6)


def losses(model: Any, network: Loopback) -> tuple[list[Tensor], list[str]]:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        network.launches.clear()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found, sorted(launch.kind for launch in network.launches if launch.sent_bytes)


def test_eager_fsdp2_and_graphshard_meet_the_same_network() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))

    with Loopback(RANKS, alpha_us=10.0) as network:
        mesh = init_device_mesh("cpu", (RANKS,))
        eager = build()
        for layer in eager:  # type: ignore[attr-defined]
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(eager, mesh=mesh, reshard_after_forward=False)
        want = losses(eager, network)
        units = [f"{i}" for i in range(3)]
        model = graphshard.compile(
            build(), mesh, backend="aot_eager", plan="fsdp2", units=units, reshard_after_forward=False
        )
        got = losses(model, network)
    assert want[1] == got[1] == ["all_gather"] * 3 + ["reduce_scatter"] * 3
    assert all(map(torch.equal, got[0], want[0]))


@pytest.mark.parametrize("plan", ["fsdp2", "auto"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_backend_that_takes_several_tensors_gets_coalesced_buckets(
    plan: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained() -> tuple[list[Tensor], str, str, str]:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(3)]
        with Loopback(RANKS, alpha_us=10.0) as network:
            mesh = init_device_mesh("cpu", (RANKS,))
            model = graphshard.compile(nn.Sequential(*layers), mesh, backend=backend, plan=plan)
            found, _ = losses(model, network)
        programs = {program.direction: program for program in graphshard.report(model).programs}
        return found, programs["forward"].ir, programs["backward"].ir, str(graphshard.explain(model))

    got, forward, backward, explained = trained()
    assert "coalesced all-gather" in explained
    assert "all_gather_into_tensor_coalesced(" in forward
    # A sum's bits are a matter of places in the buffer, and FSDP2's plan promises FSDP2's.
    assert plan == "auto" or "reduce_scatter_tensor_coalesced(" not in backward
    monkeypatch.setenv("GRAPHSHARD_DISABLE", "choose_copies")
    want, forward, _, explained = trained()
    assert "coalesced" not in forward and "coalesced all-gather" not in explained
    assert all(map(torch.equal, got, want))


def test_gloo_has_no_coalesced_buckets(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert not takes_several_tensors(dist.group.WORLD, "cpu")  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()
    with Loopback(RANKS):
        assert takes_several_tensors(dist.group.WORLD, "cpu")  # type: ignore[arg-type]


def test_peers_of_this_network_alone_are_known_to_be_pretended(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert not without_peers(None) and not without_peers(dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    with Loopback(RANKS):
        mesh = init_device_mesh("cpu", (2, RANKS // 2))
        assert without_peers(None)
        assert all(without_peers(resolve_process_group(mesh.get_group(i).group_name)) for i in range(2))


OPS = torch.ops._c10d_functional
FORMS: dict[str, Callable[[Tensor, str], Any]] = {
    "all_gather": lambda x, group: OPS.all_gather_into_tensor(x, RANKS, group),
    "all_gather, output": lambda x, group: OPS.all_gather_into_tensor_out(x, RANKS, group, out=x.new_empty(RANKS * 8)),
    "all_gather, coalesced": lambda x, group: OPS.all_gather_into_tensor_coalesced([x, x], RANKS, group),
    "reduce_scatter": lambda x, group: OPS.reduce_scatter_tensor(x, "sum", RANKS, group),
    "reduce_scatter, output": lambda x, group: OPS.reduce_scatter_tensor_out(
        x, "sum", RANKS, group, out=x.new_empty(2)
    ),
    "reduce_scatter, coalesced": lambda x, group: OPS.reduce_scatter_tensor_coalesced([x, x], "sum", RANKS, group),
    "all_reduce": lambda x, group: OPS.all_reduce(x, "sum", group),
    "all_reduce, in place": lambda x, group: OPS.all_reduce_(x.clone(), "sum", group),
    "all_reduce, coalesced": lambda x, group: OPS.all_reduce_coalesced([x, x], "sum", group),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_collective_is_served(form: str) -> None:
    x = torch.arange(8.0)
    want = {"all_gather": x.repeat(RANKS), "reduce_scatter": x[:2] * RANKS, "all_reduce": x * RANKS}
    with Loopback(RANKS, alpha_us=1000.0) as network:
        start_s = time.perf_counter()
        launched = FORMS[form](x, dist.group.WORLD.group_name)  # type: ignore[union-attr]
        *_, got = map(OPS.wait_tensor, launched if isinstance(launched, list) else [launched])
        assert time.perf_counter() - start_s >= 1e-3
        kind = form.partition(",")[0]
        assert torch.equal(got, want[kind])
        assert [launch.kind for launch in network.launches] == [kind]
        dist.barrier()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"world_size": 0}, "got rank 0 of 0"),
        ({"world_size": 2, "rank": 2}, "got rank 2 of 2"),
        ({"world_size": 2, "gb_s": 0.0}, "a bandwidth above 0"),
        ({"world_size": 2, "alpha_us": -1.0}, "got -1 us"),
        ({"world_size": 2, "alpha_us": float("nan")}, "got nan us"),
    ],
)
def test_networks_that_cannot_be_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Loopback(**arguments)


def test_network_in_a_network_is_refused_and_leaves_the_outer_one(network: Loopback) -> None:
    with pytest.raises(RuntimeError, match="a process group that is there already"), Loopback(2):
        pass
    assert dist.get_world_size() == RANKS
