"""What each rank does in test_wrappers.py: a model under a distributed wrapper, compiled and in eager mode."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fulgurite
from fulgurite.compile import record_compilations
from fulgurite.models import ModelConfig
from fulgurite.models.families.registry import get_sharding_rules
from fulgurite.parallel import parallelize
from tests.parallel.model_cases import loss_of, mesh_of, tokens_of, whole_model
from tests.ranks import open_once

WIDTH, STEPS = 16, 2


def get_mesh() -> DeviceMesh:
    """All ranks, in one dimension."""
    world_size = int(os.environ["WORLD_SIZE"])
    mesh_of((world_size, 1, 1))  # starts torch.distributed
    return open_once("all", lambda: init_device_mesh("cpu", (world_size,)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.silu(x))


class Net(nn.Module):
    """`use_checkpoint` is a function that runs a layer, such as `torch.utils.checkpoint.checkpoint`."""

    def __init__(self, layers: int, use_checkpoint: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = Head()
        self.use_checkpoint = use_checkpoint

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = self.use_checkpoint(layer, x) if self.use_checkpoint else layer(x)
        return self.head(x)


class Outer(nn.Module):
    """A model whose layers are called by a child: it has an outer graph."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.model = Net(layers)

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.model(x * 2), -1) + 1


def sequential() -> nn.Module:
    sizes = [(8, WIDTH), (WIDTH, WIDTH), (WIDTH, 4)]
    linears = [nn.Linear(*size) for size in sizes]
    return nn.Sequential(linears[0], nn.GELU(), linears[1], nn.ReLU(), linears[2])


def run_checkpointed(layer: nn.Module, x: Tensor) -> Any:
    return checkpoint(layer, x, use_reentrant=False)


def keep_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_matmul = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_matmul else CheckpointPolicy.PREFER_RECOMPUTE


def make_contexts() -> Any:
    return create_selective_checkpoint_contexts(keep_matmuls)


def run_selectively(layer: nn.Module, x: Tensor) -> Any:
    return checkpoint(layer, x, use_reentrant=False, context_fn=make_contexts)


# ---- wrappers -----------------------------------------------------------------------------------------


def shard(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=get_mesh())


def shard_layers(model: Any, root: bool = True) -> nn.Module:
    layers = model.layers if isinstance(model, Net) else [m for m in model if list(m.parameters())]
    for layer in layers:
        fully_shard(layer, mesh=get_mesh())
    return fully_shard(model, mesh=get_mesh()) if root else model


def shard_layers_only(model: nn.Module) -> nn.Module:
    """The other parameters are replicated: every rank must get the same inputs."""
    return shard_layers(model, root=False)


def shard_in_half_precision(model: Any) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.layers:
        fully_shard(layer, mesh=get_mesh(), mp_policy=policy)
    return fully_shard(model, mesh=get_mesh(), mp_policy=policy)


def replicate(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def shard_flat(model: nn.Module) -> nn.Module:
    device = torch.device("cpu")
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=device)


def checkpoint_layers(model: Any) -> nn.Module:
    for k, layer in enumerate(model.layers):
        model.layers[k] = checkpoint_wrapper(layer)
    return model


def checkpoint_and_shard(model: Any) -> nn.Module:
    return shard_layers(checkpoint_layers(model))


def split_tensors(model: Any) -> nn.Module:
    for layer in model.layers:
        parallelize_module(layer, get_mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def split_sequences(model: Any) -> nn.Module:
    """Tensor parallel layers, between which every rank holds a part of the rows."""
    rows = Shard(0)
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=rows),
        "down": RowwiseParallel(output_layouts=rows),
    }
    for layer in model.layers:
        parallelize_module(layer, get_mesh(), plan)
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
        "head.linear": ColwiseParallel(input_layouts=rows, output_layouts=Replicate()),
    }
    return parallelize_module(model, get_mesh(), ends)


def compile_model(model: nn.Module) -> nn.Module:
    compiled: nn.Module = fulgurite.compile(model, executors=["torch"])
    return compiled


def compile_layers(model: Any) -> nn.Module:
    """Each layer is compiled in place, before it is sharded."""
    for k, layer in enumerate(model.layers):
        model.layers[k] = compile_model(layer)
    return model


def fuse_model(model: nn.Module) -> nn.Module:
    compiled: nn.Module = fulgurite.compile(model)
    return compiled


