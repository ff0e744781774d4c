"""Processes that torchrun starts again compare anew, although its store is still there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from graphshard.testing.environment import worker_environment

ROOT = Path(__file__).resolve().parents[2]

# The first time, rank 1 has other lines; the second time, it has others than the first time.
SCRIPT = """
import os
import torch.distributed as dist
from graphshard.agreement import post_to_group

dist.init_process_group("gloo")
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], dist.get_rank()
posted = post_to_group(dist.group.WORLD.group_name, "lines", [f"{attempt}{rank}" if attempt == "0" else attempt])
posted.compare(20.0)
print(f"rank {rank} agreed in attempt {attempt}", flush=True)
dist.destroy_process_group()
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
    assert sorted(line for line in done.stdout.splitlines() if "agreed" in line) == [
        "rank 0 agreed in attempt 1", "rank 1 agreed in attempt 1",
    ]  # fmt: skip
    for mine, theirs in ((0, 1), (1, 0)):
        assert f"got '0{mine}' on rank {mine} and '0{theirs}' on rank {theirs}" in done.stderr
