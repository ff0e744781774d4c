"""All of them."""

from __future__ import annotations

from tests.mutations.of_captures import OF_CAPTURES
from tests.mutations.of_docs import OF_DOCS
from tests.mutations.of_graphs import OF_GRAPHS
from tests.mutations.of_memory import OF_MEMORY
from tests.mutations.of_ranks import OF_RANKS
from tests.mutations.of_runs import OF_RUNS
from tests.mutations.of_tools import OF_TOOLS

MUTATIONS = (*OF_RUNS, *OF_RANKS, *OF_CAPTURES, *OF_MEMORY, *OF_GRAPHS, *OF_DOCS, *OF_TOOLS)
