"""Small programs that tests plan and explain."""

from __future__ import annotations

import random

from graphshard.explain import Explanation, PlannedProgram
from graphshard.planner import (
    Bucket,
    GatherTask,
    OwnCollective,
    Problem,
    ReductionTask,
    Schedule,
    ScheduledStep,
    Transfer,
    check_schedule,
    fsdp2_schedule,
    lower_bound_us,
    simulate,
)

MIB = 2**20
# 10 us, then 1 MiB in 100 us.
LINK = Transfer(0, ((10.0, 100.0 / MIB),))
REPLICAS = Transfer(1, ((5.0, 50.0 / MIB),))


def gather(fqn: str, first_use: int, mib: int = 1, *, ready: int = 0) -> GatherTask:
    return GatherTask(
        fqn, fqn.rpartition(".")[0], 0, LINK, mib * MIB, mib * MIB, first_use, first_use, ready,
        copy_in_us=1.0, copy_out_us=4.0, shard_bytes=mib * MIB // 2,
    )  # fmt: skip


def reduction(fqn: str, ready: int, mib: int = 1, then: Transfer | None = None) -> ReductionTask:
    size = mib * MIB
    return ReductionTask(
        fqn, fqn.rpartition(".")[0], 1, LINK, 2 * size, size, size, ready, then, copy_in_us=3.0, alone_in_us=3.0
    )


def problem(
    op_us: tuple[float, ...],
    gathers: tuple[GatherTask, ...] = (),
    reductions: tuple[ReductionTask, ...] = (),
    own: tuple[OwnCollective, ...] = (),
    **options: float,
) -> Problem:
    ops = tuple(f"op{i}" for i in range(len(op_us)))
    op_bytes = tuple((8 + i) * MIB for i in range(len(ops)))
    return Problem("backward", ops, op_us, op_bytes, gathers, reductions, own, ("shard", "replicate"), **options)


def planned(
    of: Problem, schedule: Schedule | None = None, title: str = "region 0 backward", plan: str = "fsdp2", **rest: object
) -> PlannedProgram:
    schedule = schedule or fsdp2_schedule(of)
    check_schedule(of, schedule)
    names = tuple(f"{bucket.kind}:{i}" for i, bucket in enumerate(schedule.buckets))
    given = {"bucket_names": names, **rest}
    return PlannedProgram(title, of, schedule, simulate(of, schedule), lower_bound_us(of), plan, **given)  # type: ignore[arg-type]


def one_bucket(of: Problem, launch: int, wait: int, **rest: object) -> PlannedProgram:
    """Everything gathered, or everything reduced, in one bucket."""
    kind, members = ("gather", of.gathers) if of.gathers else ("reduce", of.reductions)
    bucket = Bucket(kind, tuple(range(len(members))))  # type: ignore[arg-type]
    steps = [ScheduledStep(launch, "launch", 0), ScheduledStep(wait, "wait", 0)]
    if of.reductions and of.reductions[0].then is not None:
        steps.append(ScheduledStep(wait, "finish", 0))
    return planned(of, Schedule((bucket,), tuple(steps)), **rest)  # type: ignore[arg-type]


def small_program(**rest: object) -> PlannedProgram:
    """Two layers: gathers, reductions that an all-reduce follows, a collective of the model's own."""
    gathers = (gather("layers.1.wq", 0), gather("layers.1.wo", 0), gather("layers.0.wq", 2), gather("layers.0.wo", 2))
    reductions = tuple(
        reduction(fqn, ready, then=REPLICAS)
        for fqn, ready in (("layers.1.wq", 2), ("layers.1.wo", 2), ("layers.0.wq", 4), ("layers.0.wo", 4))
    )
    own = (OwnCollective("all_reduce_tp", 1, 400.0, 2, 3),)
    of = problem((100.0, 10.0, 300.0, 200.0), gathers, reductions, own, contention=0.1, launch_us=2.0)
    return planned(of, **rest)  # type: ignore[arg-type]


def deep_program(layers: int, **rest: object) -> PlannedProgram:
    gathers = tuple(gather(f"layers.{i}.w", 2 * i) for i in range(layers))
    reductions = tuple(reduction(f"layers.{i}.w", 2 * i + 1) for i in range(layers))
    return planned(problem((80.0, 40.0) * layers, gathers, reductions), **rest)  # type: ignore[arg-type]


def explanation(*programs: PlannedProgram, notes: tuple[str, ...] = ()) -> Explanation:
    return Explanation(programs or (small_program(),), "2 x test", notes)


def random_problem(seed: int) -> Problem:
    rng = random.Random(seed)
    ops = rng.randint(1, 12)
    units = rng.randint(1, 4)

    def uses() -> list[int]:
        return sorted(rng.randrange(ops) for _ in range(rng.randint(0, 8)))

    gathers = tuple(
        GatherTask(
            f"u{i % units}.g{i}", f"u{i % units}", rng.randint(0, 1), LINK, rng.randint(1, 9) * MIB,
            rng.randint(1, 9) * MIB, at, rng.randint(at, ops), 0, 1.0, 2.0,
            alone_in_us=float(rng.randint(0, 1)), alone_out_bytes=rng.choice([0, MIB]), shard_bytes=rng.randint(0, MIB),
        )
        for i, at in enumerate(uses())
    )  # fmt: skip
    reductions = tuple(
        ReductionTask(
            f"u{i % units}.r{i}", f"u{i % units}", i % units, LINK, rng.randint(1, 9) * MIB, rng.randint(1, 9) * MIB,
            rng.randint(0, MIB), at + 1, REPLICAS if i % units else None, 1.0, 0.0,
            alone_in_us=float(rng.randint(0, 1)),
        )
        for i, at in enumerate(uses())
    )  # fmt: skip
    own = tuple(
        OwnCollective(f"own{i}", rng.randint(0, 1), rng.uniform(0.0, 90.0), at, min(ops, at + rng.randint(0, 2)))
        for i, at in enumerate(sorted(rng.randrange(ops) for _ in range(rng.randint(0, 3))))
    )
    op_us = tuple(rng.choice([0.0, rng.uniform(1.0, 300.0)]) for _ in range(ops))
    return problem(op_us, gathers, reductions, own, contention=rng.choice([0.0, 0.2]), launch_us=rng.choice([0.0, 3.0]))
