"""Session: the compilation pipeline, and the record of everything one function compiled.

In: graphs from TorchDynamo, one at a time. Out: callables that run them. A session records every stage
of every graph, graph breaks, tensors saved for backward and autotuning decisions.
Read `Session.compile_graph`, then `Session.build` and `Session.lower`: they are the pipeline from top to
bottom. `failures.py` says what happens if one of its steps fails.
"""

from __future__ import annotations

import functools
import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import fx
from torch._dynamo.exc import TorchDynamoException
from torch._guards import TracingContext

from fulgurite import repro
from fulgurite.capture.attention_masks import fold_captured_masks
from fulgurite.capture.autograd import run_aot_autograd
from fulgurite.capture.convolution_gemm import use_gemm_for_convolutions
from fulgurite.capture.dynamo import GraphBreak
from fulgurite.capture.foreach import separate_writes
from fulgurite.capture.inference_mode import use_no_grad
from fulgurite.capture.input_names import CapturedNames, clean_input_names
from fulgurite.capture.layer_graphs import CannotOutline, trace_layer
from fulgurite.capture.no_grad_views import detach_results
from fulgurite.capture.opaque_gradients import make_gradients_opaque
from fulgurite.capture.outline import LayerSource, extract_layer, replace_layers
from fulgurite.capture.program_errors import raise_assertion_errors
from fulgurite.capture.random_floats import use_float64
from fulgurite.capture.repeats import LayerCache, LayerCall, LayerGroup, find_repeated_layers
from fulgurite.capture.strided_views import view_storages
from fulgurite.capture.subgraph_op import LayerGraphs
from fulgurite.capture.view_writes import replace_views
from fulgurite.compiled_graph import CompiledGraph, GraphRecord
from fulgurite.config import settings
from fulgurite.cudagraph import GraphedFunction
from fulgurite.determinism import is_deterministic
from fulgurite.errors import ArgumentError, FulguriteError
from fulgurite.executors import Executor, claim, lower_trace
from fulgurite.executors.autotune import ExecutorTuner
from fulgurite.executors.cudagraph import CudaGraphPlan, ProgramMemory
from fulgurite.executors.fallback import TORCH_OPS, Fallback
from fulgurite.executors.fuser import FUSER, can_fuse_gemms, fuse_gemms
from fulgurite.executors.torch import TORCH
from fulgurite.failures import (
    BEFORE_STEP,
    CAPTURED_OPS,
    as_compile_error,
    attach_repro,
    can_fall_back,
    warn_of_captured_calls,
    warn_of_fallback,
)
from fulgurite.logs import LOG
from fulgurite.options import Options
from fulgurite.trace import Kind, Trace, verify
from fulgurite.trace.cost import format_count, format_seconds, is_view, node_bytes
from fulgurite.trace.node_meta import set_executor
from fulgurite.trace.region import Region
from fulgurite.trace.source import load_source
from fulgurite.trace.subgraph import (
    SUBGRAPH_EXECUTOR,
    SubgraphCall,
    subgraph_calls,
)
from fulgurite.trace.verify import snapshot_graph, verify_unmodified
from fulgurite.transforms import SIMPLIFY
from fulgurite.transforms.align_gemm import align_gemms, has_misaligned_gemms
from fulgurite.transforms.attention_masks import fold_attention_masks
from fulgurite.transforms.convolution_bias import (
    has_biased_convolutions,
    split_convolution_bias,
)
from fulgurite.transforms.convolutions import has_convolutions, use_own_convolutions
from fulgurite.transforms.false_schemas import find_false_schemas, has_custom_ops
from fulgurite.transforms.matmuls import has_matmuls, use_own_matmuls
from fulgurite.transforms.pack_weights import has_library_calls, pack_weights
from fulgurite.transforms.remat import SavedBytes, make_partitioner
from fulgurite.transforms.scaled_mm import has_scaled_mms, route_scaled_mm
from fulgurite.units import format_bytes

StepKind = Literal["required", "optional", "user"]


def make_tuner(options: Options) -> ExecutorTuner | None:
    """What times regions and library calls. In deterministic mode nothing is timed: two processes could
    choose other kernels for the same graph, which differ in bits."""
    if not options.autotune or is_deterministic():
        return None
    return ExecutorTuner(options.executors, options.autotune)


@dataclass
class _SubgraphBuild:
    """A functional graph of a layer. It is built when the first trace that calls it is lowered."""

    name: str  # of the layer
    record: GraphRecord
    kind: Kind
    names: CapturedNames
    compiled: SubgraphCall | None = None


