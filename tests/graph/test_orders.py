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
