"""Ranks post what their programs depend on besides the graphs, for the others to compare before the first program.

Ranks with other plans would launch other collectives: wrong results, or a hang.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graphshard.agree.agreement import Posted, post_to_group
from graphshard.fsdp2 import ShardedParam, Unit

# As long as a rank may take to come to `graphshard.compile`: the time-out of NCCL's collectives.
DEADLINE_S = 600.0


def post_settings(model: str, units: Iterable[Unit], settings: Sequence[str]) -> list[Posted]:
    """Posts `settings`, and the parameters of `units`, for the ranks of each of their process groups.

    Args:
        model: its name.
        units: of the model.
        settings: lines.
    """
    groups: dict[str, list[Unit]] = {}
    for unit in units:
        for group in filter(None, (unit.group_name, unit.replicate_group_name)):
            groups.setdefault(group, []).append(unit)
    advice = "want the same arguments of graphshard.compile, plan files, machines and models on every rank"
    posts = (
        post_to_group(
            group, model, [*settings, *map(_line, own)], subject="what their programs depend on", advice=advice
        )
        for group, own in sorted(groups.items())
    )
    return [posted for posted in posts if posted is not None]


def _line(unit: Unit) -> str:
    freed = "freed" if unit.reshard_after_forward else "kept"
    shards = unit.post_forward
    within = "" if shards is None else f" over {shards[0]} ranks"
    return f"unit {unit.name or 'root'}, {freed} after forward{within}: {', '.join(map(_described, unit.params))}"


def _described(param: ShardedParam) -> str:
    names = "/".join(name for _, name in param.owners)
    own = param.parameter.dtype
    others = (("gathered", param.param_dtype), ("reduced", param.reduce_dtype))
    said = "".join(f" {what} as {dtype}" for what, dtype in others if dtype != own)
    return f"{names} {tuple(param.parameter.shape)} {own}{said}"
