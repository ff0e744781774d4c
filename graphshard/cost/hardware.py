"""The machines that the cost model knows. Every number has its source beside it, in `Hardware.sources`.

Rates are achieved, not peak. A calibration file (`python -m graphshard.calibrate`) takes the place of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from graphshard.cost.hardware_file import read_hardware
from graphshard.cost.rates import Hardware, Protocol

__all__ = ["HARDWARE", "Hardware", "Protocol", "find_hardware"]

_GIB = 2**30
_ML_ENGINEERING = "stas00/ml-engineering, compute/accelerator: best matmul found by search (MAMF)"
_NCCL_TUNING = "NCCL 2.30 src/graph/tuning.cc, ring: base, NVLink and network latencies"
_NCCL_ALGORITHMS = "NCCL 2.23 and later: ring, tree (all-reduce), PAT (one rank per node)"


def _nccl_protocols(low_latency_link_share: float, low_latency_network_share: float) -> tuple[Protocol, ...]:
    """NCCL's three protocols. Shares are those of LL, whose bandwidth tuning.cc caps by generation.

    LL128 is left out across nodes: the tables for it hold for NVLink.
    """
    return (
        Protocol("LL", 6.6, 0.6, 2.7, low_latency_link_share, low_latency_network_share),
        Protocol("LL128", 14.0, 1.9, 4.0, 0.9375, 0.0),
        Protocol("Simple", 8.4, 3.4, 14.0),
    )


H100 = Hardware(
    name="h100",
    matmul_tflops={"bfloat16": 794.5, "float16": 794.5, "float32": 53.7, "float64": 53.7, "float8_e4m3fn": 1402.6},
    attention_share=0.44,
    memory_gb_s=2900.0,
    memory_bytes=79 * _GIB,
    kernel_us=3.8,
    ranks_per_node=8,
    link_gb_s=370.0,
    nic_gb_s=50.0,
    network_gb_s=340.0,
    protocols=_nccl_protocols(0.38, 0.06),
    algorithms=("ring", "tree", "pat"),
    contention=0.22,
    kind_share={"all_gather": 0.98, "reduce_scatter": 0.98},
    sources={
        "matmul_tflops": f"{_ML_ENGINEERING}: bf16 794.5, fp8 1402.6; fp16 as bf16; fp32 and fp64: peak of the "
        "datasheet, 66.9, x 0.803, the share that bf16 achieves (derived)",
        "attention_share": "FlashAttention-3 paper (arXiv 2407.08608): FlashAttention-2 reaches 35 % of 989 TFLOP/s; "
        "over 794.5 (derived)",
        "memory_gb_s": "between 2.8 and 3.0 TB/s of copies; 0.87 of the datasheet's 3.35 TB/s (derived)",
        "memory_bytes": "80 GB card: total memory that CUDA reports, rounded down to GiB",
        "kernel_us": "NVIDIA developer blog, Getting Started with CUDA Graphs: 3.8 us per short kernel in a stream "
        "(V100; not measured on this GPU)",
        "ranks_per_node": "HGX H100: 8 GPUs behind one NVSwitch",
        "link_gb_s": "NCCL 2.30 src/graph/topo.h: 18 links x 20.6; NVIDIA/nccl-tests#212 measures 370",
        "nic_gb_s": "one 400 Gb/s NIC per GPU",
        "network_gb_s": "NVIDIA/nccl#1218: all-reduce 340 on 32 x 8 H100 InfiniBand (all-gather 200 there, with 16 "
        "channels forced)",
        "protocols": f"{_NCCL_TUNING}; LL 141 of 370 GB/s in a node, 20.4 of 340 across",
        "algorithms": _NCCL_ALGORITHMS,
        "contention": "24 of 132 SMs taken by NCCL's channels (16 to 32): 1 / (1 - 24/132) - 1 (derived, not measured)",
        "kind_share": "ml-engineering, network: ring on 8 x H200: 361.4 and 362.9 of 367.2 GB/s",
    },
)

H100_500W = replace(
    H100,
    name="h100-500w",
    matmul_tflops={"bfloat16": 628.0, "float16": 628.0, "float32": 53.7, "float64": 53.7, "float8_e4m3fn": 1108.0},
    attention_share=0.55,
    memory_gb_s=2150.0,
    memory_bytes=95 * _GIB,
    sources={
        **H100.sources,
        "matmul_tflops": "H100's rates x (500 W / 700 W)^0.7: large matmuls are bound by power (derived, not "
        "measured); fp32 and fp64 as H100",
        "attention_share": "as fast as on H100, which does not reach its power limit in it (derived)",
        "memory_gb_s": "torchtitan benchmarks: 2.4 TB/s (HBM2e) x 0.896, the share that an H200 achieves (derived)",
        "memory_bytes": "torchtitan benchmarks: 96 GB; CUDA reports 95.04 GiB",
    },
)

H200 = replace(
    H100,
    name="h200",
    matmul_tflops={"bfloat16": 788.0, "float16": 788.0, "float32": 53.7, "float64": 53.7, "float8_e4m3fn": 1453.4},
    memory_gb_s=4300.0,
    memory_bytes=139 * _GIB,
    network_gb_s=365.0,
    sources={
        **H100.sources,
        "matmul_tflops": f"bf16 788: measured on one H200, 8192^3, random numbers; {_ML_ENGINEERING}: fp8 1453.4; fp16 "
        "as bf16; fp32 and fp64 as H100",
        "memory_gb_s": "copy of large tensors measured on one H200; the datasheet says 4.8 TB/s",
        "memory_bytes": "141 GB card: total memory that CUDA reports, rounded down to GiB",
        "link_gb_s": "as H100; ml-engineering, network, measures 361 to 367 on 8 x H200",
        "network_gb_s": "ml-engineering, network: ring all-reduce of 4 GiB on 4 x 8 H200, EFA",
    },
)

B200 = replace(
    H100,
    name="b200",
    matmul_tflops={"bfloat16": 1745.0, "float16": 1745.0, "float32": 58.0, "float64": 28.7, "float8_e4m3fn": 3432.5},
    memory_gb_s=6000.0,
    memory_bytes=178 * _GIB,
    link_gb_s=720.0,
    network_gb_s=380.0,
    protocols=_nccl_protocols(0.39, 0.053),
    contention=0.19,
    kind_share={},
    sources={
        **H100.sources,
        "matmul_tflops": f"{_ML_ENGINEERING}: bf16 1745, fp8 3432.5; fp16 as bf16; fp32 75 and fp64 37 of the "
        "datasheet x 0.775, the share that bf16 achieves (derived)",
        "attention_share": "as H100 (not measured)",
        "memory_gb_s": "newmind.ai journal 18: device-to-device copies above 6,000 GB/s; the datasheet says 8 TB/s",
        "memory_bytes": "newmind.ai journal 18: 178.36 GiB",
        "link_gb_s": "NCCL 2.30 src/graph/topo.h: 18 links x 40.1; ml-engineering, network, measures all-reduce 740 at "
        "4 GiB",
        "nic_gb_s": "one 400 Gb/s NIC per GPU (ml-engineering, network: 4 x 8 B200, EFA)",
        "network_gb_s": "ml-engineering, network: all-reduce 377 to 382 GB/s on 4 x 8 B200, EFA",
        "protocols": f"{_NCCL_TUNING}; LL 282 of 720 GB/s in a node, 20.4 of 380 across",
        "contention": "24 of 148 SMs taken by NCCL's channels: 1 / (1 - 24/148) - 1 (derived, not measured)",
        "kind_share": "no kind measured apart",
    },
)

A100 = replace(
    H100,
    name="a100",
    matmul_tflops={"bfloat16": 265.0, "float16": 265.0, "float32": 16.6, "float64": 16.6},
    attention_share=0.74,
    memory_gb_s=1830.0,
    link_gb_s=235.0,
    nic_gb_s=25.0,
    network_gb_s=190.0,
    protocols=_nccl_protocols(0.37, 0.1),
    contention=0.17,
    kind_share={},
    sources={
        **H100.sources,
        "matmul_tflops": "FlashAttention-2 paper (arXiv 2307.08691): matmuls reach 80 to 90 % of peak: 0.85 x 312, and "
        "for fp32 and fp64 0.85 x 19.5 (derived)",
        "attention_share": "FlashAttention-2 paper (arXiv 2307.08691): 50 to 73 % of 312 TFLOP/s, forward and "
        "backward; 63 % of 312 over 265 (derived)",
        "memory_gb_s": "datasheet 2,039 GB/s x 0.896, the share that an H200 achieves (derived)",
        "link_gb_s": "NCCL src/graph/tuning.cc caps the bus bandwidth of compute capability 8.0 at 235",
        "nic_gb_s": "one 200 Gb/s NIC per GPU (DGX A100)",
        "network_gb_s": "8 NICs x 25 GB/s x 0.95 (derived, not measured)",
        "protocols": f"{_NCCL_TUNING}; LL 87.7 of 235 GB/s in a node, 20.4 of 190 across",
        "contention": "16 of 108 SMs taken by NCCL's channels: 1 / (1 - 16/108) - 1 (derived, not measured)",
        "kind_share": "no kind measured apart",
    },
)

_CPU_MEASURED = (
    "graphshard.calibrate, 2 gloo ranks on a virtual machine of 2 AMD EPYC cores that others used too, one thread per "
    "rank, torch 2.13"
)
CPU_GLOO = Hardware(
    name="cpu-gloo",
    matmul_tflops={"float32": 0.063, "float64": 0.026, "bfloat16": 0.0008, "float16": 0.0006},
    attention_share=0.89,
    memory_gb_s=14.9,
    memory_bytes=8 * _GIB,
    kernel_us=3.1,
    ranks_per_node=8,
    link_gb_s=0.66,
    nic_gb_s=0.66,
    network_gb_s=0.66,
    protocols=(Protocol("gloo", 708.0, 212.0, 425.0),),
    algorithms=("ring",),
    contention=1.0,
    kind_share={"all_gather": 0.58, "reduce_scatter": 0.61, "all_reduce": 1.0},
    sources={
        "matmul_tflops": f"{_CPU_MEASURED}: 1024^3",
        "attention_share": f"{_CPU_MEASURED}: float32, 8 heads of 64, 1024 tokens, not causal",
        "memory_gb_s": f"{_CPU_MEASURED}: copy of 128 MiB",
        "memory_bytes": "a third of the 23 GiB of that machine, for a rank (chosen)",
        "kernel_us": f"{_CPU_MEASURED}: in-place add of one element",
        "ranks_per_node": "chosen: what tests run on one machine",
        "link_gb_s": f"{_CPU_MEASURED}: all-reduce of 4 KiB to 16 MiB, least squares",
        "nic_gb_s": "as inside the machine (not measured)",
        "network_gb_s": "as inside the machine (not measured)",
        "protocols": f"{_CPU_MEASURED}: 920 us for 2 ranks, mean of three kinds; split into base and steps by choice",
        "algorithms": "gloo: ring",
        "contention": f"{_CPU_MEASURED}: matmul loop beside an all-gather of 16 MiB, which uses the rank's core",
        "kind_share": f"{_CPU_MEASURED}: all-gather 0.39, reduce-scatter 0.40, all-reduce 0.66 GB/s",
    },
)

HARDWARE: Mapping[str, Hardware] = {row.name: row for row in (A100, H100, H100_500W, H200, B200, CPU_GLOO)}


def find_hardware(name_or_path: str) -> Hardware:
    """A row of the table by its name, or the content of a calibration file.

    Raises:
        ValueError: if there is no such row and no such file, or the file is not sound.
    """
    if name_or_path in HARDWARE:
        return HARDWARE[name_or_path]
    path = Path(name_or_path)
    if path.suffix == ".json" or path.is_file():
        return read_hardware(path)
    raise ValueError(
        f"hardware: got {name_or_path!r}, want one of {', '.join(sorted(HARDWARE))}, or the path of a .json file that "
        "`python -m graphshard.calibrate` wrote"
    )
