"""For tests of sharded models: ranks that stay alive, exact comparison, parity with eager FSDP2, faults on purpose.

Of what trains only the demo imports it. Imports any room but `demo`.
"""

from graphshard.testing.compare import (
    ParityError,
    Where,
    compare_named,
    compare_nested,
    compare_tensors,
)
from graphshard.testing.failures import RankFailed, RankFailure
from graphshard.testing.parity import ParityResult, check_parity
from graphshard.testing.tolerance import Bitwise, Tolerance, Ulps, ulp_distance
from graphshard.testing.training import TrainingRun, rerun, training_test
from graphshard.testing.workers import WorkerPool, pool, shutdown_pools

__all__ = [
    "Bitwise",
    "ParityError",
    "ParityResult",
    "RankFailed",
    "RankFailure",
    "Tolerance",
    "TrainingRun",
    "Ulps",
    "Where",
    "WorkerPool",
    "check_parity",
    "compare_named",
    "compare_nested",
    "compare_tensors",
    "pool",
    "rerun",
    "shutdown_pools",
    "training_test",
    "ulp_distance",
]
