"""The list, where ranks agree."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

OF_RANKS = (
    Mutation(
        "a contract keeps its order where no rank's graph can",
        "graphshard/agree/any_order.py",
        "        if key not in self._keys:\n            return contract\n",
        "        return contract\n",
        ("tests/dist/test_order_of_modules.py", "-k", "any_order"),
    ),
    Mutation(
        "programs stay that were made before ranks agreed on another order",
        "graphshard/agree/any_order.py",
        "        self.changes += 1\n",
        "",
        ("tests/dist/test_order_of_modules.py", "-k", "other_orders"),
    ),
    Mutation(
        "calls that run a leg another number of times are not told",
        "graphshard/following/route.py",
        "(leg in legs or shards[0].unit not in split)",
        "False",
        ("tests/graph/test_route.py", "-k", "number_of_times"),
    ),
    Mutation(
        "Dynamo traces what is told that it traces",
        "graphshard/faults/watched_run.py",
        "@uncaptured\ndef _begin_tracing(",
        "def _begin_tracing(",
        ("tests/dist/test_inside_forward.py", "-k", "gradient_of_an_input"),
    ),
)
