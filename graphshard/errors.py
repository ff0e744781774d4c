"""The errors of graphshard. Bad arguments raise `ValueError` or `TypeError`; these are for the rest."""

from __future__ import annotations


class UnsupportedModel(RuntimeError):
    """The model uses something that graphshard cannot compile; the message names the parameter, module or operator."""


class VerifyError(RuntimeError):
    """A pass broke an invariant of the graph: a bug in graphshard, never in the user's model.

    Attributes:
        invariant: id of the invariant that failed, such as ``"C1"``.
        step: name of the pass, where it was one that broke it.
    """

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"[{invariant}] {message}")
        self.invariant = invariant
        self.step = ""


class PassFailed(VerifyError):
    """A pass changed what a graph computes: invariant ``"V1"``; the message names pass, result, node and reproducer."""

    def __init__(self, message: str) -> None:
        super().__init__("V1", message)


class ModelDeleted(RuntimeError):
    """A compiled model was deleted while programs of it were still to run, as a backward's are."""

    def __init__(self, where: str) -> None:
        super().__init__(f"{where}: the compiled model was deleted; keep it until its last backward has run")


class TwinsMoved(RuntimeError):
    """What was traced for blocks that are alike is wrong now; nothing of the graph that says so has run."""

    def __init__(self) -> None:
        super().__init__(
            "a tensor of a block is in another place of the model now, or an argument, too, which was seen when other "
            "graphs of this call had run. Call the model again: every block is traced then, as with GRAPHSHARD_TWINS=0"
        )


class RanksDiffer(RuntimeError):
    """Ranks that take part in the same collectives do not run the same programs; the message names what differs."""


class OrderDiffers(RanksDiffer):
    """What one rank computes cannot send what ranks have agreed on in the order that they have agreed on."""


class CommunicationFailed(RuntimeError):
    """A collective of a program failed; the message names it, its parameters and the ranks that are missing."""
