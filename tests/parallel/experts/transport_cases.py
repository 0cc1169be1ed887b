"""The functions that ranks run in test_transport.py: dispatchers, and an LLM over them.

Ranks import the module of their function, so this module must not import pytest.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fulgurite.errors import FulguriteError
from fulgurite.kernels.dispatch.wire_format import WireFormat
from fulgurite.kernels.moe.router_config import Routes
from fulgurite.models.config import MoEConfig
from fulgurite.models.moe import Experts, gated_activation
from fulgurite.parallel import AllToAllDispatcher, Placement, apply_expert_parallel
from fulgurite.parallel.experts.expert_parallel import ExpertParallel
from fulgurite.parallel.experts.placement import read_expert_load
from fulgurite.parallel.experts.transport import ExpertOptions, make_dispatcher
from fulgurite.quant import QuantTensor, quantize
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.llm import LLM
from tests.parallel.engine_cases import PLAIN, Tokens, open_llm, report_hang, use_graphs
from tests.parallel.experts.expert_cases import HIDDEN, make_experts, make_inputs
from tests.parallel.model_cases import Shape, distance, mesh_of

MAX_TOKENS = 24


def make_layer(
    shape: Shape,
    *,
    transport: str,
    kind: str = "plain",
    count: int = 8,
    per_token: int = 3,
    dtype: torch.dtype = torch.float32,
    wire: str = "auto",
    capacity: int | None = None,
    placement: Placement | None = None,
) -> tuple[ExpertParallel, Any]:
    """A layer with the dispatcher of a transport, and its mesh."""
    mesh = mesh_of(shape)
    slots = count if placement is None else placement.slots_LS.shape[1]
    options = ExpertOptions(transport, wire, capacity)
    config = options.dispatch_config(
        HIDDEN, per_token, dtype, MAX_TOKENS, slots // mesh.expert.size
    )
    dispatcher = make_dispatcher(options, mesh.expert, config, mesh.device)
    experts = make_experts(kind, count, per_token, dtype).to(mesh.device)
    return apply_expert_parallel(experts, dispatcher, placement), mesh


def run_variants(
    shape: Shape,
    tokens: tuple[int, ...],
    variants: list[dict[str, Any]],
    only: int | None = None,
    **options: Any,
) -> list[Tensor]:
    """The output of one layer for each variant: `step_tokens`, `micro_batches`, `chunk_rows`, `grad`."""
    layer, mesh = make_layer(shape, **options)
    own = tokens[mesh.expert.index % len(tokens)]
    count, per_token = options.get("count", 8), options.get("per_token", 3)
    dtype = options.get("dtype", torch.float32)
    x, routes = make_inputs(mesh.rank, own, count, per_token, dtype, only)
    x, routes = x.to(mesh.device), Routes(*(part.to(mesh.device) for part in routes))
    found = []
    for variant in variants:
        layer.dispatcher.set_step_tokens(variant.get("step_tokens"))
        layer.micro_batches = variant.get("micro_batches", 1)
        layer.micro_batch_tokens = variant.get("micro_batch_tokens", 1)
        layer.chunk_rows = variant.get("chunk_rows", 1 << 20)
        with torch.set_grad_enabled(variant.get("grad", False)):
            out = layer(x, routes)
        layer.dispatcher.check()
        found.append(out.detach().cpu())
    return found


def compare_to_one_rank(shape: Shape, tokens: tuple[int, ...], **options: Any) -> float:
    """The distance to all experts on one rank, whose inputs are rounded as the wire rounds them."""
    from tests.kernels.dispatch.cases import round_trip

    only, step_tokens = options.pop("only", None), options.pop("step_tokens", None)
    layer, mesh = make_layer(shape, **options)
    count, per_token = options.get("count", 8), options.get("per_token", 3)
    dtype, wire = options.get("dtype", torch.float32), options.get("wire", "auto")
    whole = make_experts(options.get("kind", "plain"), count, per_token, dtype).to(mesh.device)
    layer.dispatcher.set_step_tokens(step_tokens)
    worst = 0.0
    for round in range(3):
        own = tokens[(mesh.expert.index + round) % len(tokens)]
        x, routes = make_inputs(10 * round + mesh.rank, own, count, per_token, dtype, only)
        x, routes = x.to(mesh.device), Routes(*(part.to(mesh.device) for part in routes))
        with torch.no_grad():
            out = layer(x, routes)
            wanted = whole(x if wire == "auto" else round_trip(wire, x), routes)
        layer.dispatcher.check()
        worst = max(worst, distance(out, wanted))
    return worst


def compare_fp8(shape: Shape, transport: str, tokens: int) -> tuple[float, bool]:
    """FP8 weights and wire: the distance to one rank that gets the rows which were sent, and whether
    they stayed in FP8 up to the experts. One rank reads them dequantized, or in FP8, too."""
    mesh = mesh_of(shape)
    dtype = torch.bfloat16 if mesh.device.type == "cuda" else torch.float32
    whole = Experts(256, MoEConfig(8, 3, 128), gated_activation("silu")).to(dtype)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in list(whole.named_parameters()):
        dense = torch.randn(parameter.shape, generator=generator, dtype=dtype) / 16
        packed = quantize(dense, "fp8_e4m3_128x128").to(mesh.device)
        setattr(whole, name, nn.Parameter(packed, requires_grad=False))
    options = ExpertOptions(transport, "fp8")
    config = options.dispatch_config(256, 3, dtype, tokens, 8 // mesh.expert.size)
    dispatcher = make_dispatcher(options, mesh.expert, config, mesh.device)
    layer = apply_expert_parallel(copy.deepcopy(whole), dispatcher)
    stayed = []
    layer.experts.register_forward_pre_hook(
        lambda module, inputs: stayed.append(isinstance(inputs[0], QuantTensor))
    )
    generator = torch.Generator().manual_seed(mesh.rank)
    x = torch.randn(tokens, 256, generator=generator).to(mesh.device, dtype)
    chosen = torch.rand(tokens, 8, generator=generator).topk(3).indices.to(mesh.device)
    routes = Routes(torch.rand(tokens, 3, generator=generator).to(mesh.device), chosen)
    wire = WireFormat("fp8", 256)
    with torch.no_grad():
        out = layer(x, routes)
        dispatcher.check()
        sent = wire.read_quantized(wire.pack(x), dtype)
        wanted = whole(sent if stayed[0] else sent.dequantize(), routes)
    return distance(out, wanted), all(stayed)


def find_error(
    shape: Shape, transport: str, capacity: int | None, bad: int | None, step_tokens: int | None
) -> tuple[str, float]:
    """The error of a step on this rank, once the host looks; then the ranks still work together."""
    layer, mesh = make_layer(shape, transport=transport, capacity=capacity, per_token=2)
    x, routes = make_inputs(mesh.rank, 5, 8, 2, torch.float32, None)
    x, routes = x.to(mesh.device), Routes(*(part.to(mesh.device) for part in routes))
    routes.experts_Tk[:] = torch.tensor([5, 4])
    if bad is not None and mesh.rank == 1:
        routes.experts_Tk[0, 0] = bad
    layer.dispatcher.set_step_tokens(step_tokens)
    text = ""
    with torch.no_grad():
        try:
            layer(x, routes)
            layer.dispatcher.check()
        except FulguriteError as error:
            text = f"{type(error).__name__}: {error}"
        whole = make_experts("plain", 8, 2, torch.float32).to(mesh.device)
        layer = apply_expert_parallel(copy.deepcopy(whole), AllToAllDispatcher(mesh.expert))
        routes.experts_Tk[:] = torch.tensor([0, 7])
        return text, distance(layer(x, routes), whole(x, routes))


def generate(
    folder: Path,
    shape: Shape,
    prompts: Tokens,
    params: list[SamplingParams],
    options: dict[str, Any],
) -> tuple[Tokens, str, str]:
    """Rank 0: every reply. All: the class of the dispatcher, and why it was chosen."""
    with report_hang(), open_llm(folder, shape, **options) as llm:
        layer = next(m for m in llm.model.modules() if isinstance(m, ExpertParallel))
        replies: Tokens = []
        if llm.is_driver:
            replies = [one.token_ids for one in llm.generate(prompts, params)]
    assert llm.experts is not None and llm.experts.choice is not None
    return replies, type(layer.dispatcher).__name__, llm.experts.choice.reason


def save_load_twice(
    folder: Path,
    axes: dict[str, int],
    prompts: Tokens,
    params: list[SamplingParams],
    file: Path,
    graphs: bool,
) -> list[list[list[int]]]:
    """Rank 0: the expert load after one generation, and after two. `graphs`: those of `use_graphs`."""
    found: list[list[list[int]]] = []
    with ExitStack() as stack:
        llm = stack.enter_context(LLM(folder, **axes, timeout=60.0, record_load=file, **PLAIN))
        if graphs:
            stack.enter_context(use_graphs(llm, [], [], fails=-1))
        if llm.engine.runner.stage_runner is not None:
            llm.engine.runner.stage_runner.min_tokens = 4
        if llm.is_driver:
            for _ in range(2):
                llm.generate(prompts, params)
                llm.engine.reset_prefix_cache()
                llm.save_load()
                found.append(read_expert_load(file).tolist())
        llm.close()
    return found


def error_of(folder: Path, shape: Shape, options: dict[str, Any]) -> str:
    """What an LLM with these options raises."""
    try:
        with open_llm(folder, shape, **options):
            return ""
    except FulguriteError as error:
        return str(error)
