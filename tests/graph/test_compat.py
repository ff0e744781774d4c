"""What graphshard takes from the inside of torch: a new version that changes one of these fails here first."""

from __future__ import annotations

import pickle
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphshard.compat.autograd import backward_id, call_at_end_of_backward, compiled_function_node, keeps_graph
from graphshard.compat.compile_phases import PARTITIONER, PHASES, exclusive_seconds, timed_graphs, timed_seconds
from graphshard.compat.dynamo import inline_only, tell_of_compiles
from graphshard.compat.dynamo_frames import frames_seen_by, guards_of
from graphshard.compat.inductor import (
    INDUCTOR_PATCHES,
    compile_body,
    compile_graph_inductor,
    compile_region_inductor,
    copy_graph,
    generated_code,
    keep_what_forward_saves,
    source_digest,
    with_whole_libraries,
)
from graphshard.compat.results import keep_strides
from graphshard.compat.running_trace import traced_code
from graphshard.compat.tensors import keep_static, seen_by
from graphshard.compat.value_sizes import with_sizes_of_values
from graphshard.compat.versions import check_torch_version
from graphshard.graph.saved_values import hide_copies
from graphshard.runtime.backend import Partitioner


def test_frames_are_seen_with_their_guards_and_run_as_dynamo_made_them() -> None:
    seen: list[tuple[Any, Any, str]] = []

    def doubled(x: Tensor) -> Tensor:
        return x * 2

    compiled = torch.compile(doubled, backend="eager", dynamic=False)
    with frames_seen_by(lambda *frame: seen.append(frame)):
        compiled(torch.ones(2))
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    compiled(torch.ones(4))
    assert [code for code, _, _ in seen] == [doubled.__code__] * 2
    assert [number.partition("/")[2] for _, _, number in seen] == ["0", "1"]
    guards = [guards_of(code, made) for code, made, _ in seen]
    assert "size=[2]" in guards[0] and "size=[3]" in guards[1]
    assert guards_of(doubled.__code__, doubled.__code__) == ""


@pytest.mark.parametrize(("version", "supported"), [("2.10.2", 0), ("2.11.0", 1), ("2.15.1+cpu", 1), ("2.16.0a0", 0)])
def test_torch_versions_supported(version: str, supported: int) -> None:
    with mock.patch("torch.__version__", version):
        if supported:
            check_torch_version()
        else:
            with pytest.raises(RuntimeError, match=f"got torch {version.split('+')[0]}"):
                check_torch_version()


def test_inductor_patches_name_settings_that_exist() -> None:
    import torch._inductor.config as config

    with config.patch(INDUCTOR_PATCHES):
        assert not config.reorder_for_peak_memory and not config.reorder_for_locality


def test_partitioner_is_pickled_without_its_model() -> None:
    context = mock.Mock()
    partitioner = Partitioner(context)
    copy = pickle.loads(pickle.dumps(partitioner))
    assert copy.uuid() == partitioner.uuid() and copy.uuid() is not None
    assert partitioner._context() is context and copy._context() is None


def test_source_digest_follows_torch_version() -> None:
    before = source_digest()
    assert before == source_digest()
    with mock.patch("torch.__version__", "2.12.0"):
        assert source_digest() != before


def test_what_sees_each_operator_is_noticed() -> None:
    seen: list[str | None] = [seen_by()]
    with CommDebugMode():
        seen.append(seen_by())

    def look(x: Tensor) -> Tensor:
        seen.append(seen_by())
        return x

    torch.vmap(look)(torch.ones(1))
    seen.append(seen_by())
    assert seen == [None, "a TorchDispatchMode", "a transform of torch.func", None]


def test_backward_is_known_while_it_runs() -> None:
    seen: list[Any] = []

    def look(grad: Tensor) -> None:
        seen.append((backward_id() >= 0, keeps_graph()))
        call_at_end_of_backward(lambda: seen.append("end"))

    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(look)
    assert backward_id() == -1
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert seen == [(True, True), "end", (True, False), "end"]


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_copied_graph_is_its_own_and_reads_the_same_attributes() -> None:
    gm = symbolic_trace(Weighted())
    for node in gm.graph.nodes:
        node.meta["val"] = node.name
    graph = copy_graph(gm)
    assert [n.meta for n in graph.nodes] == [n.meta for n in gm.graph.nodes]
    assert GraphModule(gm, graph).weight is gm.weight
    next(iter(graph.nodes)).meta["val"] = "changed"
    assert next(iter(gm.graph.nodes)).meta["val"] == "x"


