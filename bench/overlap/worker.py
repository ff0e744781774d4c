"""One system of `bench.overlap` in a process of its own, on one pretended network after the other.

    python -m bench.overlap.worker SYSTEM --networks 8:32:361 --layers 8 --json FILE

Writes a list of `OverlapRun`s as JSON, after each network what there is so far.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from bench.networks.loopback import Loopback
from bench.overlap.exposed import Occupied, traced
from bench.overlap.rows import OverlapPrediction, OverlapRun, PretendedNetwork
from bench.overlap.systems import LLAMA_8B, SYSTEMS, TINY, OverlapSystem, make_decoder, prepare
from graphshard.cost import HARDWARE, Hardware, Protocol
from graphshard.cost.hardware_file import hardware_text
from graphshard.scale.decoder import DecoderSize

SETTLING_STEPS = 3


def pretended_hardware(network: PretendedNetwork, device: str) -> Hardware:
    """The machine, with the links of a pretended network: one protocol, whose latency does not depend on the ranks."""
    machine = HARDWARE["h200" if device == "cuda" else "cpu-gloo"]
    said = "pretended by bench.networks.loopback"
    names = ("ranks_per_node", "link_gb_s", "nic_gb_s", "network_gb_s", "protocols", "algorithms", "kind_share")
    return replace(
        machine,
        name=f"{machine.name}, {network.name}",
        ranks_per_node=network.ranks,
        link_gb_s=network.gb_s,
        nic_gb_s=network.gb_s,
        network_gb_s=network.gb_s,
        protocols=(Protocol("pretended", network.alpha_us, 0.0, 0.0),),
        algorithms=("ring",),
        kind_share={},
        sources={**machine.sources, **dict.fromkeys(names, said)},
    )


class OverlapTrainer:
    """Trains a decoder with one system; times what is asked for.

    Args:
        system: that it is prepared by.
        size: of the decoder.
        tokens: of a sequence; a rank has one sequence.
        device: ``"cuda"`` or ``"cpu"``.
        network: that its collectives run on, and its hardware for the planner.
        backend: of everything that compiles.
    """

    def __init__(
        self,
        system: OverlapSystem,
        size: DecoderSize,
        tokens: int,
        device: str,
        network: Loopback,
        hardware: str,
        backend: str,
    ) -> None:
        self._device, self._network = device, network
        self._model = make_decoder(size, device)
        mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
        self._is_graphshard = system.startswith("graphshard")
        self._forward = prepare(system, self._model, mesh, hardware, backend)
        # Fused: of AdamW's ways the one with the least work for the host, the same for every system.
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        draws = torch.Generator().manual_seed(1)
        drawn = torch.randint(size.vocab, (2, 1, tokens), generator=draws).to(device)
        self._tokens, self._targets = drawn
        self.losses: list[float] = []

    def run(self, steps: int) -> OverlapRun:
        """Some steps, and one under a profiler."""
        start_s = time.perf_counter()
        self._step()
        first_step_s = time.perf_counter() - start_s
        for _ in range(SETTLING_STEPS):
            self._step()
        gc.collect()
        gc.disable()
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = [self._step() for _ in range(steps)]
        peak_bytes = torch.cuda.max_memory_allocated() if self._device == "cuda" else None
        self._network.launches.clear()
        occupied = self._occupied()
        launches = len(self._network.launches)
        gc.enable()
        return OverlapRun(
            step_us=statistics.median(step_us for step_us, _ in times),
            passes_us=statistics.median(passes_us for _, passes_us in times),
            exposed_us=None if occupied is None else occupied.exposed_us,
            communicating_us=None if occupied is None else occupied.communicating_us,
            peak_bytes=peak_bytes,
            first_step_s=first_step_s,
            losses=tuple(self.losses[: SETTLING_STEPS + 1]),
            launches=launches,
            prediction=self._prediction(),
        )

    def _step(self) -> tuple[float, float]:
        """Microseconds of a step, and of its forward and backward."""
        mark, between = _clock(self._device)
        mark()
        loss: Tensor = self._forward(self._tokens, self._targets)
        loss.backward()  # type: ignore[no-untyped-call]
        mark()
        self._optimizer.step()
        self._optimizer.zero_grad()
        mark()
        passes_us, update_us = between()
        self.losses.append(loss.item())
        return passes_us + update_us, passes_us

    def _occupied(self) -> Occupied | None:
        if self._device == "cuda":
            from bench.networks.hold_stream import hold_until, mark_time  # needs Triton

            kernels = (hold_until.__name__, mark_time.__name__)
            return traced(self._step, lambda name: any(kernel in name for kernel in kernels))
        self._network.waited_us.clear()
        step_us, _ = self._step()
        exposed_us = sum(self._network.waited_us)
        sent_us = sum(launch.us for launch in self._network.launches)
        return Occupied(step_us - exposed_us, sent_us, exposed_us)

    def _prediction(self) -> OverlapPrediction | None:
        """What the simulator says of the programs of a step."""
        if not self._is_graphshard:
            return None
        report: Any = graphshard.report(self._model)
        report.reset_counts()
        self._step()
        ran = [program for program in report.programs if program.runs]
        if report.fallbacks or not ran or any(program.decision is None for program in ran):
            raise RuntimeError(f"bench: want every program of a step compiled and planned, got\n{report}")
        choices = [(program.runs, program.decision) for program in ran]
        return OverlapPrediction(
            step_us=sum(runs * decision.choice.simulation.step_us for runs, decision in choices),
            exposed_us=sum(runs * decision.choice.simulation.exposed_us for runs, decision in choices),
            lower_bound_us=sum(runs * decision.choice.lower_bound_us for runs, decision in choices),
            compute_us=sum(runs * decision.problem.compute_us for runs, decision in choices),
        )


def _clock(device: str) -> tuple[Callable[[], None], Callable[[], list[float]]]:
    """Marks moments, and says afterwards the microseconds between each two."""
    if device == "cpu":
        seconds: list[float] = []
        return lambda: seconds.append(time.perf_counter()), lambda: _differences([s * 1e6 for s in seconds])
    events: list[torch.cuda.Event] = []

    def mark() -> None:
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()

    def between() -> list[float]:
        torch.cuda.synchronize()
        return [first.elapsed_time(second) * 1e3 for first, second in pairwise(events)]

    return mark, between


def _differences(values: Sequence[float]) -> list[float]:
    return [second - first for first, second in pairwise(values)]


def run_on(
    system: OverlapSystem, network: PretendedNetwork, layers: int, tokens: int, steps: int, device: str, backend: str
) -> OverlapRun:
    """One system on one network, in this process."""
    size = replace(LLAMA_8B if device == "cuda" else TINY, layers=layers)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pretended.json")
        path.write_text(hardware_text(pretended_hardware(network, device)))
        with Loopback(network.ranks, network.alpha_us, network.gb_s) as loopback:
            trainer = OverlapTrainer(system, size, tokens, device, loopback, str(path), backend)
            try:
                return trainer.run(steps)
            finally:
                del trainer
                gc.collect()
                torch.compiler.reset()
                if device == "cuda":
                    torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("bench.overlap.worker", description=__doc__)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--networks", nargs="+", type=PretendedNetwork.parse, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args(argv)
    torch.set_float32_matmul_precision("high")
    runs = []
    for network in args.networks:
        runs.append(run_on(args.system, network, args.layers, args.tokens, args.steps, args.device, args.backend))
        args.json.write_text(json.dumps([asdict(run) for run in runs]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
