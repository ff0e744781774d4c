"""The table of semantics: what eager FSDP2 does, row by row, and which of PyTorch's own tests say so.

A test names the rows that it shows: ``@pytest.mark.row("S12", "R8")``. S: `fully_shard`, R: `replicate`, B: prefetch in
backward, A: gradient accumulation, P: pipelines; X: what PyTorch tests of a model that is not compiled, or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Demand = Literal["test", "nothing", "cuda"]


@dataclass(frozen=True)
class Row:
    """One behaviour.

    Attributes:
        id: as marks name it.
        title: the behaviour, in a few words.
        demand: ``"test"``: a test must show it; ``"nothing"``: there is nothing to show; ``"cuda"``: only a
            CUDA device can show it.
        note: why, where no test is demanded.
    """

    id: str
    title: str
    demand: Demand = "test"
    note: str = ""


ROWS: tuple[Row, ...] = (
    Row("S1", "a root without parameters; inputs move to the mesh's device"),
    Row("S2", "a forward without inputs"),
    Row("S3", "what is registered after forward, for each reshard_after_forward"),
    Row("S4", "what is registered after backward"),
    Row("S5", "list of modules still to run", "nothing", "private bookkeeping of a group of one module"),
    Row("S6", "to(float64) after sharding"),
    Row("S7", "one group, even and uneven shards on dim 0, empty shards"),
    Row("S8", "one group, parameters sharded on their largest dim"),
    Row("S9", "a group for each block, reshard_after_forward True, False and int"),
    Row("S10", "CPU offload"),
    Row("S11", "asynchronous unshard as a hint"),
    Row("S12", "forward and backward of a submodule alone"),
    Row("S13", "a group called twice in one forward"),
    Row("S14", "explicit prefetch, forward and backward"),
    Row("S15", "an event after the optimizer's step"),
    Row("S16", "activation checkpointing, list groups, tied weights, unshard_in_backward"),
    Row("S17", "chunked loss: part of a group in forward, the rest by itself"),
    Row("S18", "inputs are cast at each module of a list group"),
    Row("S19", "chunked loss over microbatches"),
    Row("S20", "chunked loss with a head that stays unsharded"),
    Row("S21", "an exception in forward, then reset_iter_state"),
    Row("S22", "two forwards and one backward, nested groups, checkpointing"),
    Row("S23", "two partial forwards and one backward: no gradient for what did not run"),
    Row("S24", "groups of parameters sharded on several dims"),
    Row("S25", "parameters and gradients are contiguous, in user hooks too"),
    Row("S26", "tied parameters in one group"),
    Row("S27", "tied parameters, uneven shards: unshard, reshard, every row trains"),
    Row("S28", "tied parameters in two groups are refused"),
    Row("S29", "layers made, sharded and freed one by one"),
    Row("S30", "gradient accumulation in every mode, with its numbers of collectives"),
    Row("S31", "microbatches of 1F1B, unshard ahead of time"),
    Row("S32", "tensor parallel and fully_shard"),
    Row("S33", "tensor, expert and data parallel: several meshes in a group"),
    Row("S34", "tensor parallel and HSDP on a 3-D mesh"),
    Row("S35", "HSDP with accumulation and offload"),
    Row("S36", "a method registered as a forward"),
    Row("S37", "several roots that share a communication context"),
    Row("S38", "world size 1: no collective"),
    Row("S39", "forward and backward in a CUDA graph", "cuda", "CUDA graphs"),
    Row("R1", "inputs move to the mesh's device"),
    Row("R2", "what is registered after forward"),
    Row("R3", "what is registered after backward"),
    Row("R4", "to(float64) after replicate"),
    Row("R5", "one group"),
    Row("R6", "a group for each block"),
    Row("R7", "CPU offload"),
    Row("R8", "forward and backward of a submodule alone"),
    Row("R9", "a group called twice in one forward"),
    Row("R10", "explicit prefetch is accepted"),
    Row("R11", "an event after the optimizer's step"),
    Row("R12", "activation checkpointing, list groups, tied weights"),
    Row("R13", "tied parameters in one group"),
    Row("R14", "gradient accumulation, with its numbers of collectives"),
    Row("R15", "microbatches of 1F1B, unshard ahead of time"),
    Row("R16", "a method registered as a forward"),
    Row("R17", "tensor parallel and replicate"),
    Row("B1", "gathers in backward run in reverse order, ahead of their use"),
    Row("A1", "accumulation: three without communication, three with, three without"),
    Row("A2", "accumulation: three with communication, three without, three with"),
    Row("A3", "accumulation with CPU offload"),
    Row("P1", "pipeline of replicated stages"),
    Row("P2", "pipeline of replicated stages, zero bubble", "nothing", "PyTorch's test returns at once"),
    Row("P3", "pipeline of fully sharded stages, every schedule"),
    Row("P4", "a schedule that unshards and reshards a stage"),
    Row("state", "optimizers, dtypes, loss scaling and checkpoints between steps"),
    Row("X1", "all-gather extensions of tensor subclasses"),
    Row("X2", "float8 training of torchao"),
    Row("X3", "parameters on a mesh of all axes: dp_mesh_dims"),
    Row("X4", "parameters without elements"),
    Row("X5", "experts on a mesh of their own, with all-to-all"),
    Row("X6", "context parallelism around the model"),
    Row("X7", "several backwards of one forward, over other outputs in each"),
    Row("X8", "what parameters() yields in forward"),
    Row("X9", "branches of a model's code, alike and not alike on the ranks"),
    Row("X10", "engines that change between and inside steps"),
    Row("X11", "random jobs"),
)
