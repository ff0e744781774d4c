"""Random training jobs, as data: a model, how it is sharded and compiled, and what is done with it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st

T = TypeVar("T")

# Recompile limits: one that no job comes to, and Dynamo's own, in turn.
MANY, FEW = 64, 8

# Of layers (see `layers.py`), and how often they are drawn.
KINDS = {
    "mlp": 5, "attention": 3, "conv": 1, "norm": 2, "low_rank": 1, "embedding": 1, "lstm": 1, "batch_norm": 1,
    "buffer": 1, "cross": 2, "experts": 1, "list": 1, "scaled": 1, "gathered": 1, "reduced": 1, "branch": 1,
    "counter": 1, "kept": 1, "noisy": 1, "hooked": 1, "in_place": 1, "custom": 1,
}  # fmt: skip
# Of what is done, each by a method of `play._Job`.
MOVES = {
    "train": 10, "evaluate": 3, "eager": 1, "unshard": 1, "freeze": 1, "mode": 1, "load": 1, "other_rows": 2, "drop": 1,
    "clip": 1, "infer": 1, "twice": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        kind: of `KINDS`, or ``"nested"``.
        hidden: a size inside it.
        checkpointed: whether it is computed again in backward.
        breaks: whether a graph break is inside: ``""``, ``"all"`` ranks or only rank ``"one"``.
        frozen: ``""``, ``"all"`` parameters or ``"some"``.
        returns: ``"tensor"``, ``"tuple"`` with an auxiliary loss, ``"dict"``.
        dropout: of its output.
        again: whether the layer before is called once more in its place.
        inner: of a nested one.
    """

    kind: str
    hidden: int = 8
    checkpointed: bool = False
    breaks: str = ""
    frozen: str = ""
    returns: str = "tensor"
    dropout: float = 0.0
    again: bool = False
    inner: tuple[Layer, ...] = ()


@dataclass(frozen=True)
class Case:
    """One job.

    Attributes:
        layers: of the model, between an embedding and a head.
        dim: width.
        tied: whether the head's weight is the embedding's.
        unused: whether the model has a parameter that forward never reads.
        recycled: whether all layers run once without gradients, and once more with them on what came out.
        mesh: ``"shard"``, ``"hybrid"`` (on four ranks), ``"replicate"``.
        policy: ``"f32"``, ``"bf16"``, ``"bf16_reduce_f32"``.
        units: ``"auto"``: those that graphshard finds; ``"layers"``, ``"some"`` layers, ``"inner"`` ones of nested
            layers, too; ``"pairs"``: lists of two layers; ``"root"``: one unit.
        reshard: after forward.
        regions, plan, budget_mib: arguments of `graphshard.compile`; no budget: 0.
        recompile_limit: Dynamo's, behind which functions run outside the graphs.
        optimizer: ``"adamw"`` or ``"sgd"``.
        microbatches: of each step.
        sync: ``"last"``, or ``"every"`` microbatch reduces.
        moves: see `MOVES`.
        seed: of parameters and data.
    """

    layers: tuple[Layer, ...]
    dim: int = 16
    tied: bool = False
    unused: bool = False
    recycled: bool = False
    mesh: str = "shard"
    policy: str = "f32"
    units: str = "auto"
    reshard: bool | None = None
    regions: str = "model"
    plan: str = "auto"
    budget_mib: int = 0
    recompile_limit: int = MANY
    optimizer: str = "adamw"
    microbatches: int = 1
    sync: str = "last"
    moves: tuple[str, ...] = ("train",)
    seed: int = 0

    def __str__(self) -> str:
        return json.dumps(_told(self))

    @staticmethod
    def parse(text: str) -> Case:
        """The inverse of `str`."""
        found = json.loads(text)
        return Case(**{**found, "layers": _layers(found["layers"]), "moves": tuple(found.get("moves", ("train",)))})


def _told(value: Case | Layer) -> dict[str, Any]:
    """All that is not its default."""
    found = {}
    for each in fields(value):
        own = getattr(value, each.name)
        if each.name in ("layers", "inner"):
            own = [_told(layer) for layer in own]
        if own not in (each.default, []):
            found[each.name] = own
    return found


def _layers(found: list[dict[str, Any]]) -> tuple[Layer, ...]:
    return tuple(Layer(**{**layer, "inner": _layers(list(layer.get("inner", ())))}) for layer in found)


def _walk(layers: tuple[Layer, ...]) -> Iterator[Layer]:
    for layer in layers:
        yield layer
        yield from _walk(layer.inner)


