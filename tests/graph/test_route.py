"""Which leg of the last call a part of this one belongs to, where ranks are threads that share a store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from graphshard.agree.consensus import Consensus
from graphshard.agree.rank_store import RankStore
from graphshard.errors import RanksDiffer
from graphshard.following.route import Leg, Route

CALL = "the forward of 'net'"
KNOWN = SimpleNamespace(known_as=lambda leg: leg)


def consensus(count: int = 2) -> list[Consensus]:
    store = RankStore(dist.HashStore(), "test")  # type: ignore[attr-defined]
    return [Consensus(store, "net", rank, range(count), 1.2) for rank in range(count)]


@dataclass(frozen=True)
class Named:
    """A parameter of a unit: that of ``a1`` is ``a``; those of ``z`` are reduced though unused."""

    fqn: str

    @property
    def unit(self) -> Any:
        return SimpleNamespace(name=self.fqn[0], reduce_unused=self.fqn[0] == "z")


def binding(text: str) -> Any:
    """Of some parameters."""
    shards = [Named(fqn) for fqn in text.split()]
    return SimpleNamespace(shards=shards, shard_set=frozenset(shards))


def leg(text: str, turns: Any = KNOWN) -> Leg:
    return Leg(turns, f"structure of {text}", None, binding(text), None)  # type: ignore[arg-type]


def routes(own: list[Consensus], *legs: str) -> list[Route]:
    """Routes of ranks that have made one call."""
    found = [Route(one, lambda line: None) for one in own]

    def call(route: Route) -> None:
        route.begin()
        for text in legs:
            route.use(leg(text))
        route.end(CALL, 0)

    together(found, call)
    return found


def together(items: list[Any], call: Any) -> list[Any]:
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(call, items))


def part(route: Route, number: int, text: str) -> str:
    """The leg that it belongs to."""
    found = route.leg_of(CALL, number, binding(text), f"structure of {text}")
    return " ".join(sorted(shard.fqn for shard in found.binding.shards)) if found else ""


def test_part_that_one_rank_has_alone_belongs_to_the_leg_in_its_place() -> None:
    said: list[str] = []
    own = consensus()
    _, route = routes(own, "a1 a2", "b1 b2")
    route._say = said.append
    assert part(route, 1, "a1") == "a1 a2"
    route.enter(leg("a1 a2"))
    assert part(route, 1, "a2") == "a1 a2"
    assert part(route, 1, "b2") == "b1 b2"  # its second leg: not asked about any more
    route.enter(leg("b1 b2"))
    route.end(CALL, 1)
    own[1]._store = None  # nor in later calls
    assert part(route, 2, "a2") == "a1 a2"
    assert len(said) == 1


def test_part_that_all_ranks_come_to_is_a_leg_of_its_own() -> None:
    own = consensus()
    found = routes(own, "a1 a2", "b1")
    for number in range(1, 4):
        assert together(found, lambda route, number=number: part(route, number, "a1")) == ["", ""]
        for route in found:
            route.begin()
    for one in own:
        one._store = None
    assert part(found[0], 4, "a1") == ""  # they take it alike


def test_question_is_asked_once_in_a_call() -> None:
    found = routes(consensus(), "a1 a2")
    assert together(found, lambda route: [part(route, 1, "a1"), part(route, 1, "a1")]) == [["", ""]] * 2


def test_ranks_with_different_parts_share_the_leg() -> None:
    found = routes(consensus(), "a1 a2")
    texts = iter(["a1", "a2"])
    assert together(found, lambda route: part(route, 1, next(texts))) == ["a1 a2"] * 2
    found = routes(consensus(), "a1 a2")
    structures = iter(["", "structure of a1"])  # one reads it outside any graph

    def leg_of(route: Route) -> bool:
        return route.leg_of(CALL, 1, binding("a1"), next(structures)) is not None

    assert together(found, leg_of) == [True, True]


def test_leg_may_come_apart_into_one_with_all_of_its_parameters() -> None:
    _, route = routes(consensus(), "a1 a2", "b1")
    found = route.leg_of(CALL, 1, binding("a1 a2"), "more of its inputs need gradients")
    assert found is not None
    route.enter(found)
    assert part(route, 1, "b1") == ""


@pytest.mark.parametrize("text", ["a1 a2", "b1", "b1 b2", "a1 a2 z1"])
def test_nobody_is_asked_about_a_leg_of_the_last_call_or_a_part_of_another(text: str) -> None:
    own = consensus()
    route = routes(own, "a1 a2", "b1 b2")[0]
    own[0]._store = None
    assert part(route, 1, text) == ""


@pytest.mark.parametrize("text", ["a1 b1", "a1 a2 b1", "a1 a2 b1 b2", "c1"])
def test_leg_that_goes_on_is_one_of_its_own_where_all_ranks_come_to_it(text: str) -> None:
    found = routes(consensus(), "a1 a2", "b1 b2")
    assert together(found, lambda route: [part(route, 1, text), part(route, 1, text)]) == [["", ""]] * 2


def test_leg_that_goes_on_is_told_of_where_others_do_not_come_to_it() -> None:
    _, route = routes(consensus(), "a1 a2", "b1 b2")
    with pytest.raises(
        RanksDiffer, match=r"on rank 1 one graph goes on to b1, where .* set_reduce_scatter_unused_params"
    ):
        part(route, 1, "a1 a2 b1")


def test_leg_that_cannot_be_followed_has_no_parts() -> None:
    own = consensus()
    route = Route(own[0], lambda line: None)
    route._latest[CALL] = (leg("a1 a2", SimpleNamespace(known_as=lambda leg: None)),)
    assert part(route, 1, "a1") == ""


def test_first_calls_with_other_legs_are_told_before_anything_is_sent() -> None:
    found = [Route(one, lambda line: None) for one in consensus()]
    second = iter(["b1 b2", "b1"])

    def call(route: Route) -> str:
        route.check_first(CALL, 1, binding("a1"), runs=False)
        route.check_first(CALL, 1, binding("a1"), runs=True)
        with pytest.raises(RanksDiffer) as caught:
            route.check_first(CALL, 1, binding(next(second)), runs=False)
        return str(caught.value)

    for text in together(found, call):
        assert f"call 1, leg 2 of {CALL}: ranks differ in the units that they use" in text
        assert "'b: b1, b2'" in text and "'b: b1'" in text
    known = routes(consensus(), "a1")[0]
    known._consensus._store = None
    known.check_first(CALL, 2, binding("b1"), runs=True)  # no first call


def test_calls_that_use_other_parameters_than_on_another_rank_are_told() -> None:
    found = routes(consensus(), "a1", "b1")
    third = iter(["b1", "c1"])

    def call(route: Route) -> str:
        route.use(leg("a1"))
        route.use(leg(next(third) + " d1"))
        with pytest.raises(RanksDiffer) as caught:
            route.end(CALL, 1)
        return str(caught.value)

    assert all("b: b1" in text or "c: c1" in text for text in together(found, call))


def test_call_that_only_one_rank_makes_otherwise_is_told_with_what_has_changed() -> None:
    route = routes(consensus(), "a1", "b1")[1]
    route._consensus.deadline_s = 0.2
    route.use(leg("a1"))
    with pytest.raises(RanksDiffer, match=r"never came.* on rank 1 it uses nothing more in place 1, .* used 'b: b1'"):
        route.end(CALL, 1)


def test_calls_that_run_a_leg_another_number_of_times_are_told() -> None:
    one, two = leg("a1"), leg("b1")
    found = [Route(own, lambda line: None) for own in consensus()]
    for route in found:
        for used in (one, two):
            route.use(used)
    together(found, lambda route: route.end(CALL, 0))
    again = iter([(one, one, two), (one, two, two)])

    def call(route: Route) -> str:
        for used in next(again):
            route.use(used)
        with pytest.raises(RanksDiffer) as caught:
            route.end(CALL, 1)
        return str(caught.value)

    assert all("first in place 1" in text and "a: a1" in text for text in together(found, call))


def test_legs_of_a_split_unit_that_follow_one_another_are_one_use() -> None:
    own, (first, second) = consensus(), (leg("a1"), leg("a2"))
    route = Route(own[0], lambda line: None, split=[Named("a1").unit, Named("a2").unit])
    route._latest[CALL] = (leg("a1 a2"),)
    own[0]._store = None
    for used in (first, second):
        route.use(used)
    route.end(CALL, 1)  # as before: nobody is asked
