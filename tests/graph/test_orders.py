"""Orders of regions: what is known of a pass from those before it."""

from __future__ import annotations

from graphshard.runtime.orders import MAX_ORDERS, Order, Orders, PassStep, RunningPass


def step(name: str) -> PassStep:
    return PassStep("forward", (name.lower(),))


def gathers(name: str) -> dict[str, str]:
    return {name: name} if name.islower() else {}


def following(order: Order[str] | None, position: int) -> list[str] | None:
    return None if order is None else [name for names in order.following(position) for name in names]


def running(orders: Orders[str], names: str, kind: str = "forward") -> tuple[RunningPass[str], list[list[str] | None]]:
    """Runs a whole pass, one region per letter (capital letters: without a gather); what followed each."""
    running, followed = orders.begin(kind), []
    for position, name in enumerate(names):
        followed.append(following(running.follow(step(name), gathers(name), lambda: None), position))
    return running, followed


def record(orders: Orders[str], names: str, kind: str = "forward") -> bool:
    """Whether that order is kept."""
    return orders.end(running(orders, names, kind)[0]) is not None


def test_order_is_known_from_the_second_pass_on() -> None:
    orders: Orders[str] = Orders()
    first, followed = running(orders, "abc")
    assert followed == [None] * 3
    order = orders.end(first)
    assert order is not None and order.steps == tuple(map(step, "abc")) and not order.agreed
    second, followed = running(orders, "abc")
    assert followed == [["b", "c"], ["c"], []]
    assert orders.end(second) is order and second.expected is None


def test_order_gathers_what_any_of_its_passes_did() -> None:
    orders: Orders[str] = Orders()
    assert record(orders, "aBCd")
    assert running(orders, "abcd")[1] == [["d"], ["d"], ["d"], []]
    assert record(orders, "abCD")
    assert running(orders, "abcd")[1] == [["b", "d"], ["d"], ["d"], []]


def test_kinds_of_passes_have_orders_of_their_own() -> None:
    orders: Orders[str] = Orders()
    record(orders, "abc", "forward")
    assert running(orders, "abc", "backward")[1] == [None] * 3


def test_pass_that_leaves_its_order_follows_another_one_or_none() -> None:
    orders: Orders[str] = Orders()
    record(orders, "abc")
    record(orders, "adc")
    latest, followed = running(orders, "abc")
    assert followed == [["d", "c"], ["c"], []]  # the latest first, then the one that fits
    assert latest.expected is None
    lost, followed = running(orders, "axc")
    assert followed[1:] == [None, None]
    assert lost.expected == step("d")


def test_longer_pass_goes_on_alone() -> None:
    orders: Orders[str] = Orders()
    record(orders, "ab")
    longer, followed = running(orders, "abc")
    assert followed == [["b"], [], None]
    assert longer.expected is None  # nothing else was known to follow


def test_known_order_comes_first_when_it_ran_last() -> None:
    orders: Orders[str] = Orders()
    record(orders, "ab")
    record(orders, "ac")
    record(orders, "ab")
    assert running(orders, "ab")[1] == [["b"], []]


def test_ever_new_orders_are_not_all_kept() -> None:
    orders: Orders[str] = Orders()
    names = [f"a{chr(ord('b') + i)}" for i in range(MAX_ORDERS + 1)]
    assert [record(orders, name) for name in names] == [True] * MAX_ORDERS + [False]
    assert record(orders, names[0])
    assert running(orders, names[0])[1] == [[names[0][1]], []]


def test_empty_pass_is_no_order() -> None:
    orders: Orders[str] = Orders()
    assert not record(orders, "")


def recompute(orders: Orders[str], *names: str) -> tuple[RunningPass[str], list[int]]:
    """Runs a backward; names that begin with "+" are recomputed forwards, those that end with "!" gather nothing.
    Returns each step's place in the order.
    """
    running, places = orders.begin("backward"), []
    for name in names:
        direction = "forward" if name.startswith("+") else "backward"
        one = PassStep(direction, tuple(name.strip("+!").split(",")))
        wanted = {} if name.endswith("!") else dict.fromkeys(one.units, name)
        if not running.goes_on(one, wanted, lambda: None):
            running.follow(one, wanted, lambda: None)
        places.append(len(running.steps) - 1)
    return running, places


def test_what_one_rank_recomputes_in_other_graphs_takes_no_places_of_its_own() -> None:
    orders: Orders[str] = Orders()
    order = orders.end(recompute(orders, "d", "b,c", "+a", "a")[0])
    same = orders.end(recompute(orders, "a", "a", "a")[0])
    running, places = recompute(orders, "a", "+a", "+a", "a", "a")
    assert places == [0, 1, 1, 1, 2] and orders.end(running) is same
    for names, expected in (
        (("d", "+b,c", "b,c", "+a", "a"), [0, 1, 1, 2, 3]),  # in the backward's graph on other ranks
        (("d", "+b", "+c", "b,c", "+a", "a"), [0, 1, 1, 1, 2, 3]),
        (("d", "b,c", "+a", "+a", "a"), [0, 1, 2, 2, 3]),  # in parts
    ):
        running, places = recompute(orders, *names)
        assert places == expected and running.known and orders.end(running) is order, names
    assert not recompute(orders, "d", "+e")[0].known
    assert not recompute(orders, "d", "+b", "a")[0].known


def test_what_parts_gather_is_not_what_their_step_does() -> None:
    orders: Orders[str] = Orders()
    order = orders.end(recompute(orders, "b,c", "+a", "a")[0])
    orders.end(recompute(orders, "+b", "+c", "b,c!", "+a", "+a", "a")[0])
    assert order is not None
    assert order.gathers == ({"b": "b,c", "c": "b,c"}, {"a": "+a"}, {"a": "a"})
    orders.end(recompute(orders, "+b", "b,c!", "+a", "a")[0])
    assert order.gathers[0] == {"b": "b,c", "c": "b,c"}


def test_what_all_ranks_recompute_has_its_place() -> None:
    orders: Orders[str] = Orders()
    orders.end(recompute(orders, "+b", "b", "+a", "a")[0])
    order = orders.end(recompute(orders, "+b", "+b", "b", "+a", "a")[0])
    assert order is not None and len(order.steps) == 4  # the second of them is a part
    assert recompute(orders, "b", "a")[0].expected == PassStep("forward", ("b",))


def test_forwards_of_a_forward_are_no_parts() -> None:
    orders: Orders[str] = Orders()
    orders.end(recompute(orders, "+a,b", "+c")[0])
    assert not recompute(orders, "+a")[0].known
