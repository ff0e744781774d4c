"""The demo's checkpoints: what is not complete is never loaded, on any rank, and training goes on as if nothing was."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.faults.crash_runner import CrashRunner
from bench.faults.crashes import CRASHES
from graphshard.demo.checkpoints import LIST, METADATA, CheckpointFailed, Checkpoints
from graphshard.demo.model import ModelConfig
from graphshard.demo.restartable import RunOptions, train
from graphshard.testing import WorkerPool

SETTINGS = {"rows": 2}
TINY = ModelConfig(n_layers=1, dim=32, n_heads=2, hidden_dim=48, max_seq_len=16, dropout=0.1)


def name(step: int) -> str:
    return f"step-{step:08d}"


def state() -> dict[str, Any]:
    """Something of each rank, and something of all."""
    rank = dist.get_rank()
    return {"own": {f"rank{rank}": torch.full((100,), float(rank))}, "shared": torch.arange(10.0)}


def saved(folder: str, steps: list[int]) -> list[str]:
    said: list[str] = []
    checkpoints = Checkpoints(Path(folder), 2, said.append)
    for step in steps:
        checkpoints.save(step, state(), SETTINGS)
    return said


def newest(folders: list[str]) -> tuple[str | None, list[str]]:
    """What a rank finds, and what is said there; each rank may see another folder."""
    said: list[str] = []
    found = Checkpoints(Path(folders[dist.get_rank() % len(folders)]), 2, said.append).newest()
    return (None if found is None else found.path.name), said


def test_newest_complete_checkpoints_are_kept_and_nothing_else(two_ranks: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / f"{name(1)}.unfinished-0a").mkdir()
    (tmp_path / f"{name(1)}.removed-0b").mkdir()
    assert two_ranks.run(saved, str(tmp_path), [2, 4, 6]) == [[], []]
    assert sorted(path.name for path in tmp_path.iterdir()) == [name(4), name(6)]
    assert two_ranks.run(newest, [str(tmp_path)]) == [(name(6), [])] * 2


def half(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def forget_metadata(file: Path) -> None:
    content = json.loads(file.read_text())
    del content["files"][METADATA]
    file.write_text(json.dumps(content))


def empty_list(file: Path) -> None:
    file.write_text("[]")


def nest(file: Path) -> None:
    file.write_text("[" * 200_000)


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    ("__1_0.distcp", Path.unlink, "rank \\d: __1_0.distcp is missing"),
    ("__1_0.distcp", half, "rank \\d: __1_0.distcp has \\d+ bytes, want \\d+"),
    ("__0_0.distcp", flip, "rank \\d: __0_0.distcp has other bytes than were written"),
    ("__1_0.distcp", flip, "rank \\d: __1_0.distcp has other bytes than were written"),
    (METADATA, Path.unlink, "rank \\d: .metadata is missing"),
    (LIST, Path.unlink, "rank \\d: complete.json is missing"),
    (LIST, forget_metadata, "rank \\d: complete.json does not name .metadata"),
    (LIST, half, "rank \\d: complete.json cannot be read: ValueError: .*"),
    (LIST, nest, "rank \\d: complete.json cannot be read: ValueError: .*"),
    (LIST, empty_list, "rank \\d: complete.json cannot be read: TypeError: .*"),
]


def test_damaged_checkpoints_are_passed_over_with_a_line_that_says_why(two_ranks: WorkerPool, tmp_path: Path) -> None:
    two_ranks.run(saved, str(tmp_path / "whole"), [2, 4])
    for number, (file, damage, why) in enumerate(DAMAGES):
        folder = tmp_path / f"damaged{number}"
        shutil.copytree(tmp_path / "whole", folder)
        damage(folder / name(4) / file)
        for found, said in two_ranks.run(newest, [str(folder)]):
            assert found == name(2), why
            assert re.fullmatch(f"checkpoint {name(4)} is passed over: {why}", "\n".join(said))
    half(folder / name(2) / LIST)
    assert [found for found, _ in two_ranks.run(newest, [str(folder)])] == [None, None]


def test_what_was_never_finished_is_no_checkpoint(two_ranks: WorkerPool, tmp_path: Path) -> None:
    two_ranks.run(saved, str(tmp_path), [2, 4])
    unfinished = f"{name(4)}.unfinished-0123"
    (tmp_path / name(4)).rename(tmp_path / unfinished)  # all of it is there, but for its name
    for found, said in two_ranks.run(newest, [str(tmp_path)]):
        assert found == name(2)
        assert said == [f"checkpoint {unfinished} is passed over: it was never finished, or is being removed"]


@pytest.mark.parametrize("sees_less", [0, 1])
def test_ranks_that_see_other_folders_load_the_same_checkpoint(
    two_ranks: WorkerPool, tmp_path: Path, sees_less: int
) -> None:
    """Rank 0 decides for all, but on nothing that another rank lacks; what rank 0 lacks is not silently left out."""
    folders = [tmp_path / "0", tmp_path / "1"]
    two_ranks.run(saved, str(folders[0]), [2, 4])
    shutil.copytree(folders[0], folders[1])
    shutil.rmtree(folders[sees_less] / name(4))
    for found, said in two_ranks.run(newest, list(map(str, folders))):
        assert found == name(2)
        why = "it does not see this folder, which another rank sees"
        assert said == [f"checkpoint {name(4)} is passed over: rank {sees_less}: {why}"]
    two_ranks.run(saved, str(folders[0]), [4])
    shutil.copytree(folders[0] / name(4), folders[1] / name(4), dirs_exist_ok=True)
    content = json.loads((folders[1] / name(4) / LIST).read_text())
    (folders[1] / name(4) / LIST).write_text(json.dumps({**content, "settings": {"rows": 3}}))
    for found, said in two_ranks.run(newest, list(map(str, folders))):
        assert (found, said) == (
            name(2), [f"checkpoint {name(4)} is passed over: ranks read different lists of files, complete.json"],
        )  # fmt: skip


class FullDisk(Checkpoints):
    def finish(self, unfinished: Path, final: Path, content: Mapping[str, Any]) -> None:
        raise OSError(28, "No space left on device")


def saved_on_a_full_disk(folder: str) -> str:
    with pytest.raises(CheckpointFailed) as failed:
        FullDisk(Path(folder), 2, lambda line: None).save(4, state(), SETTINGS)
    return str(failed.value)


def test_disk_that_is_full_is_an_error_on_every_rank_and_leaves_no_checkpoint(
    two_ranks: WorkerPool, tmp_path: Path
) -> None:
    two_ranks.run(saved, str(tmp_path), [2])
    for said in two_ranks.run(saved_on_a_full_disk, str(tmp_path)):
        assert re.fullmatch(
            rf"checkpoint .*{name(4)} could not be finished, so it is none: OSError: .*No space left on device", said
        )
    assert [found for found, _ in two_ranks.run(newest, [str(tmp_path)])] == [name(2)] * 2


def test_damaged_checkpoint_makes_room_for_the_one_that_is_saved_again(two_ranks: WorkerPool, tmp_path: Path) -> None:
    two_ranks.run(saved, str(tmp_path), [2, 4])
    half(tmp_path / name(4) / "__1_0.distcp")
    (told, nothing) = two_ranks.run(saved, str(tmp_path), [4])
    assert nothing == []
    assert re.fullmatch(
        rf"checkpoint {name(4)} is replaced; what was found in its place is {name(4)}\.damaged-\w+", told[0]
    )
    assert two_ranks.run(newest, [str(tmp_path)]) == [(name(4), [])] * 2


# -- training


def trained(folder: str, steps: int, resume: bool) -> tuple[list[tuple[float, float]], list[str]]:
    """Losses and gradient norms, as noted by rank 0, and what was said."""
    said: list[str] = []
    log = Path(folder).parent / f"losses of {Path(folder).name}, {steps}"
    options = RunOptions(
        Path(folder), steps, 2, resume=resume, backend="aot_eager", global_batch=4, log=log, config=TINY
    )
    assert train(options, init_device_mesh("cpu", (2,)), said.append) == 0
    dist.barrier()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines], said


def refused(folder: str, resume: bool, rows: int) -> str:
    options = RunOptions(Path(folder), 4, 2, resume=resume, backend="aot_eager", global_batch=rows, config=TINY)
    with pytest.raises(CheckpointFailed) as failed:
        train(options, init_device_mesh("cpu", (2,)), lambda line: None)
    return str(failed.value)


def test_training_goes_on_bitwise_from_a_checkpoint(two_ranks: WorkerPool, tmp_path: Path) -> None:
    """With dropout: the random numbers of each rank are in the checkpoint."""
    (whole, _), _ = two_ranks.run(trained, str(tmp_path / "whole"), 4, False)
    shutil.copytree(tmp_path / "whole" / name(2), tmp_path / "parts" / name(2))
    (rest, said), _ = two_ranks.run(trained, str(tmp_path / "parts"), 4, True)
    assert rest == whole[2:]
    assert f"training goes on from {name(2)}, which 2 ranks have saved" in said
    for said in two_ranks.run(refused, str(tmp_path / "parts"), False, 4):
        assert re.search(rf"{name(4)} is there; want --resume, to go on from it, or another folder", said)
    for said in two_ranks.run(refused, str(tmp_path / "parts"), True, 8):
        assert re.search(rf"{name(4)} is of a run with .*'global_batch': 4.*; got .*'global_batch': 8.*; want", said)


def test_job_whose_rank_is_killed_in_a_save_goes_on_from_the_checkpoint_before() -> None:
    """Under torchrun, whose store outlives the ranks; `bench.faults` has the other crashes, and a job without one."""
    outcome = CrashRunner().run(CRASHES["crash in a save, in the middle of a file"], "aot_eager", 0.1, 2)
    assert (outcome.statuses, len(outcome.crashed), outcome.began) == ((0,), 1, [0, 2]), outcome.said
    assert [line.step for line in outcome.lines] == [1, 2, 3, 4, 3, 4, 5, 6, 7, 8]
    once, again = ([(line.loss, line.grad_norm) for line in outcome.lines[begin:][:2]] for begin in (2, 4))
    assert once == again
    (line,) = outcome.passed_over
    assert re.match(rf"checkpoint {name(4)}\.unfinished-\w+ is passed over: it was never finished", line)
    assert outcome.left == ()
