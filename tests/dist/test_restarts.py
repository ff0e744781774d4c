"""Processes that torchrun starts again compare anew, although its store is still there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from graphshard.testing.environment import worker_environment

ROOT = Path(__file__).resolve().parents[2]

# The first time, rank 1 has other lines; the second time, both have others than the first time. Without a process group:
# gloo itself may fail where it finds the addresses of the first time in the store.
SCRIPT = """
import os
from torch.distributed import TCPStore
from graphshard.agree.agreement import group_key, post

attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
print(f"rank {rank}, attempt {attempt}: old store: {store.check(['old'])}", flush=True)
lines = [f"{attempt}{rank}" if attempt == "0" else attempt]
posted = post(store, group_key("0", (0, 1), 0), "lines", rank, (0, 1), lines)
try:
    posted.compare(20.0)
finally:
    store.set("old", "")
print(f"rank {rank} agreed in attempt {attempt}", flush=True)
"""


def test_ranks_that_differed_agree_when_they_are_started_again(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    environment = {**worker_environment(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(script)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "agreed in attempt 0" not in done.stdout
    for rank in (0, 1):
        assert f"rank {rank}, attempt 1: old store: True" in done.stdout
        assert f"rank {rank} agreed in attempt 1" in done.stdout
    # The first rank that fails ends the other.
    assert "got '00' on rank 0 and '01' on rank 1" in done.stderr or "got '01' on rank 1 and '00'" in done.stderr