def _often(weights: Mapping[T, int]) -> st.SearchStrategy[T]:
    """One of them as often as it weighs; the first is the simplest."""
    return st.sampled_from([value for value, weight in weights.items() for _ in range(weight)])


def _layer(inner: st.SearchStrategy[tuple[Layer, ...]] | None = None) -> st.SearchStrategy[Layer]:
    return st.builds(
        Layer,
        kind=_often(KINDS) if inner is None else st.just("nested"),
        hidden=st.sampled_from([8, 3, 7, 16]),
        checkpointed=_often({False: 6, True: 1}),
        breaks=_often({"": 18, "all": 2, "one": 1}),
        frozen=_often({"": 8, "some": 1, "all": 1}),
        returns=_often({"tensor": 6, "tuple": 1, "dict": 1}),
        dropout=_often({0.0: 3, 0.2: 1}),
        again=_often({False: 9, True: 1}),
        inner=st.just(()) if inner is None else inner,
    )


_LAYERS = st.one_of(_layer(), _layer(), _layer(), _layer(st.lists(_layer(), min_size=1, max_size=3).map(tuple)))


def cases() -> st.SearchStrategy[Case]:
    """All jobs that eager FSDP2 and a compiled model must do with the same bits."""
    unlike = st.lists(_LAYERS, min_size=1, max_size=4)
    alike = st.tuples(_LAYERS, st.integers(2, 4)).map(lambda found: [found[0]] * found[1])  # as most models are
    moves = st.lists(_often(MOVES), max_size=4).map(lambda found: ("train", *found, "train"))
    return st.builds(
        Case,
        layers=st.one_of(unlike, alike).map(tuple),
        dim=st.sampled_from([16, 8, 24]),
        tied=_often({False: 4, True: 1}),
        unused=_often({False: 9, True: 1}),
        recycled=_often({False: 7, True: 1}),
        mesh=_often({"shard": 8, "hybrid": 1, "replicate": 1}),
        # FSDP2 of torch 2.15 sums gradients of one parameter in another dtype.
        policy=_often({"f32": 3, "bf16": 1, "bf16_reduce_f32": 2} if torch.__version__ < "2.15" else {"f32": 1}),
        units=_often({"auto": 4, "layers": 3, "some": 2, "inner": 2, "pairs": 1, "root": 1}),
        reshard=st.sampled_from([None, True, False]),
        regions=_often({"model": 4, "unit": 1}),
        plan=_often({"auto": 3, "fsdp2": 1}),
        budget_mib=_often({0: 9, 1: 1}),
        recompile_limit=_often({MANY: 2, FEW: 1}),
        optimizer=st.sampled_from(["sgd", "adamw"]),
        microbatches=_often({1: 3, 2: 1, 3: 1}),
        sync=st.sampled_from(["last", "every"]),
        moves=moves,
        seed=st.integers(0, 1000),
    ).map(_sensible)


def _sensible(case: Case) -> Case:
    """Without what docs/limits.md leaves out: jobs whose bits may differ, or that are refused by name."""
    layers = tuple(_sensible_layer(layer, case) for layer in case.layers)
    found = [*_walk(layers)]
    in_parts = case.regions == "unit" or any(layer.breaks == "all" or layer.kind in READ_OUTSIDE for layer in found)
    if in_parts:  # sums over regions; a rank whose graphs break elsewhere in the first call
        layers = tuple(_of_parts(layer) for layer in layers)
    behind_limit = case.recompile_limit == FEW and (in_parts or any(layer.breaks for layer in found))
    if behind_limit:  # what is read besides calling the module that owns it
        layers = tuple(_without(_without(layer, "scaled"), "list") for layer in layers)
    if behind_limit and "mode" in case.moves:  # breaks that one rank alone has no more in the other mode
        layers = tuple(_without_checkpoints(layer) for layer in layers)
    if in_parts and "other_rows" in case.moves:  # AOTAutograd makes gradients contiguous where sizes are symbolic
        layers = tuple(_without(layer, "batch_norm") for layer in layers)
    if in_parts or behind_limit:  # an activation that a region uses twice, and what is around it once more
        around = behind_limit or (case.regions == "unit" and case.units not in ("layers", "inner"))
        layers = tuple(_used_once(_without(layer, "counter"), around) for layer in layers)  # a part may run as it is
    if case.microbatches > 1 and case.sync == "last" and case.units != "root":  # FSDP2 reduces what is held alone
        layers = tuple(replace(layer, again=False) for layer in layers)
    one_graph = not in_parts and not any(layer.breaks for layer in found)
    has_budget = case.regions == "model" and case.plan == "auto"
    if not one_graph or case.units == "pairs":  # an activation that units share comes to one of several modules
        layers = tuple(_without(layer, "cross") for layer in layers)
    layers = (replace(layers[0], again=False), *layers[1:])
    moves = case.moves
    if "twice" in moves:  # what a forward reads several times
        layers = tuple(replace(_without(layer, "scaled"), again=False) for layer in layers)
    ranks_differ = any(layer.breaks == "one" for layer in _walk(layers)) or (behind_limit and "other_rows" in moves)
    if ranks_differ:  # nothing is frozen where parts of a call come to differ, nor does the model itself send
        moves = tuple(move for move in moves if move != "freeze")
        layers = tuple(_without(_without(layer, "gathered"), "reduced") for layer in layers)
    budget_mib = case.budget_mib if has_budget else 0
    tied = case.tied and one_graph and "twice" not in moves
    return replace(case, layers=layers, tied=tied, budget_mib=budget_mib, moves=moves)


