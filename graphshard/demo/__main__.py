"""The demo's command line; started by torchrun, see the package."""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphshard
from graphshard.demo.compare import BOUNDS, StepComparison, compare, on_all_ranks
from graphshard.demo.model import Decoder, ModelConfig
from graphshard.demo.restartable import RunOptions, start_process_group, train
from graphshard.demo.text import Batches
from graphshard.demo.train import MICROBATCHES, DemoTrainer, StepResult
from graphshard.testing.launches import COLLECTIVES

BATCH_SIZE = 8
RESUMED_STEPS = 2


def say(line: str = "") -> None:
    """Prints on rank 0, at once."""
    if dist.get_rank() == 0:
        print(line, flush=True)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A temporary folder, the same on every rank of one machine; removed at the end."""
    path = [tempfile.mkdtemp(prefix="graphshard-demo-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(path)
    try:
        yield Path(path[0])
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(path[0], ignore_errors=True)


def say_step(step: int, comparison: StepComparison) -> None:
    """One progress line: every run's mean loss, every run's gradient norm, and whether they are equal."""
    losses = "  ".join(f"{loss:10.7f}" for loss in comparison.losses)
    grad_norms = "  ".join(f"{norm:10.7f}" for norm in comparison.grad_norms)
    say(f"  {step:4d}   {losses}   {grad_norms}   {comparison.verdict}")


def say_header(*runs: str) -> None:
    """The column titles of `say_step`."""
    width = 12 * len(runs) - 2
    names = "  ".join(f"{run:>10}" for run in runs)
    say(f"  {'':4}   {'loss':-^{width}}   {'gradient norm':-^{width}}")
    say(f"  step   {names}   {names}   equal")


def say_summary(eager: list[StepResult], compiled: list[StepResult], rows: list[tuple[object, ...]]) -> None:
    """Both runs side by side; speeds are of the median step after the first."""
    tokens = BATCH_SIZE * ModelConfig().max_seq_len * MICROBATCHES * dist.get_world_size()
    eager_s, compiled_s = (statistics.median(result.wall_s for result in run[1:]) for run in (eager, compiled))
    say(f"  {'summary':<28} {'eager FSDP2':>12} {'graphshard':>12}")
    speeds = ("tokens/s", f"{tokens / eager_s:,.0f}", f"{tokens / compiled_s:,.0f}")
    first_steps = ("first step, seconds", f"{eager[0].wall_s:.1f}", f"{compiled[0].wall_s:.1f}")
    for name, left, right in [*rows, speeds, first_steps]:
        say(f"  {name:<28} {left:>12} {right:>12}")


def say_plan(trainer: DemoTrainer, backend: str, step: int) -> None:
    """What the planner foretells, in a line for each program; with measured times beside, as a page to open."""
    with graphshard.measure(trainer.model):
        trainer.forward_backward(step)
    trainer.optimizer.zero_grad()
    explanation = graphshard.explain(trainer.model)
    say("\n  the plan, as graphshard.explain(model).to_summary() has it:")
    say(textwrap.indent(explanation.to_summary(), "  "))
    if dist.get_rank() == 0:
        path = Path(tempfile.gettempdir()) / f"graphshard-demo-{backend}.html"
        explanation.save(path)
        say(f"  its timeline, and why each collective is not hidden: {path}\n")


def train_side_by_side(backend: str, steps: int, mesh: DeviceMesh, batches: Batches) -> bool:
    """Trains both engines from one seed, then goes on from a checkpoint; returns whether all was equal."""
    bound = BOUNDS[backend]
    demand = f"may differ by {bound:.0e}, relative" if bound else "must be bitwise equal"
    say(f"\nbackend {backend}: every loss and gradient norm {demand}")
    say_header("eager", "graphshard")
    eager, compiled = DemoTrainer(None, mesh, batches), DemoTrainer(backend, mesh, batches)
    eager_results, compiled_results, comparisons = [], [], []
    for step in range(steps):
        if step == 1:
            graphshard.report(compiled.model).reset_counts()
        eager_results.append(eager.step(step))
        compiled_results.append(compiled.step(step))
        comparisons.append(compare((eager_results[-1], compiled_results[-1]), bound))
        say_step(step + 1, comparisons[-1])

    report = graphshard.report(compiled.model)
    launched = {kind: report.collectives.get(kind, 0) / (steps - 1) for kind in COLLECTIVES}
    programs = str(report)
    eager_launched, profiled = eager.count_collectives(steps), compiled.count_collectives(steps)
    first, last = comparisons[0].losses, comparisons[-1].losses
    steps_equal = sum(comparison.equal for comparison in comparisons)
    say()
    say_summary(
        eager_results,
        compiled_results,
        [
            ("steps equal", "", f"{steps_equal}/{steps}"),
            ("loss, first step", *(f"{loss:.4f}" for loss in first)),
            ("loss, last step", *(f"{loss:.4f}" for loss in last)),
            ("all-gathers per step", eager_launched["all_gather"], f"{launched['all_gather']:g}"),
            ("reduce-scatters per step", eager_launched["reduce_scatter"], f"{launched['reduce_scatter']:g}"),
            ("compile seconds", "", f"{sum(p.passes_s + p.planner_s + p.compile_s for p in report.programs):.1f}"),
        ],
    )
    say()
    say(textwrap.indent(programs, "  "))
    say_plan(compiled, backend, steps)
    checks = {
        "every step is equal": steps_equal == steps,
        "the loss falls": last[1] < first[1],
        "the model ran as compiled programs": sum(program.runs for program in report.programs) > 0,
        "the report counts what the profiler sees": launched == profiled,
        "all-gathers: at most eager's": launched["all_gather"] <= eager_launched["all_gather"],
        "reduce-scatters: at most eager's": launched["reduce_scatter"] <= eager_launched["reduce_scatter"],
        "training goes on equally from the checkpoint": resume(compiled, backend, steps, mesh, batches),
    }
    checks = {check: on_all_ranks(passed) for check, passed in checks.items()}
    for check, passed in checks.items():
        say(f"  {'ok  ' if passed else 'FAIL'} {check}")
    return all(checks.values())


def resume(trained: DemoTrainer, backend: str, steps: int, mesh: DeviceMesh, batches: Batches) -> bool:
    """Saves a compiled run, loads it into fresh models of both engines, and trains all three on."""
    eager, compiled = (DemoTrainer(engine, mesh, batches, seed=1) for engine in (None, backend))
    with shared_folder() as folder:
        trained.save(folder)
        eager.load(folder)
        compiled.load(folder)
        size_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    say(
        f"\n  checkpoint of the compiled run ({size_bytes / 1e6:.0f} MB), loaded into two fresh models; all three go on"
    )
    say_header("eager", "graphshard", "no restart")
    comparisons = []
    for step in range(steps, steps + RESUMED_STEPS):
        results = [trainer.step(step) for trainer in (eager, compiled, trained)]
        comparisons.append(compare(results, BOUNDS[backend]))
        say_step(step + 1, comparisons[-1])
    say()
    return all(comparison.equal for comparison in comparisons)


def parse() -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(prog="graphshard.demo", description="eager FSDP2 and graphshard, step by step")
    parser.add_argument(
        "--backend", choices=["aot_eager", "inductor", "both"], help="both; with --checkpoint: inductor"
    )
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps (before the checkpoint, at least 2); 8")
    alone = parser.add_argument_group("one compiled model, that can be killed and started again")
    alone.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="the folder of its checkpoints, seen by all ranks"
    )
    alone.add_argument("--resume", action="store_true", help="go on from the newest complete one, if there is one")
    alone.add_argument("--every", type=int, metavar="N", help="a checkpoint after so many steps; 4")
    alone.add_argument("--keep", type=int, metavar="K", help="so many checkpoints; 2")
    alone.add_argument("--global-batch", type=int, metavar="ROWS", help="of a microbatch, over all ranks; 16")
    alone.add_argument("--dropout", type=float, metavar="P", help="after attention and feed-forward; 0")
    alone.add_argument("--losses", type=Path, metavar="FILE", help="gets a line of JSON for each step")
    args = parser.parse_args()
    defaults = {"every": 4, "keep": 2, "global_batch": 16, "dropout": 0.0, "losses": None}
    if args.checkpoint is None:
        if given := [name for name in (*defaults, "resume") if getattr(args, name) not in (None, False)]:
            parser.error(f"--{given[0].replace('_', '-')}: want it with --checkpoint DIR")
        if args.steps < 2:
            parser.error(f"--steps: got {args.steps}, want at least 2: the first one compiles, the others are timed")
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in ("steps", "every", "keep", "global_batch"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(args, name)}, want at least 1")
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout: got {args.dropout}, want at least 0 and less than 1")
    if args.losses is not None and not args.losses.absolute().parent.is_dir():
        parser.error(f"--losses: got {args.losses}, want a file in a folder that is there")
    if args.checkpoint is not None and args.checkpoint.exists() and not args.checkpoint.is_dir():
        parser.error(f"--checkpoint: got {args.checkpoint}, which is a file, want a folder")
    args.backend = args.backend or ("both" if args.checkpoint is None else "inductor")
    if args.checkpoint is not None and args.backend == "both":
        parser.error("--backend: got both, want one of them with --checkpoint")
    return args


def main() -> int:
    """Runs the demo; returns the exit status, the same on every rank."""
    args = parse()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler that counts collectives logs its start and stop
    torch.set_num_threads(1)
    start_process_group()
    try:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return compare_engines(args, mesh) if args.checkpoint is None else train_alone(args, mesh)
    finally:
        # Sharded models are reference cycles that hold process groups: one left to the interpreter's end aborts it.
        gc.collect()
        dist.destroy_process_group()


def train_alone(args: argparse.Namespace, mesh: DeviceMesh) -> int:
    """One compiled model, with checkpoints."""
    options = RunOptions(
        args.checkpoint,
        args.steps,
        args.every,
        args.keep,
        args.resume,
        args.backend,
        args.global_batch,
        args.losses,
        ModelConfig(dropout=args.dropout),
    )
    return train(options, mesh, say)


def compare_engines(args: argparse.Namespace, mesh: DeviceMesh) -> int:
    """Both engines, side by side."""
    world_size = dist.get_world_size()
    config = ModelConfig()
    batches = Batches(dist.get_rank(), world_size, BATCH_SIZE, config.max_seq_len)
    numel = sum(parameter.numel() for parameter in Decoder(config).parameters())
    say(f"graphshard demo: torch {torch.__version__}, {world_size} ranks on CPU (gloo)")
    say(f"decoder of {numel / 1e6:.1f} M parameters in {config.n_layers + 1} units, AdamW, gradients clipped")
    say(f"{MICROBATCHES} microbatches of {BATCH_SIZE} x {config.max_seq_len} bytes per rank and step")
    say("text: pydoc_data.topics, the Python reference")
    backends = ["aot_eager", "inductor"] if args.backend == "both" else [args.backend]
    equal = [train_side_by_side(backend, args.steps, mesh, batches) for backend in backends]
    say(f"\n{'all equal' if all(equal) else 'NOT EQUAL, see above'}: {', '.join(backends)} against eager FSDP2")
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