def test_node_of_a_compiled_region_is_found_behind_heads_of_attention() -> None:
    def heads(x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = torch.nn.functional.linear(x, torch.ones(24, 8)).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return q, k, v

    x = torch.ones(2, 5, 8, requires_grad=True)
    for result in torch.compile(heads, backend="aot_eager")(x):
        node, numbers = compiled_function_node([result])
        assert node is not None and len(numbers) == 1


def test_node_of_a_compiled_region_is_found_behind_views() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y, y.view(2, 2, 1).permute(2, 1, 0).unsqueeze(0).squeeze(0).unbind()[0].unbind()[0]

    x = torch.ones(2, 2, requires_grad=True)
    compiled = torch.compile(f, backend="aot_eager")
    first, second = compiled(x)
    for number, result in enumerate((first, second)):
        node, numbers = compiled_function_node([result])
        assert "CompiledFunction" in type(node).__name__ and numbers == (number,)
    assert compiled_function_node([x.sin()]) == (None, ())
    # What is handed on from a region before does not hide the node.
    later, _ = compiled(first)
    assert compiled_function_node([first, later])[0] is compiled_function_node([later])[0] is not node


def test_trace_that_fails_with_sizes_of_values_is_made_once_more_without() -> None:
    shapes = ShapeEnv(allow_dynamic_output_shape_ops=False)
    fake_mode, allowed = FakeTensorMode(shape_env=shapes), list[bool]()

    def trace(x: Tensor, fails: bool) -> None:
        allowed.append(shapes.allow_dynamic_output_shape_ops)
        if allowed[-1] and not fails:
            x.nonzero()
            raise RuntimeError("of torch")
        raise DynamicOutputShapeException("nonzero")

    with tracing(TracingContext(fake_mode)), fake_mode:
        with pytest.raises(DynamicOutputShapeException):
            with_sizes_of_values(lambda: trace(torch.ones(3), False))
        assert allowed == [True, False] and not shapes.allow_dynamic_output_shape_ops
        with pytest.raises(DynamicOutputShapeException):  # without such a size, once is enough
            with_sizes_of_values(lambda: trace(torch.ones(3), True))
        assert allowed == [True, False, True]


def test_inline_only_functions_are_inlined_and_never_captured() -> None:
    graphs: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    @inline_only
    def inner(x: Tensor) -> Tensor:
        (y,) = [one.sin() if torch.compiler.is_compiling() else one.cos() for one in (x,)]
        return y

    def outer(x: Tensor) -> Tensor:
        y = inner(x)
        torch._dynamo.graph_break()
        return eager(y)

    @torch.compiler.disable(recursive=False)
    def eager(y: Tensor) -> Tensor:
        return inner(y)

    x = torch.ones(2)
    assert torch.equal(torch.compile(outer, backend=backend)(x), x.sin().cos())
    assert len(graphs) == 1
    assert torch.equal(torch.compile(inner, backend=backend)(x), x.cos())
    assert len(graphs) == 1


def test_static_tensors_keep_their_sizes_out_of_symbols() -> None:
    sizes: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        sizes.append([type(s) for n in gm.graph.nodes if n.op == "placeholder" for s in n.meta["example_value"].shape])
        return gm.forward

    compiled = torch.compile(lambda x: x * 2, backend=backend)
    for numel in (3, 4, 5):
        x = torch.ones(numel)
        keep_static(x)
        compiled(x)
    assert sizes == [[int]] * 3


def test_results_behind_the_recorded_ones_keep_their_strides() -> None:
    gm = symbolic_trace(lambda x: (x, x + 1, x + 2))
    for node in gm.graph.nodes:
        node.meta["val"] = torch.empty(3, 2).t()
    (output,) = gm.graph.find_nodes(op="output")
    output.meta["original_output_strides"] = [(2, 1)]  # as recorded, before graphshard added two results
    keep_strides(output, 2)
    assert output.meta["user_visible_output_idxs"] == [1, 2]
    assert output.meta["original_output_strides"] == [(2, 1), (1, 2), (1, 2)]


def test_inductor_leaves_a_graph_that_it_compiles_as_it_was() -> None:
    new = random.random()  # nothing in Inductor's cache
    texts: list[tuple[str, str]] = []

    def compiler(graph: GraphModule, inputs: Any, direction: str, **kwargs: Any) -> Any:
        before, run = str(graph.graph), compile_graph_inductor(graph, inputs, kwargs)
        texts.append((before, str(graph.graph)))
        return run

    def backend(gm: GraphModule, inputs: Any) -> Any:
        return compile_region_inductor(gm, inputs, compiler, Partitioner(mock.Mock()), before=hide_copies)

    a, b = torch.ones(4, 4), torch.ones(4, 4)
    result = torch.compile(lambda a, b: (a + a @ b).view(16) * new, backend=backend)(a, b)
    torch.testing.assert_close(result, torch.full((16,), 5 * new))
    ((before, after),) = texts
    assert before == after


def test_backward_overwrites_nothing_that_forward_saves() -> None:
    new = random.random()  # nothing in Inductor's cache
    gm = make_fx(lambda x: (x.exp() * new,), tracing_mode="fake")(torch.ones(64))
    value = next(iter(gm.graph.nodes)).meta["val"]
    context = TracingContext(value.fake_mode)
    context.fw_metadata = SimpleNamespace(bw_donated_idxs=[0])  # type: ignore[assignment]
    with tracing(context):
        keep_what_forward_saves()
        run = compile_body(gm, [value], {"is_backward": True})
    x = torch.zeros(64)
    (result,) = run([x])
    assert torch.equal(x, torch.zeros(64))
    torch.testing.assert_close(result, torch.full((64,), new))


def test_generated_code_is_text_or_none() -> None:
    assert generated_code(mock.Mock(source_code="x = 1")) == "x = 1"
    assert generated_code(len) is None


def test_compiles_are_told_of_once_and_anew_after_a_reset() -> None:
    said: list[str] = []

    def begin(_: object) -> None:
        said.append("begin")

    def end(_: object) -> None:
        said.append("end")

    def backend(gm: GraphModule, inputs: Any) -> Any:
        said.append("compiles")
        return gm.forward

    for _ in range(2):
        for _ in range(2):
            tell_of_compiles(begin, end)
        torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(2))
        assert said == ["begin", "compiles", "end"]
        torch.compiler.reset()
        said.clear()