class Session:
    """Compiles graphs with one set of options, and records the result of every step."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.graphs: list[GraphRecord] = []
        self.breaks: list[GraphBreak] = []
        self.subgraphs: dict[Any, _SubgraphBuild] = {}  # by the call in functional traces
        self.layer_cache = LayerCache()
        self.graph_memory = ProgramMemory()
        self.__name__ = "fulgurite"  # TorchDynamo prints its backend's name

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one captured graph: TorchDynamo calls this as its backend."""
        inputs = use_float64(module, inputs)
        use_no_grad(module)
        detach_results(module)
        fold_captured_masks(module)
        use_gemm_for_convolutions(module)
        replace_views(module)
        view_storages(module)
        separate_writes(module)
        captured = module
        if self.options.granularity == "auto":
            module = self.outline(module)
        record = GraphRecord(len(self.graphs))
        self.graphs.append(record)
        try:
            run = self.compile_graph(record, module, inputs, captured)
        except BaseException as error:
            if not self._can_run_captured(record, error):
                self.graphs.remove(record)
                raise
            run = self.run_captured(record, module, error)
        return raise_assertion_errors(run, captured)

    def _can_run_captured(self, record: GraphRecord, error: BaseException) -> bool:
        """Whether torch may run the captured graph after this error. TorchDynamo's are its own business:
        some make it capture the function again."""
        if not isinstance(error, Exception) or isinstance(error, TorchDynamoException):
            return False
        return bool(record.history) and can_fall_back(error, self.options)

    def run_captured(
        self, record: GraphRecord, module: fx.GraphModule, error: BaseException
    ) -> Callable[..., Any]:
        """The captured graph, with the user's transforms of it, as torch runs it in eager mode."""
        assert isinstance(error, Exception), "an interrupt is not a failure"
        name = f"graph {record.index}"
        failure = as_compile_error(error, "AOTAutograd failed")
        self.report(record, Fallback(name, failure, CAPTURED_OPS))
        record.history = record.stages("captured")
        record.compiled_graphs.clear()
        last = record.history[-1]
        return module.forward if last is record.captured else last.module.forward

    # ---- the pipeline ------------------------------------------------------------------------------

    def compile_graph(
        self,
        record: GraphRecord,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        captured: fx.GraphModule,
    ) -> Callable[..., Any]:
        """Captured graph → a callable, with a backward graph if gradients are needed.

        `captured` is the graph before its layers became calls of sub-graphs.
        """
        started = time.perf_counter()
        trace, names = self.prepare_capture(record, module, inputs)
        is_transformed = trace.module is not record.captured.module
        result = run_aot_autograd(
            trace.module if is_transformed else module,
            trace.module,
            inputs,
            forward=lambda graph: self.build(record, "forward", graph, names),
            backward=lambda graph: self.build(record, "backward", graph, names),
            inference=lambda graph: self.build(record, "inference", graph, names),
            partition=self.make_partition(record),
            report=functools.partial(self.report_captured_calls, record),
            without_calls=None if is_transformed else captured,
        )
        record.seconds += time.perf_counter() - started
        return result

    def prepare_capture(
        self, record: GraphRecord, module: fx.GraphModule, inputs: Sequence[Any]
    ) -> tuple[Trace, CapturedNames]:
        """Captured graph → the trace that AOTAutograd differentiates, and the names of its values."""
        captured = Trace(clean_input_names(module), "captured", "captured", record.index)
        trace = self.run_step(record, "captured", lambda trace: trace, captured)
        for executor in self.options.executors:
            executor.warm_up(captured.module, inputs)
        for transform in self.options.transforms_in("before_autograd"):
            trace = self.run_step(record, transform.name, transform, trace, "user")
        make_gradients_opaque(module if trace.module is captured.module else trace.module)
        return trace, CapturedNames(captured.module)

    def outline(self, module: fx.GraphModule) -> fx.GraphModule:
        """Compile the repeated layers of a captured graph once each, and let the graph call them."""
        layers: dict[LayerCall, SubgraphCall] = {}
        for group in find_repeated_layers(module):
            call = self.layer_cache.find(group) or self.outline_layer(module, group)
            if call is not None:
                layers |= dict.fromkeys(group.calls, call)
        return replace_layers(module, layers) if layers else module

    def outline_layer(self, module: fx.GraphModule, group: LayerGroup) -> SubgraphCall | None:
        """The call of a layer's sub-graph; None if the layer can't be one."""
        record = GraphRecord(len(self.graphs), called_for=str(group))
        self.graphs.append(record)
        taken = {build.name for build in self.subgraphs.values()}
        names = (f"{group.kind}_{k}" if k else group.kind for k in itertools.count())
        source = extract_layer(module, group, next(n for n in names if n not in taken))
        try:
            graphs = self.trace_layer(record, source)
        except Exception as error:  # the model's own graph fails as well if the layer is at fault
            self.graphs.remove(record)
            if not isinstance(error, CannotOutline) and not self._can_run_captured(record, error):
                raise
            LOG.info("%s stay in the model's graph: %s", group, error)
            return None
        call = SubgraphCall(source.name, SUBGRAPH_EXECUTOR, record.history[-1].module, graphs)
        self.layer_cache.add(group, call)
        return call

    def trace_layer(self, record: GraphRecord, source: LayerSource) -> LayerGraphs:
        """Captured layer → functional graphs, which are built when a trace that calls them is lowered."""
        started = time.perf_counter()
        trace, names = self.prepare_capture(record, source.module, source.inputs)
        changed = trace.module is not record.captured.module
        graphs = trace_layer(
            source.name,
            trace.module if changed else source.module,
            source.inputs,
            source.static_inputs,
            self.make_partition(record),
        )
        kind: Kind = "forward" if graphs.backward else "inference"
        self.subgraphs[graphs.forward.call] = _SubgraphBuild(source.name, record, kind, names)
        if graphs.backward is not None:
            backward = _SubgraphBuild(source.name, record, "backward", names)
            self.subgraphs[graphs.backward.call] = backward
        record.seconds += time.perf_counter() - started
        return graphs

    def link_subgraphs(self, trace: Trace) -> Trace:
        """Let a final trace call compiled layers."""
        for node in subgraph_calls(trace.graph):
            build = self.subgraphs[node.target]
            if build.compiled is None:
                build.compiled = self.build_subgraph(build, node.target)  # type: ignore[arg-type]
            node.target = build.compiled
            set_executor(node, SUBGRAPH_EXECUTOR)
        return trace

    def build_subgraph(self, subgraph: _SubgraphBuild, call: SubgraphCall) -> SubgraphCall:
        """Build one functional graph of a layer."""
        started = time.perf_counter()
        compiled = self.build(subgraph.record, subgraph.kind, call.module, subgraph.names)
        if subgraph.kind != "backward":  # whose time `build` counts
            subgraph.record.seconds += time.perf_counter() - started
        summary = f"graph {subgraph.record.index}"
        return replace(call, module=compiled.trace.module, call=compiled.call, summary=summary)

    def build(
        self, record: GraphRecord, kind: Kind, graph: fx.GraphModule, names: CapturedNames
    ) -> CompiledGraph:
        """Functional graph → compiled graph: simplify, transform, then `lower`."""
        started = time.perf_counter()
        options = self.options
        tuner = make_tuner(options)
        trace = Trace(names.apply(graph), kind, "functional", record.index)
        trace = self.run_step(record, "functional", lambda trace: trace, trace)
        routes = [route_scaled_mm] if has_scaled_mms(trace) else []
        routes += [align_gemms] if has_misaligned_gemms(trace) else []
        routes += [split_convolution_bias] if has_biased_convolutions(trace) else []
        for transform in (fold_attention_masks, *routes, *SIMPLIFY):
            trace = self.run_step(record, transform.name, transform, trace, "optional")
        for transform in options.transforms_in("after_autograd"):
            trace = self.run_step(record, transform.name, transform, trace, "user")
        if FUSER in options.executors and has_library_calls(trace):
            is_layer = record.is_subgraph or options.granularity == "blocks"
            pack = functools.partial(pack_weights, is_layer=is_layer)
            trace = self.run_step(record, "pack_weights", pack, trace, "optional")
        if FUSER in options.executors and tuner is not None and has_matmuls(trace):
            trace = self.run_step(record, "use_own_matmuls", use_own_matmuls, trace, "optional")
        if FUSER in options.executors and tuner is not None and has_convolutions(trace):
            change = use_own_convolutions
            trace = self.run_step(record, "use_own_convolutions", change, trace, "optional")
        trace = self.lower_or_fall_back(record, trace, tuner)
        trace = record.history[-1] = trace.with_note(_summary_line(record.stages(kind)))
        wrap = self.wrap_in_cuda_graph(record, trace)
        report = functools.partial(self.report, record)
        compiled = CompiledGraph(trace, wrap, record.is_subgraph, report)
        record.compiled_graphs[kind] = compiled
        for decision in tuner.decisions if tuner else []:
            LOG.info("autotuned %s", decision)
            record.decisions.append(decision)
        LOG.info("%s %d: %s", kind, record.index, trace.notes[-1])
        if kind == "backward":
            record.seconds += time.perf_counter() - started
        return compiled

    def lower_or_fall_back(
        self, record: GraphRecord, trace: Trace, tuner: ExecutorTuner | None
    ) -> Trace:
        """Lower a functional trace; if a step fails that can't be left out, torch runs every op."""
        num_stages = len(record.history)
        try:
            return self.lower(record, trace, self.options.executors, tuner)
        except FulguriteError as error:
            if not can_fall_back(error, self.options):
                raise
            self.report(record, Fallback(f"{trace.kind} {trace.index}", error, TORCH_OPS))
        del record.history[num_stages:]
        return self.lower(record, trace, (TORCH,), None)

    def lower(
        self,
        record: GraphRecord,
        trace: Trace,
        executors: Sequence[Executor],
        tuner: ExecutorTuner | None,
    ) -> Trace:
        """Functional trace → final trace: claim, fuse GEMMs, lower regions, capture CUDA graphs."""
        options = self.options
        report = functools.partial(self.report, record)
        trace = self.run_step(
            record, "claimed", lambda trace: claim(trace, executors, report), trace
        )
        if can_fuse_gemms(trace, executors):
            fuse = functools.partial(fuse_gemms, executors=executors, tuner=tuner)
            trace = self.run_step(record, "gemm_fusion", fuse, trace, "optional")
        choose = tuner.choose_executor if tuner else None
        # regions may overwrite dead buffers only if no transform may read them afterwards
        donate = not options.transforms_in("after_claim")
        trace = self.run_step(
            record,
            "final",
            lambda trace: self.link_subgraphs(
                lower_trace(trace, executors, choose, donate, report)
            ),
            trace,
        )
        plan = self.plan_cuda_graph(record, trace)
        if plan is not None and plan.should_split(trace):
            trace = self.run_step(record, "cudagraph", plan.split, trace, "optional")
        if settings().verify and has_custom_ops(trace):
            trace = self.run_step(record, find_false_schemas.name, find_false_schemas, trace)
        for transform in options.transforms_in("after_claim"):
            trace = self.run_step(record, transform.name, transform, trace, "user")
        return trace

    def plan_cuda_graph(self, record: GraphRecord, trace: Trace) -> CudaGraphPlan | None:
        """How a trace is captured; None: it is not. A layer is captured with the graph that calls it."""
        mode = self.options.cudagraph
        if mode is False or record.is_subgraph:
            return None
        return CudaGraphPlan(mode, self.graph_memory.of(trace.kind), _num_user_outputs(trace))

    def wrap_in_cuda_graph(
        self, record: GraphRecord, trace: Trace
    ) -> Callable[..., GraphedFunction] | None:
        """What makes the trace's function one that is captured as a whole; None: it can't be."""
        plan = self.plan_cuda_graph(record, trace)
        if plan is None or not plan.can_capture(trace):
            return None
        refresh = weakref.WeakMethod(record.refresh_final_traces)  # graphs don't keep records alive

        def report(reason: str) -> None:
            LOG.info("%s: CUDA graph: %s", trace.name, reason)
            if (method := refresh()) is not None:
                method()

        return functools.partial(plan.wrap, report=report)

    def run_step(
        self,
        record: GraphRecord,
        name: str,
        change: Callable[[Trace], Trace],
        trace: Trace,
        kind: StepKind = "required",
    ) -> Trace:
        """Run one named step of the pipeline: time it, verify its result, add that to the history.

        kind   what happens if the step fails. "required": it raises. "optional": it is left out, with
               a warning. "user": it raises, and nothing falls back.
        """
        known = snapshot_graph(trace) if settings().verify else None
        started = time.perf_counter()
        try:
            changed = change(trace).at_stage(name, time.perf_counter() - started)
            if known is not None:
                verify_unmodified(trace, known, name)
                verify(changed, before=trace if changed.module is not trace.module else None)
        except Exception as error:
            failure = as_compile_error(error, f"{name} failed on {trace.name}", name)
            failure.may_fall_back &= kind != "user"
            if record.history:
                attach_repro(failure, record.captured, self.options, record.state)
            if kind == "optional" and can_fall_back(failure, self.options):
                self.report(record, Fallback(f"step {name}", failure, BEFORE_STEP))
                return trace
            raise failure from (None if failure is error else error)
        record.history.append(changed)
        LOG.debug("%s: %s", changed.name, format_seconds(changed.seconds))
        return changed

    def report(self, record: GraphRecord, fallback: Fallback) -> None:
        """Record that a part of a graph falls back, and warn. In strict mode, raise its error."""
        attach_repro(fallback.error, record.captured, self.options, record.state)
        if not can_fall_back(fallback.error, self.options):
            raise fallback.error
        record.fallbacks.append(warn_of_fallback(fallback))
        record.refresh_final_traces()

    def report_captured_calls(self, record: GraphRecord, reason: str) -> None:
        """Record that torch runs the captured graph for some inputs, and warn once for each reason.

        This is no failure: compiled code is right for the memory layout of the inputs at capture only.
        So strict mode does not raise.
        """
        if reason not in record.captured_calls:
            record.captured_calls.append(reason)
            warn_of_captured_calls(f"graph {record.index}", reason)
            record.refresh_final_traces()

    def make_partition(self, record: GraphRecord) -> Callable[..., Any]:
        """The function that splits a joint graph into forward and backward."""
        split = make_partitioner(self.options.remat)

        def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
            record.saved_bytes = SavedBytes(joint, inputs, options)
            return split(joint, inputs, **options)

        return partition

    # ---- inspection ----------------------------------------------------------------------------------

    @property
    def history(self) -> list[Trace]:
        """Every trace of every graph, in order."""
        return [trace for record in self.graphs for trace in record.history]

    def graph_record(self, graph: int) -> GraphRecord:
        """The record of a graph by its number; negative numbers count from the end."""
        if not self.graphs:
            raise ArgumentError(
                "nothing is compiled yet", next="call the compiled function with inputs first"
            )
        if not -len(self.graphs) <= graph < len(self.graphs):
            raise ArgumentError(
                f"there is no graph {graph}", next=f"graphs are 0 to {len(self.graphs) - 1}"
            )
        return self.graphs[graph]

    def compiled_graph(self, graph: int, kind: Kind | None) -> CompiledGraph:
        """What runs for one kind of a graph; None: inference, or the forward of training."""
        record = self.graph_record(graph)
        if kind is None:
            kind = "inference" if "inference" in record.compiled_graphs else "forward"
        if kind not in record.compiled_graphs:
            raise ArgumentError(
                f"graph {record.index} has no {kind}",
                next=f"one of {', '.join(record.compiled_graphs)}"
                + ("; backward is built when it first runs" if kind == "backward" else ""),
            )
        return record.compiled_graphs[kind]

    def replace_trace(self, text: str, graph: int, kind: Kind | None) -> None:
        """Run an edited text in place of a final trace."""
        compiled = self.compiled_graph(graph, kind)
        forward = load_source(text, f"<edited {compiled.trace.name}>")
        repro.check_replacement(compiled.trace, forward)
        compiled.replace(forward)
        if self.graph_record(graph).is_subgraph:
            self.keep_subgraphs()

    def keep_subgraphs(self) -> None:
        """Let all graphs call their sub-graphs, which they have inlined."""
        for record in self.graphs:
            for compiled in record.compiled_graphs.values():
                if subgraph_calls(compiled.trace.graph):
                    compiled.keep_subgraphs()


def _num_user_outputs(trace: Trace) -> int:
    """Number of outputs the user gets. A training forward returns saved tensors after them."""
    if trace.kind != "forward":
        return len(trace.outputs)
    metadata = TracingContext.get().fw_metadata
    assert metadata is not None, "AOTAutograd built forward without analysing it"
    return int(metadata.num_forward_returns)


def _summary_line(stages: list[Trace]) -> str:
    """The line below a final trace's title: calls, bytes moved, compile time."""
    computing = [node for node in stages[-1].ops if not is_view(node)]
    layers = sum(isinstance(node.target, SubgraphCall) for node in computing)
    regions = sum(isinstance(node.target, Region) for node in computing) - layers
    parts = [format_count(layers, "sub-graph call")] if layers else []
    parts += [format_count(regions, "region")] if regions else []
    parts.append(format_count(len(computing) - layers - regions, "library call"))
    moved = sum(node_bytes(node) for node in computing)
    parts.append(f"{format_bytes(moved)} moved")
    parts.append(f"{format_seconds(sum(trace.seconds for trace in stages))} to compile")
    return ", ".join(parts)
