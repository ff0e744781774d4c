"""Seconds of torch's compilers by phase, read off the timers that they keep themselves.

A timer counts the seconds of all that runs inside it, other timers too. What torch nests in what stands here; a phase
is what is left of a timer without those inside. Timers that a torch does not have count 0: what they would have timed
is left in the phase around them.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch._dynamo.utils import compilation_time_metrics

DYNAMO, AOT_AUTOGRAD, PARTITIONER = "Dynamo", "AOTAutograd", "partitioner"
LOWERING, CODE_GENERATION, KERNELS = "Inductor lowering", "code generation", "kernel compiler"
# In the order in which they run.
PHASES = (DYNAMO, AOT_AUTOGRAD, PARTITIONER, LOWERING, CODE_GENERATION, KERNELS)

COMPILED_GRAPH = "compile_fx_inner"
# Of what stands in the place of Inductor's front end where programs are not compiled.
UNCOMPILED_FORWARD = "graphshard.compile_forward"

_FRAME, _BACKEND, _LATE_BACKWARD = "_compile.compile_inner", "OutputGraph.call_user_compiler", "backward._backward_impl"
_FORWARD_COMPILER, _BACKWARD_COMPILER = "compile_fx.<locals>.fw_compiler_base", "compile_fx.<locals>.bw_compiler"
_CACHED_GRAPHS = "AOTAutogradCache.inductor_load"
# They call themselves for graphs inside a graph (checkpoints), which count twice: too much here, too little around it.
_FRONT_PASSES = ("_recursive_pre_grad_passes", "_recursive_joint_graph_passes")
# Torch's own, and those of graphshard by their classes.
_PARTITIONERS = ("min_cut_rematerialization_partition", "Partitioner", "_RecordingPartitioner")
_CODE, _LOAD = "GraphLowering.codegen", "PyCodeCache.load_by_key_path"

# (phase, timers, timers that run inside these and nowhere else).
_NESTS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (DYNAMO, (_FRAME,), (_BACKEND,)),
    (
        AOT_AUTOGRAD,
        (_BACKEND,),
        (*_FRONT_PASSES, *_PARTITIONERS, _FORWARD_COMPILER, UNCOMPILED_FORWARD, _CACHED_GRAPHS),
    ),
    (AOT_AUTOGRAD, (_LATE_BACKWARD,), (_BACKWARD_COMPILER,)),
    (PARTITIONER, _PARTITIONERS, ()),
    (LOWERING, _FRONT_PASSES, ()),
    # Graphs of a program are compiled inside or outside of the timers above, with equal timers inside.
    (LOWERING, (COMPILED_GRAPH, _CACHED_GRAPHS), (_CODE, _LOAD)),
    (CODE_GENERATION, (_CODE,), ()),
    # Loading the code of a graph compiles its kernels, or waits for those that do.
    (KERNELS, (_LOAD,), ()),
)
_KNOWN = {name for _, outer, inner in _NESTS for name in (*outer, *inner)}
# Beginnings of the names of timers inside these, or of what only runs.
_INSIDE = (
    "AOTAutogradCache.", "CacheBase.", "CachingAutotuner.", "FxGraphCache.", "GraphLowering.",
    "PythonWrapperCodegen.", "Scheduler.", "StaticAutotunerFuture.", "TritonBundler.",
    "_recursive_post_grad_passes", "additional_fake_tensor_prop", "aot_collect_metadata",
    "aot_trace_joint_graph", "async_compile.", "benchmark_", "build_guards", "bytecode_", "compile_attempt_",
    "compile_file", "create_aot_dispatcher_function", "create_proxy", "fx.bucketing.", "fx_codegen_and_compile",
    "gc", "generate_kernel_code_from_nodes", "get_fake_value", "guard_collective",
    "inductor_codecache_torch_key", "inductor_import", "insert_deferred_runtime_asserts", "pass.", "pgo.",
    "reload_kernel_in_parent", "variable_builder_call", "wrap_to_fake_tensor_and_record",
)  # fmt: skip
# Of torch's clock, which differs between timers.
_CLOCK_S = 1e-3


def timed_seconds() -> dict[str, float]:
    """Seconds of each of torch's timers, in this process so far."""
    return {name: sum(seconds) for name, seconds in compilation_time_metrics.items()}


def timed_graphs() -> int:
    """How many graphs were given to Inductor in this process so far, those that its cache had included."""
    return len(compilation_time_metrics.get(COMPILED_GRAPH, ()))


def exclusive_seconds(timed_s: Mapping[str, float], least_s: float) -> dict[str, float]:
    """Seconds of each of `PHASES`, which have none in common.

    Args:
        timed_s: by timer, as `timed_seconds` counts them, of one stretch of time.
        least_s: a timer that is not known matters from so many seconds on.

    Raises:
        RuntimeError: naming a timer that is not known, or those that are not nested as they should be.
    """
    for name, seconds in timed_s.items():
        if name not in _KNOWN and not name.startswith(_INSIDE) and seconds >= least_s:
            raise RuntimeError(
                f"compile phases: torch timed {seconds:.3f} s of {name!r}, which is not known; say where it runs in "
                "graphshard/compat/compile_phases.py"
            )
    phases = dict.fromkeys(PHASES, 0.0)
    for phase, outer, inner in _NESTS:
        outer_s, inner_s = (sum(timed_s.get(name, 0.0) for name in names) for names in (outer, inner))
        if outer_s - inner_s < -_CLOCK_S:
            inside = ", ".join(f"{name} {timed_s[name]:.3f} s" for name in inner if name in timed_s)
            raise RuntimeError(
                f"compile phases: {phase}: got {outer_s:.3f} s of {' and '.join(outer)}, want at least the "
                f"{inner_s:.3f} s of what runs inside: {inside}"
            )
        phases[phase] += outer_s - inner_s
    return phases
