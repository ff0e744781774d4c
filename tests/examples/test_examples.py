"""Each script of examples/ trains as it does in eager FSDP2, bit for bit, and goes on from its own checkpoints."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trainers

import graphshard
from graphshard.testing import WorkerPool

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, SAVED = 4, 2


def train(name: str, *arguments: str) -> tuple[list[float], int]:
    """This rank's losses, and how many times compiled programs ran."""
    trainers.as_torchrun_does()
    compiled: list[Any] = []
    compile = graphshard.compile
    with mock.patch.object(graphshard, "compile", lambda *a, **k: compiled.append(compile(*a, **k)) or compiled[-1]):
        losses = importlib.import_module(name).main(["--steps", str(STEPS), "--save-after", str(SAVED), *arguments])
    return losses, sum(program.runs for model in compiled for program in graphshard.report(model).programs)


@pytest.mark.parametrize("name", trainers.NEEDS)
def test_losses_are_those_of_eager_fsdp2_from_either_checkpoint(
    name: str, two_ranks: WorkerPool, tmp_path: Path
) -> None:
    trainers.need(trainers.NEEDS[name])
    eager = two_ranks.run(train, name, "--backend", "none", "--checkpoint", str(tmp_path / "eager"))
    assert all(losses[-1] < losses[0] and programs == 0 for losses, programs in eager)
    own = ("--backend", "aot_eager", "--checkpoint", str(tmp_path / "own"))
    compiled = two_ranks.run(train, name, *own)
    assert all(programs >= 2 * STEPS for _, programs in compiled)
    assert [losses for losses, _ in compiled] == [losses for losses, _ in eager]
    for saved in ("own", "eager"):
        resumed = two_ranks.run(train, name, *own[:-1], str(tmp_path / saved), "--resume")
        assert [losses for losses, _ in resumed] == [losses[SAVED:] for losses, _ in eager]


def test_script_is_started_by_torchrun_and_inductor_is_within_1e_5(two_ranks: WorkerPool) -> None:
    eager, _ = two_ranks.run(train, "plain_loop", "--backend", "none", "--steps", "2")[0]
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [sys.executable, *torchrun, str(EXAMPLES / "plain_loop.py"), "--steps", "2"]
    path = os.pathsep.join([str(EXAMPLES.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert ran.returncode == 0, ran.stderr
    losses = [float(found) for found in re.findall(r"^step \d: loss (\S+)$", ran.stdout, re.MULTILINE)]
    assert losses == pytest.approx(eager, rel=1e-5)
    assert len(losses) == 2


@pytest.mark.parametrize("name", trainers.NEEDS)
def test_one_line_is_added(name: str) -> None:
    source = (EXAMPLES / f"{name}.py").read_text()
    assert len(re.findall(r"graphshard\.compile\(", source)) == 1
    assert len(re.findall(r"graphshard\.\w+\(", source)) == 1
