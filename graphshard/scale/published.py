"""Throughput that others have measured and published, with the configuration of each run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from graphshard.cost import Hardware, find_hardware
from graphshard.scale.models import ModelChoice
from graphshard.scale.resize import RankLayout


@dataclass(frozen=True)
class PublishedRow:
    """One measured run. All gather in bf16 and ran FSDP's own schedule.

    All are costed as compiled: what a run without torch.compile loses by that is in its cluster's factor.

    Attributes:
        cluster: that it ran on, one of `CLUSTERS`.
        model: its microbatch.
        layout: of the ranks.
        tokens_per_s: of one rank, as published.
        accumulation: microbatches of a step.
        sequence_ranks: of context parallelism.
        calibrates: whether the cluster's factor is fitted to this row.
    """

    cluster: str
    model: ModelChoice
    layout: RankLayout
    tokens_per_s: float
    accumulation: int = 1
    sequence_ranks: int = 1
    calibrates: bool = False

    @property
    def name(self) -> str:
        """Model and layout."""
        split = f" x cp {self.sequence_ranks}" if self.sequence_ranks > 1 else ""
        layout = replace(self.layout, shards=self.layout.shards // self.sequence_ranks)
        return f"{self.model.model}, {layout}{split}"


@dataclass(frozen=True)
class Cluster:
    """Where rows were measured.

    Attributes:
        hardware: row of the hardware table.
        ranks_per_node: of the cluster.
        source: of its rows.
    """

    hardware: str
    ranks_per_node: int
    source: str

    def machine(self, efficiency: float = 1.0) -> Hardware:
        """The machine, with every matmul `efficiency` times as fast as the table says."""
        row = find_hardware(self.hardware)
        rates = {dtype: rate * efficiency for dtype, rate in row.matmul_tflops.items()}
        return replace(row, ranks_per_node=self.ranks_per_node, matmul_tflops=rates)


CLUSTERS: Mapping[str, Cluster] = {
    "torchtitan": Cluster(
        "h100-500w",
        8,
        "pytorch/torchtitan: benchmarks/llama3_h100_202412_torchtitan.md (8 and 128 GPUs, compiled) and "
        "benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md (tensor parallelism: bf16, vanilla TP)",
    ),
    "mosaicml": Cluster("h100", 8, "mosaicml/llm-foundry, scripts/train/benchmarking/README.md, H100 80GB BF16"),
    "kempnerforge": Cluster(
        "h200",
        4,
        "KempnerInstitute/KempnerForge, benchmarks/mfu_scaling/mfu_scaling_2026-04-05.md; batch and accumulation as "
        "mfu_bench.sh has them",
    ),
    "nemo": Cluster(
        "h100",
        8,
        "NVIDIA NeMo AutoModel, performance summary 26.04, DGX H100, and its recipe "
        "custom_llama3_1_70b_pretrain_benchmark_8nodes.yaml: activation checkpointing, parameters in bf16",
    ),
}

_TITAN = ModelChoice("llama3-8b", 2, 8192, "selective")
_MPT = ModelChoice("mpt-7b", 6, 2048)
_KEMPNER = ModelChoice("llama3-8b", 4, 4096, "full", "bfloat16")

ROWS: tuple[PublishedRow, ...] = (
    PublishedRow("torchtitan", _TITAN, RankLayout(8), 6667, calibrates=True),
    PublishedRow("torchtitan", _TITAN, RankLayout(128), 6514),
    PublishedRow("torchtitan", ModelChoice("llama3-8b", 12, 8192, "selective", tensor=8), RankLayout(8, 1, 8), 4378),
    PublishedRow("torchtitan", ModelChoice("llama3-70b", 16, 8192, "full", tensor=8), RankLayout(32, 1, 8), 597.3),
    PublishedRow("mosaicml", _MPT, RankLayout(8), 10643, calibrates=True),
    PublishedRow("mosaicml", _MPT, RankLayout(128), 10475),
    PublishedRow("mosaicml", _MPT, RankLayout(256), 10119),
    PublishedRow("mosaicml", _MPT, RankLayout(512), 9670),
    PublishedRow("kempnerforge", replace(_KEMPNER, batch=2), RankLayout(1), 10471, 4),
    PublishedRow("kempnerforge", replace(_KEMPNER, batch=2), RankLayout(2), 18728 / 2, 4),
    PublishedRow("kempnerforge", _KEMPNER, RankLayout(4), 38983 / 4, 2, calibrates=True),
    PublishedRow(
        "nemo", ModelChoice("llama3-70b", 1, 8192, "full", "bfloat16"), RankLayout(64), 866.77, 4, sequence_ranks=2
    ),
)
