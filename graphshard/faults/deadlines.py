"""How long a launch or wait may take, and the start of the watchdog for one model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from graphshard import env
from graphshard.agree.agreement import without_peers
from graphshard.agree.consensus import Consensus
from graphshard.agree.rank_store import Store
from graphshard.compat.groups import resolve_process_group, timeout_s
from graphshard.compat.store import default_store, own_connection
from graphshard.faults.dumps import check_folder
from graphshard.faults.inquiry import WAITS, read_compiling
from graphshard.faults.watchdog import Watched, running, waited, watch_model
from graphshard.faults.watched_run import waiting
from graphshard.fsdp2 import Unit
from graphshard.reporting.report import Report

# The process group's own time-out comes this many seconds later, or this share of itself.
_MARGIN_S = 30.0
_MARGIN = 0.1
_SHORT_S = 100.0
_PATIENCE = 0.97
_CONNECTION_TIMEOUT_S = 10.0
# Ranks come to their first program at least so far apart: they have traced it before.
_FIRST_S = 10.0
# Stands for no deadline: stores take no infinite time.
_YEAR_S = 365 * 24 * 3600.0


class HasDeadline(Protocol):
    """What knows how long to wait for the other ranks."""

    deadline_s: float


class WatchedModel(Protocol):
    """What is asked of a model."""

    @property
    def name(self) -> str: ...

    @property
    def report(self) -> Report: ...

    @property
    def consensus(self) -> Consensus: ...

    @property
    def planning(self) -> HasDeadline | None: ...


def check_deadline(deadline_s: object) -> None:
    """Raises:
    TypeError: it is neither None nor a number.
    ValueError: it is not positive.
    """
    if deadline_s is None:
        return
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, (int, float)):
        raise TypeError(f"compile: deadline_s: got {deadline_s!r:.80}, want seconds as a number, or None")
    if not deadline_s > 0:
        raise ValueError(f"compile: deadline_s: got {deadline_s!r}, want more than 0 seconds")


def default_deadline_s(group_timeout_s: float) -> float:
    """Seconds that a launch or wait may take: a little less than the process group's time-out."""
    if group_timeout_s < _SHORT_S:
        return group_timeout_s * (1 - _MARGIN)
    return group_timeout_s - _MARGIN_S


def watch(owner: object, model: WatchedModel, units: Sequence[Unit], deadline_s: float | None) -> None:
    """Watches the programs of a model, if it has peers.

    Args:
        owner: the model is watched as long as it lives.
        model: with programs to watch.
        units: of the model.
        deadline_s: most seconds that a launch or wait may take; None: `default_deadline_s` of its process groups.
    """
    groups = _groups_with_peers(units)
    if not groups:
        return
    timeout = min(timeout_s(group, device) for group, device in groups)
    if deadline_s is not None and deadline_s >= timeout:
        model.report.say_once(
            f"deadline_s: got {deadline_s:g} s, but the process group gives up after {timeout:g} s, before it; want "
            "less, or give init_process_group a longer timeout"
        )
    deadline = default_deadline_s(timeout) if deadline_s is None else min(float(deadline_s), _YEAR_S)
    folder = env.fault_dir()
    if reason := check_folder(folder):
        model.report.say_once(
            f"GRAPHSHARD_FAULTS: ranks that hang or die cannot leave dumps in '{folder}': {reason}; set it to a folder "
            "that can be written"
        )

    def connect() -> Store | None:
        try:
            store: Store = own_connection(_CONNECTION_TIMEOUT_S)
        except (RuntimeError, NotImplementedError) as error:
            model.report.say_once(
                f"watchdog: the store gives no connection of its own ({error}): a rank that hangs is noticed, but the "
                "others are not asked"
            )
            return None
        return store

    model.consensus.deadline_s = deadline
    model.consensus.is_busy, model.consensus.waited = is_compiling, waited
    model.consensus.waiting = partial(waiting, model.name)
    if model.planning is not None:
        model.planning.deadline_s = min(model.planning.deadline_s, max(deadline, _FIRST_S))
    watch_model(model.name, owner, Watched(deadline, max(deadline, timeout * _PATIENCE)), connect)


def is_compiling(rank: int) -> bool:
    """Whether another rank says that it compiles, and does not wait for others in that."""
    said = read_compiling(default_store(), [rank])
    if rank not in said or said[rank].strip().startswith(WAITS.encode()):
        return False
    watchdog = running()
    return watchdog is None or watchdog.alive(said)


def _groups_with_peers(units: Iterable[Unit]) -> list[tuple[dist.ProcessGroup, torch.device]]:
    devices: dict[str, torch.device] = {}
    for unit in units:
        devices |= dict.fromkeys(unit.group_names, unit.device)
    groups = [(resolve_process_group(name), device) for name, device in devices.items()]
    return [
        (group, device)
        for group, device in groups
        if dist.get_world_size(group) > 1 and math.isfinite(timeout_s(group, device)) and not without_peers(group)
    ]