# ---- training ---------------------------------------------------------------------------------------


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def train(model: nn.Module, batches: list[Tensor]) -> list[Any]:
    """Losses, gradients and parameters of a few steps of training, and a result of inference."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[Any] = []
    for x in batches:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        seen += [whole(loss.detach())]
        seen += [whole(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.step()
    seen += [whole(p.detach()) for p in model.parameters()]
    optimizer.zero_grad()
    with torch.no_grad():
        seen += [whole(model(batches[0]))]
    return seen


@dataclass(frozen=True)
class Case:
    """A model with wrappers, and the same with compile before, between or after them."""

    make: Callable[[], nn.Module]
    wrap: Callable[[nn.Module], nn.Module]
    wrap_compiled: Callable[[nn.Module], nn.Module]
    units: tuple[str, ...] = ()  # what `explain` lists
    same_inputs: bool = False  # every rank computes the same loss


def after(wrap: Callable[[nn.Module], nn.Module], compile: Any = compile_model) -> Any:
    """Wrappers, and compile after them."""
    return wrap, lambda model: compile(wrap(model))


def before(wrap: Callable[[nn.Module], nn.Module], compile: Any = compile_model) -> Any:
    """Wrappers, and compile before them."""
    return wrap, lambda model: wrap(compile(model))


def net(layers: int, use_checkpoint: Callable[..., Any] | None = None) -> Callable[[], nn.Module]:
    return lambda: Net(layers, use_checkpoint)


LAYERS = ("2 × Block of fully_shard in layers",)
CASES = {
    "compile(DDP)": Case(
        sequential, *after(replicate), ("Sequential of DistributedDataParallel in module",)
    ),
    "compile(DDP), layers": Case(
        net(5), *after(replicate, fuse_model), ("Net of DistributedDataParallel in module",)
    ),
    "compile(DDP), outer graph": Case(
        lambda: Outer(4), *after(replicate), ("Outer of DistributedDataParallel in module",)
    ),
    "DDP(compile)": Case(sequential, *before(replicate)),
    "compile(FSDP2)": Case(
        sequential, *after(shard, fuse_model), ("Sequential of fully_shard in the model",)
    ),
    "compile(FSDP2), outer graph": Case(
        lambda: Outer(4), *after(shard), ("Outer of fully_shard in the model",)
    ),
    "FSDP2(compile)": Case(sequential, *before(shard), ("Sequential of fully_shard in the model",)),
    "compile(FSDP2 of layers)": Case(net(2), *after(shard_layers, fuse_model), LAYERS),
    "compile(FSDP2 of linears)": Case(
        sequential,
        *after(shard_layers),
        tuple(f"Linear of fully_shard in {k}" for k in (0, 2, 4)),
    ),
    "compile(FSDP2 of layers only)": Case(
        net(5), *after(shard_layers_only), ("5 × Block of fully_shard in layers",), same_inputs=True
    ),
    "compile(FSDP2 in bfloat16)": Case(net(2), *after(shard_in_half_precision), LAYERS),
    "FSDP2 of layers(compile)": Case(net(2), *before(shard_layers), LAYERS),
    "FSDP2(compile of each layer)": Case(
        net(2),
        *before(shard_layers, compile_layers),
        ("Block of fully_shard in the model",) * 2,
    ),
    "compile(FSDP)": Case(
        net(2), *after(shard_flat), ("Net of FullyShardedDataParallel in _fsdp_wrapped_module",)
    ),
    "compile(tensor parallel)": Case(net(2), *after(split_tensors), same_inputs=True),
    "compile(tensor parallel), layers": Case(
        net(5), *after(split_tensors, fuse_model), same_inputs=True
    ),
    "tensor parallel(compile)": Case(net(2), *before(split_tensors), same_inputs=True),
    "compile(sequence parallel)": Case(net(2), *after(split_sequences), same_inputs=True),
    "checkpoint inside": Case(net(2, run_checkpointed), *after(lambda model: model)),
    "checkpoint inside, layers": Case(net(5, run_checkpointed), *after(lambda model: model)),
    "selective checkpoint": Case(net(2, run_selectively), *after(lambda model: model)),
    "checkpoint inside, FSDP2": Case(net(2, run_checkpointed), *after(shard_layers), LAYERS),
    "compile(checkpoint_wrapper)": Case(net(2), *after(checkpoint_layers)),
    "compile(checkpoint_wrapper), layers": Case(net(5), *after(checkpoint_layers)),
    "checkpoint_wrapper(compile)": Case(net(5), *before(checkpoint_layers)),
    "checkpoint_wrapper, FSDP2": Case(
        net(2),
        *after(checkpoint_and_shard),
        ("2 × CheckpointWrapper of fully_shard in layers",),
    ),
}


def compare(name: str) -> tuple[list[int], list[str], list[str]]:
    """Train with and without compile. Returns the graphs and units of each compilation, and all breaks."""
    case = CASES[name]
    get_mesh()
    torch.manual_seed(0)
    model = case.make()
    generator = torch.Generator().manual_seed(0 if case.same_inputs else dist.get_rank())
    batches = [torch.randn(6, 8, generator=generator) for _ in range(STEPS)]
    eager = case.wrap(copy.deepcopy(model))
    expected = train(eager, batches)
    torch._dynamo.reset()
    with record_compilations() as compilations:
        compiled = case.wrap_compiled(model)
    found = train(compiled, batches)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
    assert list(compiled.state_dict()) == list(eager.state_dict())
    breaks = [str(one) for each in compilations for one in each.breaks]
    units = [unit for each in compilations for unit in each.explain().units]
    return [len(each.graphs) for each in compilations], units, breaks


def check_gradient_accumulation(kind: str) -> int:
    """Gradients of two batches, of which the first is not synchronized between ranks."""
    get_mesh()
    torch.manual_seed(0)
    model = Net(2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(6, 8, generator=generator) for _ in range(2)]
    results = []
    compiled: Any = None
    for compile in (lambda m: m, compile_model):
        wrap: Any = replicate if kind == "ddp" else shard_layers
        compiled = compile(wrap(copy.deepcopy(model)))
        for k, x in enumerate(batches):
            if kind == "ddp":
                compiled.require_backward_grad_sync = k == 1
            else:
                compiled.set_requires_gradient_sync(k == 1)
                compiled.set_is_last_backward(k == 1)
            compiled(x).square().mean().backward()
        results.append([whole(p.grad) for p in compiled.parameters()])
    torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=1e-4)
    return len(compiled.graphs)


def check_parallelized(config: ModelConfig, shape: tuple[int, int, int]) -> int:
    """A model over the ranks of our own mesh: logits and gradients, compiled and in eager mode."""
    torch._dynamo.reset()
    ids = tokens_of(0, config.vocab_size, (6,))
    results = []
    compiled: Any = None
    for compile in (lambda model: model, compile_model):
        torch.manual_seed(0)
        model = whole_model(config)
        shares = parallelize(model, mesh_of(shape), get_sharding_rules(config))
        compiled = compile(model)
        logits, loss = loss_of(compiled, ids)
        loss.backward()  # type: ignore[no-untyped-call]
        shares.reduce_gradients()
        results.append([logits.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-3)
    return len(compiled.graphs)


# ---- functions of DTensors ---------------------------------------------------------------------------


def matmul(x: DTensor, w: DTensor) -> Any:
    return torch.relu(x @ w)


def redistribute(x: DTensor, w: DTensor) -> Any:
    return (x @ w).redistribute(placements=[Replicate()]) + 1


def to_local(x: DTensor, w: DTensor) -> Any:
    return (x * 2).to_local() + 1, w


def make_inside(x: DTensor, w: DTensor) -> Any:
    local = x.to_local() * 2
    return DTensor.from_local(local, x.device_mesh, x.placements) + x, local


def write(x: DTensor, w: DTensor) -> Any:
    x.mul_(2)
    return x + 1


FUNCTIONS = (matmul, redistribute, to_local, make_inside, write)


def check_dtensors(function: Callable[..., Any], grad: bool) -> int:
    """A function of sharded tensors: types, placements, local values and gradients."""
    mesh = get_mesh()
    torch._dynamo.reset()
    compiled = fulgurite.compile(function, executors=["torch"])
    for rows in (4, 4, 6):
        results = []
        for run in (compiled, function):
            torch.manual_seed(0)
            values = [torch.randn(rows, 8), torch.randn(8, 6)]
            pair = zip(values, (Shard(0), Replicate()), strict=True)
            x, w = (distribute_tensor(value, mesh, [place]) for value, place in pair)
            x.requires_grad_(grad), w.requires_grad_(grad)
            output = run(x, w)
            outputs = output if isinstance(output, tuple) else (output,)
            if grad:
                torch.autograd.backward(sum(whole(o).sum() for o in outputs))
            results.append([*outputs, x, w, x.grad, w.grad])
        for found, expected in zip(*results, strict=True):
            assert type(found) is type(expected)
            if isinstance(found, DTensor):
                assert found.placements == expected.placements and found.shape == expected.shape
                assert found.requires_grad == expected.requires_grad
                found, expected = found.to_local(), expected.to_local()
            torch.testing.assert_close(found, expected)
    assert not compiled.breaks, compiled.breaks
    return len(compiled.graphs)
