"""Dumps of small graphs after each pass, compared with the files in `tests/golden`.

`pytest tests/graph/test_golden.py --update-golden` writes them anew; read the difference before committing it. The
graphs are built by hand, so that they are the same with every torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from graphshard.fsdp2.settings import UnitSettings
from graphshard.graph.ir import aten
from graphshard.lowering import driver
from tests.graph.graphs import (
    BF16,
    F32,
    GraphBuilder,
    Marked,
    Weight,
    toy_backward,
    toy_forward,
    toy_weights,
    two_gathers,
)

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def forward() -> Marked:
    return toy_forward(toy_weights())


def backward() -> Marked:
    return toy_backward(toy_weights())


def backward_mixed() -> Marked:
    """Mixed precision on three ranks, where nothing is even."""
    return toy_backward(toy_weights(1, world_size=3, param_dtype=BF16, reduce_dtype=F32))


def backward_accumulating() -> Marked:
    """One unit is left unreduced, the other adds what was held."""
    added = (("blocks_1_weight_shard", F32), ("blocks_1_bias_shard", F32))
    return toy_backward(toy_weights()).flagged(unreduced=frozenset({"head_shard"}), added=added)


def forward_keeping() -> Marked:
    """The head is there already, a block stays gathered, the other stays sharded over fewer ranks."""
    weights = toy_weights(world_size=4, post_forward=(2, "1"))
    return toy_forward(weights).flagged(
        resident=("head_shard",),
        kept=("blocks_0_weight_shard", "blocks_0_bias_shard"),
        resharded=("blocks_1_weight_shard", "blocks_1_bias_shard"),
    )


def backward_rejoining() -> Marked:
    """A block is gathered from the shards of `forward_keeping`."""
    weights = toy_weights(world_size=4, post_forward=(2, "1"))
    return toy_backward(weights).flagged(resident=("head_shard",), rejoined=("blocks_1_weight_shard",))


def backward_hybrid() -> Marked:
    """Copies of shards: one unit stays partial, the other adds what was."""
    local = (("blocks.0", UnitSettings(all_reduce=False)),)
    return toy_backward(toy_weights(1, replicas=2)).flagged(partial=("head_shard",), units=local)


def replicated() -> Marked:
    """Copies, without shards."""
    return toy_backward(toy_weights(1, world_size=1, replicas=2))


def inference_mixed() -> Marked:
    """A unit whose parameters differ in dtype and in the dim that is sharded."""
    return two_gathers(Weight("block.norm", (5,), 0), Weight("block.weight", (3, 4), 1, param_dtype=BF16, dim=1))


def inference_tied() -> Marked:
    """A parameter that is read twice, on both ends of a block."""
    embedding, weight = Weight("embedding", (7, 4)), Weight("block.weight", (4, 4))
    build = GraphBuilder("inference")
    ids = build.input("ids", [3])
    hidden = build.call(aten.expand.default, build.call(aten.sum.dim_IntList, build.unshard(embedding), [0]), [3, 4])
    hidden = build.call(aten.mm.default, hidden, build.unshard(weight))
    scores = build.call(aten.mm.default, hidden, build.call(aten.t.default, build.unshard(embedding)))
    return build.finish(build.call(aten.add.Tensor, scores, build.call(aten.unsqueeze.default, ids, 1)))


def forward_coalesced() -> Marked:
    """No flat buffer."""
    return toy_forward(toy_weights(1)).coalescing()


def backward_coalesced() -> Marked:
    """The same, of matrices that are sharded on their second dim."""
    return toy_backward([replace(w, dim=len(w.size) - 1) for w in toy_weights(1)]).coalescing()


def alone() -> Marked:
    """One rank."""
    return toy_forward(toy_weights(1, world_size=1, param_dtype=BF16), "inference")


GRAPHS: list[Callable[[], Marked]] = [
    forward,
    forward_keeping,
    backward,
    backward_mixed,
    backward_accumulating,
    backward_rejoining,
    backward_hybrid,
    replicated,
    inference_mixed,
    inference_tied,
    forward_coalesced,
    backward_coalesced,
    alone,
]


def compare(title: str, dumps: Path, update: bool) -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in sorted(dumps.glob(f"{title}.*.ir"))}
    known = {path.name: path for path in GOLDEN.glob(f"{title}.*.ir")}
    if update:
        for path in known.values():
            path.unlink()
        for name, text in written.items():
            (GOLDEN / name).write_text(text, encoding="utf-8")
        return
    assert sorted(written) == sorted(known), "passes that changed the graph; --update-golden writes the files anew"
    for name, path in known.items():
        assert written[name].splitlines() == path.read_text(encoding="utf-8").splitlines(), name


@pytest.mark.parametrize("make", GRAPHS, ids=lambda make: make.__name__)
def test_golden_programs(
    make: Callable[[], Marked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update_golden: bool
) -> None:
    monkeypatch.setenv("GRAPHSHARD_DUMP", str(tmp_path))
    monkeypatch.delenv("GRAPHSHARD_DISABLE", raising=False)
    marked = make()
    driver.lower(marked.gm, marked.ctx, make.__name__)
    compare(make.__name__, tmp_path, update_golden)


def test_golden_joint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update_golden: bool) -> None:
    monkeypatch.setenv("GRAPHSHARD_DUMP", str(tmp_path))
    build = GraphBuilder("joint")
    weight, kept = Weight("embedding", (4, 3)), Weight("head", (3, 4))
    shards = [build.shard(weight), build.shard(kept)]
    assert shards
    x, tangent = build.input("primals_3", [2, 4]), build.input("tangents_1", [2, 4])
    hidden = build.call(aten.mm.default, x, build.unshard(weight))
    out = build.call(aten.mm.default, hidden, build.unshard(kept))
    out = build.call(
        aten.add.Tensor, out, build.call(aten.mm.default, hidden, build.call(aten.t.default, build.unshard(weight)))
    )
    last = build.reduce(build.call(aten.mm.default, build.call(aten.t.default, tangent), hidden), weight)
    first = build.reduce(build.call(aten.mm.default, build.call(aten.t.default, x), hidden), weight)
    marked = build.finish(out, build.call(aten.add.Tensor, last, first), None)
    driver.run_joint_passes(marked.gm)
    compare("joint", tmp_path, update_golden)


def test_golden_files_all_belong_to_a_graph() -> None:
    titles = {make.__name__ for make in GRAPHS} | {"joint"}
    assert {path.name.split(".")[0] for path in GOLDEN.iterdir()} == titles