def test_code_that_is_traced_is_known_to_a_backend() -> None:
    def inner(x: Tensor) -> Tensor:
        return x.sin()

    def broken(x: Tensor) -> Tensor:
        x = inner(x)
        torch._dynamo.graph_break()
        return x.cos()

    def in_loop(x: Tensor) -> Tensor:
        for _ in range(1):
            torch._dynamo.graph_break()
            x = inner(x)
        return x

    codes: list[Any] = []

    def backend(gm: GraphModule, inputs: Any) -> Any:
        codes.append(traced_code())
        return gm.forward

    for function in (broken, in_loop):
        torch.compile(function, backend=backend)(torch.ones(2))
    torch.compiler.reset()
    first, resumed, inside = codes
    assert first is broken.__code__ and inside is inner.__code__
    assert resumed is not broken.__code__ and not resumed.co_name.startswith("broken")


def test_timers_of_torchs_compilers_are_nested_as_is_known() -> None:
    factor = 1.0 + random.SystemRandom().random()  # in no cache

    def loss(x: Tensor) -> Tensor:
        return (x * factor).sin().sum()

    before_s, graphs, start_s = timed_seconds(), timed_graphs(), time.perf_counter()
    torch.compile(loss, backend="inductor")(torch.ones(8, requires_grad=True)).backward()  # type: ignore[no-untyped-call]
    took_s = time.perf_counter() - start_s
    timed_s = {name: seconds - before_s.get(name, 0.0) for name, seconds in timed_seconds().items()}
    phases = exclusive_seconds(timed_s, 0.0)
    assert timed_graphs() - graphs == 2
    # A torch may leave its partitioner untimed.
    assert {name for name in PHASES if phases[name] > 0.0} >= {*PHASES} - {PARTITIONER}
    assert sum(phases.values()) < took_s


# -- Inductor's libraries


def test_library_that_a_compiler_has_not_finished_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    library, other = tmp_path / "a.main.so", tmp_path.parent / "b.main.so"

    def compiled() -> str:
        if not library.exists():
            return "whole"
        try:
            raise ImportError("file too short", path=str(library))
        except ImportError as error:
            raise RuntimeError("Inductor's own") from error

    library.touch()
    assert with_whole_libraries(compiled) == "whole"
    assert f"Inductor's library {library} is compiled again, for it is damaged: file too short" in caplog.text

    def never() -> None:
        library.touch()
        raise ImportError("undefined symbol", path=str(library))

    with pytest.raises(ImportError, match="undefined symbol"):  # once, not for ever
        with_whole_libraries(never)

    def elsewhere() -> None:
        other.touch()
        raise ImportError("no file of Inductor's", path=str(other))

    with pytest.raises(ImportError, match="no file of Inductor's"):
        with_whole_libraries(elsewhere)
    assert other.exists()