# Kinds of layers that read parameters outside any graph, that write buffers, and that use what they get several times.
READ_OUTSIDE, WRITE, USE_OFTEN = (
    ("lstm", "branch"),
    ("buffer", "batch_norm", "counter", "kept"),
    ("low_rank", "experts", "list", "scaled"),
)


def _of_parts(layer: Layer) -> Layer:
    inner = tuple(map(_of_parts, layer.inner))
    return replace(layer, inner=inner, again=False, breaks="all" if layer.breaks else "")


def _without_checkpoints(layer: Layer) -> Layer:
    return replace(layer, checkpointed=False, inner=tuple(map(_without_checkpoints, layer.inner)))


def _without(layer: Layer, kind: str) -> Layer:
    inner = tuple(_without(one, kind) for one in layer.inner)
    return replace(layer, kind="mlp" if layer.kind == kind else layer.kind, inner=inner)


def _used_once(layer: Layer, around: bool) -> Layer:
    """`around`: whether its residual sum may be outside the region of its body, as in a checkpoint that breaks."""
    around = around or (layer.checkpointed and any(inner.breaks for inner in _walk((layer,))))
    kind = "mlp" if around and layer.kind in USE_OFTEN else layer.kind
    hidden = 8 if around and kind == "norm" else layer.hidden  # an RMSNorm uses it twice
    return replace(layer, kind=kind, hidden=hidden, inner=tuple(_used_once(inner, around) for inner in layer.inner))


def _sensible_layer(layer: Layer, case: Case) -> Layer:
    changed = replace(layer, inner=tuple(_sensible_layer(inner, case) for inner in layer.inner))
    if case.policy != "f32":  # dropout in bf16
        changed = replace(changed, dropout=0.0)
    # What is recomputed reads outside any graph, or writes twice.
    if any(inner.kind in (*READ_OUTSIDE, *WRITE) for inner in _walk((changed,))):
        changed = replace(changed, checkpointed=False)
    # Behind a break that Dynamo cannot resume from it runs no graph of that code again: what is recomputed is another.
    if any(inner.breaks for inner in _walk(changed.inner)):
        changed = replace(changed, checkpointed=False)
    if changed.breaks:
        changed = replace(changed, again=False)
    if changed.checkpointed and any(inner.breaks == "one" for inner in _walk((changed,))):
        changed = _of_parts(changed)
    return changed


def smaller(case: Case) -> Iterator[Case]:
    """Cases with less in them, those with much less first: of jobs that take seconds Hypothesis tries too many."""
    for count in (len(case.layers) // 2, len(case.layers) - 1):
        for start in range(len(case.layers) - count + 1) if 0 < count < len(case.layers) else ():
            yield replace(case, layers=case.layers[start : start + count])
    for i in range(len(case.moves) if len(case.moves) > 1 else 0):
        yield replace(case, moves=case.moves[:i] + case.moves[i + 1 :])
    for each in fields(case):
        if each.name not in ("layers", "moves") and getattr(case, each.name) != each.default:
            yield replace(case, **{each.name: each.default})
    for i, layer in enumerate(case.layers):
        for less in _smaller_layer(layer):
            yield replace(case, layers=(*case.layers[:i], less, *case.layers[i + 1 :]))


def _smaller_layer(layer: Layer) -> Iterator[Layer]:
    yield from layer.inner
    for i, inner in enumerate(layer.inner):
        for less in _smaller_layer(inner):
            yield replace(layer, inner=(*layer.inner[:i], less, *layer.inner[i + 1 :]))
    for each in fields(layer):
        if each.name not in ("kind", "inner") and getattr(layer, each.name) != each.default:
            yield replace(layer, **{each.name: each.default})
    if layer.kind != "mlp":
        yield replace(layer, kind="mlp", inner=())
