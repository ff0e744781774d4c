"""Random jobs (see `tests/fuzz`): `make fuzz` plays more of them."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.fuzz.__main__ import PLAYED, Failed, failure_of, play_round
from tests.fuzz.cases import FEW, Case, Layer

# What such jobs have found, as small as they go.
FOUND = {
    "a cast is no gather: copies that are whole in bf16, where one rank's graphs break": Case(
        (Layer("mlp", breaks="one"), Layer("mlp")), plan="fsdp2", mesh="replicate", policy="bf16"
    ),
    "what is frozen is no state that tells backwards apart": Case(
        (Layer("buffer", breaks="all", frozen="all"), Layer("mlp")),
        units="layers",
        moves=("train", "other_rows", "train"),
    ),
    "a checkpoint recomputes what reads parameters and calls no module": Case(
        (Layer("list", checkpointed=True, breaks="all"),), units="layers"
    ),
    "what is frozen while it stays gathered is so until it is resharded": Case(
        (Layer("mlp"),), moves=("evaluate", "freeze", "train", "train")
    ),
    "what a checkpoint reads twice, and is called twice, is added up one by one": Case(
        (Layer("scaled", checkpointed=True), Layer("mlp", again=True)), seed=920
    ),
    "what is read around graphs is reduced together with what earlier microbatches left": Case(
        (Layer("nested", inner=(Layer("lstm", breaks="all"), Layer("norm"))),) * 2, microbatches=2
    ),
    "a part of which backward sends nothing is followed": Case(
        (
            Layer("nested", breaks="all", frozen="all", inner=(Layer("mlp", hidden=3), Layer("embedding", hidden=7))),
            Layer("embedding", hidden=7, breaks="all"),
        ),
        units="inner",
        regions="unit",
        moves=("train", "other_rows", "train"),
    ),
    "a checkpoint is recomputed in other graphs on the rank that came to a recompile limit": Case(
        (
            Layer("mlp"),
            Layer("mlp"),
            Layer("conv", checkpointed=True, breaks="all"),
            Layer("norm", checkpointed=True),
        ),
        units="some",
        reshard=False,
        recompile_limit=FEW,
        moves=("train", "train", "evaluate", "other_rows", "train", "train"),
        seed=140,
    ),
    "such a checkpoint whose unit is gathered in backward": Case(
        (
            Layer("mlp"),
            Layer("conv", checkpointed=True, breaks="all"),
            Layer("mlp", checkpointed=True),
            Layer("mlp", checkpointed=True),
        ),
        units="some",
        plan="fsdp2",
        recompile_limit=4,
        moves=("train", "train", "evaluate", "other_rows", "train", "train"),
        seed=140,
    ),
    "torch looks for the parameters of one block in another of its class": Case(
        (Layer("mlp", hidden=16, checkpointed=True), Layer("conv", checkpointed=True)),
        regions="unit",
        microbatches=3,
        moves=("train", "mode", "train"),
        seed=244,
    ),
    "torch fails to trace a number that is another in each call": Case((Layer("counter"),), microbatches=3),
    "torch fails to trace such a number behind a graph break": Case(
        (Layer("mlp", breaks="all"), Layer("counter", breaks="all")), microbatches=3
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    failure = failure_of(FOUND[name], "aot_eager")
    assert failure is None, failure


@pytest.mark.row("X11")
@pytest.mark.parametrize("seed", [1, 2])
def test_random_jobs_have_the_bits_of_eager_fsdp2(seed: int) -> None:
    played = Counter[str]()
    try:
        play_round(12, seed, "aot_eager", played)
    except Failed as error:
        pytest.fail(f"python -m tests.fuzz --case '{error.case}'\n{error}")
    refused = played - Counter({PLAYED: played[PLAYED]})
    assert refused.total() < 6, refused


def test_a_case_is_read_back_from_what_is_printed() -> None:
    inner = Layer("mlp", breaks="one")
    case = Case((Layer("nested", inner=(inner, inner)), Layer("lstm", dropout=0.2)), tied=True, moves=("train", "load"))
    assert Case.parse(str(case)) == case
    assert str(Case((Layer("mlp"),))) == '{"layers": [{"kind": "mlp"}]}'
