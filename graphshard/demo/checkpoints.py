"""Checkpoints of one training run in a folder that all ranks see: one that is not complete is never loaded.

A checkpoint is written by `torch.distributed.checkpoint` into a folder of another name. When all ranks have written
their files, and torch its `.metadata`, rank 0 adds a list of all files with sizes and digests and renames the folder:
until then it is no checkpoint, from then on it is all there. What a crash leaves is passed over, and taken away by the
next save; what was damaged later is found by the list.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from graphshard.files.reading import parse_json

LIST = "complete.json"
METADATA = ".metadata"  # of torch: which tensor is where
_NAME = re.compile(r"step-(\d{8})")
_LEFT = re.compile(r"step-\d{8}\.(unfinished|removed)-[0-9a-f]+")


class CheckpointFailed(RuntimeError):
    """A checkpoint was not written, or is not for this run; on every rank."""


@dataclass(frozen=True)
class Checkpoint:
    """One that is complete.

    Attributes:
        path: its folder.
        step: so many steps had been made.
        world_size: of the ranks that saved it.
        settings: that its run had.
    """

    path: Path
    step: int
    world_size: int
    settings: Mapping[str, Any]


class Checkpoints:
    """Those of one run. Methods are collectives: every rank calls them, in the same order.

    Args:
        folder: where they are, on every rank.
        keep: so many of the newest stay.
        say: told, on every rank, what is passed over; on rank 0 what is replaced.
    """

    def __init__(self, folder: Path, keep: int, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._keep = keep
        self._say = say
        self._rank = dist.get_rank()

    def save(self, step: int, state: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Saves `state`, as `state_dict_saver.save` takes it, after `step` steps.

        Raises:
            CheckpointFailed: it could not be made complete.
        """
        final = self._folder / f"step-{step:08d}"
        names = [f"{final.name}.unfinished-{uuid4().hex}"]
        dist.broadcast_object_list(names)
        unfinished = self._folder / names[0]
        self.write(unfinished, state)
        parts: list[tuple[dict[str, Any], str]] = [({}, "")] * dist.get_world_size()
        dist.gather_object(self._own_files(unfinished), parts if self._rank == 0 else None)
        failed = [""]
        if self._rank == 0:
            failed[0] = "; ".join(f"rank {rank}: {error}" for rank, (_, error) in enumerate(parts) if error)
            files = {name: entry for part, _ in parts for name, entry in part.items()}
            content = {"step": step, "world_size": len(parts), "settings": dict(settings), "files": files}
            failed[0] = failed[0] or _error_of(lambda: self.finish(unfinished, final, content))
            if not failed[0] and (error := _error_of(lambda: self._prune(step))):
                self._say(f"checkpoints that are not needed any more could not be removed: {error}")
        dist.broadcast_object_list(failed)
        if failed[0]:
            raise CheckpointFailed(f"checkpoint {final} could not be finished, so it is none: {failed[0]}")

    def write(self, unfinished: Path, state: Mapping[str, Any]) -> None:
        """Has all ranks write their files; they, and `.metadata`, are on disk when it returns on rank 0."""
        state_dict_saver.save(dict(state), storage_writer=FileSystemWriter(unfinished, sync_files=True))

    def finish(self, unfinished: Path, final: Path, content: Mapping[str, Any]) -> None:
        """Makes what was written a checkpoint. Only rank 0 does."""
        with (unfinished / LIST).open("w") as file:
            file.write(json.dumps(content, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        _sync(unfinished)
        if final.exists():  # of an earlier run, which was passed over
            aside = final.with_name(f"{final.name}.damaged-{uuid4().hex}")
            self._say(f"checkpoint {final.name} is replaced; what was found in its place is {aside.name}")
            final.rename(aside)
        unfinished.rename(final)
        _sync(self._folder)

    def newest(self) -> Checkpoint | None:
        """The newest that is complete for every rank, the same on all; None: there is none."""
        for name in self._seen():
            path = self._folder / name
            content, complaint = self._read(path)
            found: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
            dist.all_gather_object(found, (complaint, json.dumps(content, sort_keys=True)))
            complaints = [f"rank {rank}: {said}" for rank, (said, _) in enumerate(found) if said]
            if not complaints and len({read for _, read in found}) > 1:
                complaints = [f"ranks read different lists of files, {LIST}"]
            if not complaints:
                return Checkpoint(path, content["step"], content["world_size"], content["settings"])
            self._say(f"checkpoint {name} is passed over: {complaints[0]}")
        return None

    def _seen(self) -> list[str]:
        """What any rank sees, the newest first; what is not finished is named."""
        try:
            own = [path.name for path in self._folder.iterdir()]
        except FileNotFoundError:
            own = []
        seen: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(seen, own)
        names = sorted({name for part in seen for name in part}, reverse=True)
        for name in names:
            if _LEFT.fullmatch(name):
                self._say(f"checkpoint {name} is passed over: it was never finished, or is being removed")
        return [name for name in names if _NAME.fullmatch(name)]

    def _read(self, path: Path) -> tuple[Any, str]:
        """The list of a checkpoint's files, and what is wrong with it; each rank reads a share of the files."""
        if not path.is_dir():
            return None, "it does not see this folder, which another rank sees"
        try:
            content = parse_json((path / LIST).read_bytes())
            files = sorted(content["files"].items())
            step, _, _ = content["step"], content["world_size"], content["settings"]
            if path.name != f"step-{step:08d}":
                return content, f"{LIST} is that of step {step}"
            if METADATA not in content["files"]:
                return content, f"{LIST} does not name {METADATA}"
            for number, (name, entry) in enumerate(files):
                if (size := (path / name).stat().st_size) != entry["bytes"]:
                    return content, f"{name} has {size} bytes, want {entry['bytes']}"
                is_own = number % dist.get_world_size() == self._rank
                if is_own and _digest(path / name) != entry["sha256"]:
                    return content, f"{name} has other bytes than were written"
        except FileNotFoundError as error:
            return None, f"{Path(error.filename).name} is missing"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return None, f"{LIST} cannot be read: {type(error).__name__}: {error}"
        return content, ""

    def _own_files(self, folder: Path) -> tuple[dict[str, Any], str]:
        """Those that this rank has written (torch names them by rank; the others are rank 0's), or an error."""
        others = tuple(f"__{rank}_" for rank in range(dist.get_world_size()) if rank != self._rank)
        try:
            names = sorted(path.name for path in folder.iterdir())
            own = [name for name in names if name.startswith(f"__{self._rank}_")]
            own += [name for name in names if self._rank == 0 and not name.startswith(("__0_", *others))]
            return {
                name: {"bytes": (folder / name).stat().st_size, "sha256": _digest(folder / name)} for name in own
            }, ""
        except OSError as error:
            return {}, str(error)

    def _prune(self, step: int) -> None:
        """Takes away all but the newest, and what crashes have left. Only rank 0 does."""
        names = [path.name for path in self._folder.iterdir()]
        complete = sorted((name for name in names if _NAME.fullmatch(name) and int(name[5:]) <= step), reverse=True)
        for name in complete[self._keep :]:
            removed = self._folder / f"{name}.removed-{uuid4().hex}"
            (self._folder / name).rename(removed)  # at once: what is half gone bears no checkpoint's name
            shutil.rmtree(removed)
        for name in filter(_LEFT.fullmatch, names):
            shutil.rmtree(self._folder / name)


def _error_of(call: Callable[[], None]) -> str:
    """What the disk says to a call; empty: all is well."""
    try:
        call()
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    """Has the names in a folder on disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
