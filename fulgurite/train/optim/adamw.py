"""AdamW: gradients in, new weights out.

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
    w = w (1 - lr * decay) - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)

Weights are float32, or bfloat16 with more bits (`rounding.py`). States are float32, bfloat16 or 8 bit
(`states.py`). All arithmetic is float32 (float64 for float64 weights), on local shards, over lists of
tensors: on a GPU an update of float32 states is one fused kernel for a chunk of parameters.

Every parameter has its states from the start, so a checkpoint has the same entries at every step. A
parameter without a gradient keeps its weight, its states and its own step number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from fulgurite.errors import ArgumentError
from fulgurite.kernels.optimizer import triton_adamw, triton_adamw_packed
from fulgurite.kernels.optimizer.triton_adamw_packed import PackedState, PackedWeight
from fulgurite.train.optim.rounding import (
    MASTER,
    ROUNDINGS,
    join_master,
    make_key,
    random_bits,
    round_stochastic,
    split_master,
)
from fulgurite.train.optim.shards import (
    count_largest_shard,
    find_offset,
    read_local,
    wrap_like,
)
from fulgurite.train.optim.states import (
    FORMATS,
    choose_format,
    create_state,
    find_edges,
    make_code,
    read_state,
    write_state,
)

CHUNK_ELEMENTS = 1 << 24  # of one update: bounds its temporary float32 tensors to a few of 64 MiB
MOMENTS = ("exp_avg", "exp_avg_sq")
# what the random bits of a step are for
_PURPOSES = {"weight": 0, "exp_avg": 1, "exp_avg_sq": 2, "momentum_buffer": 3}


@dataclass(frozen=True)
class Slot:
    """A parameter with a gradient, on this rank."""

    name: str
    parameter: Tensor
    weight: Tensor  # the local shard
    gradient: Tensor
    state: dict[str, Tensor]
    step: int  # from 1

    def random_bits(self, purpose: str) -> Tensor:
        shape, device = self.weight.shape, self.weight.device
        return random_bits(shape, find_offset(self.parameter), self.make_key(purpose), device)

    def make_key(self, purpose: str) -> int:
        return make_key(self.name, self.step, _PURPOSES[purpose])


class AdamW(Optimizer):
    """AdamW for float32 and bfloat16 weights, whole or as DTensors.

    Groups may bring `names`, the names of their `params`: random rounding follows them. `states` and
    `rounding` are those of `OptimizerSection`.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        states: str = "float32",
        rounding: str = MASTER,
    ) -> None:
        _check_choice("states", states, FORMATS)
        _check_choice("rounding", rounding, ROUNDINGS)
        self.names: dict[int, str] = {}
        self.states_format, self.rounding = states, rounding
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(cast(Any, params), {**defaults, "algorithm": "adamw"})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and zero states for its parameters."""
        names = param_group.pop("names", None)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _check_group(group)
        start = len(self.names)
        for index, parameter in enumerate(group["params"]):
            self.names[id(parameter)] = names[index] if names else f"parameter {start + index}"
            self.state[parameter] = self.create_states(parameter, group["algorithm"])

    def create_states(self, parameter: Tensor, algorithm: str) -> dict[str, Tensor]:
        """The states of a parameter before its first step."""
        state = {"step": torch.zeros((), dtype=torch.float32)}
        state_format = choose_format(parameter, self.states_format)
        for name in self.state_names(algorithm):
            state |= create_state(parameter, name, state_format)
        if parameter.dtype == torch.bfloat16 and self.rounding == MASTER:
            low = torch.zeros_like(read_local(parameter), dtype=torch.int16)
            state["master_low"] = wrap_like(parameter, low)
        return state

    def state_names(self, algorithm: str) -> tuple[str, ...]:
        return MOMENTS

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for chunk in _split_chunks(self._collect(group)):
                slots = [slot for slot in chunk if slot.weight.numel() or self.needs_empty(slot)]
                if slots:
                    self.update(slots, group)
        return loss

    def update(self, slots: Sequence[Slot], group: dict[str, Any]) -> None:
        """Update parameters of one group with the same device, dtype and step."""
        slots = update_by_kernel(slots, group)
        if not slots:
            return
        weights = read_weights(slots)
        gradients = read_gradients(slots, weights)
        first, second = ([read_state(slot.state, name) for slot in slots] for name in MOMENTS)
        update_adamw(weights, gradients, first, second, group, slots[0].step)
        for name, values in zip(MOMENTS, (first, second), strict=True):
            write_states(slots, name, values)
        write_weights(slots, weights)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but states keep their own dtype: torch casts them to that of the weights."""
        super().load_state_dict(state_dict)
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                device = torch.device("cpu") if name == "step" else parameter.device
                self.state[parameter][name] = value.to(device)

    def _collect(self, group: dict[str, Any]) -> list[Slot]:
        """Slots of parameters with a gradient, their steps counted; empty shards too."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        sparse = [parameter for parameter in parameters if parameter.grad.is_sparse]
        if sparse:
            raise ArgumentError(
                f"the gradient of {self.names[id(sparse[0])]} is sparse",
                next="build the embedding with sparse=False",
            )
        states = [self.state[parameter] for parameter in parameters]
        if states:
            torch._foreach_add_([state["step"] for state in states], 1)
        return [
            Slot(
                self.names[id(parameter)],
                parameter,
                read_local(parameter.detach()),
                read_local(parameter.grad),
                state,
                int(state["step"]),
            )
            for parameter, state in zip(parameters, states, strict=True)
        ]

    def needs_empty(self, slot: Slot) -> bool:
        """Whether a rank without elements of the parameter takes part in its update."""
        return False


def update_by_kernel(slots: Sequence[Slot], group: dict[str, Any]) -> list[Slot]:
    """Update parameters on a GPU by a kernel, where there is one; returns the other slots.

    Those with master bits and float32 states have one for all. float32 weights with float32 states are
    among the others: torch updates many by one kernel.
    """
    if not slots[0].weight.is_cuda:
        return list(slots)
    numbers = triton_adamw.AdamWStep(
        float(group["lr"]), group["betas"], group["eps"], group["weight_decay"], slots[0].step
    )
    masters = [make_master(slot) for slot in slots]
    triton_adamw.adamw_step([master for master in masters if master is not None], numbers)
    others = [slot for slot, master in zip(slots, masters, strict=True) if master is None]
    return [slot for slot in others if not _run_packed_kernel(slot, numbers)]


def make_master(slot: Slot) -> triton_adamw.MasterWeight | None:
    """The tensors of `triton_adamw.adamw_step`; None: another kernel's."""
    low = slot.state.get("master_low")
    if low is None:
        return None
    first, second = (read_local(slot.state[name]) for name in MOMENTS)
    master = triton_adamw.MasterWeight(slot.weight, read_local(low), slot.gradient, first, second)
    return master if master.can_run() else None


def _run_packed_kernel(slot: Slot, numbers: triton_adamw.AdamWStep) -> bool:
    if slot.weight.dtype == read_local(slot.state[MOMENTS[0]]).dtype == torch.float32:
        return False
    packed = make_packed(slot)
    if not triton_adamw_packed.can_run(*packed):
        return False
    triton_adamw_packed.packed_adamw_step(*packed, numbers)
    return True


def make_packed(slot: Slot) -> tuple[PackedWeight, Tensor, PackedState, PackedState]:
    """The arguments of `packed_adamw_step`."""
    low = slot.state.get("master_low")
    weight = PackedWeight(
        slot.weight,
        None if low is None else read_local(low),
        slot.make_key("weight"),
        find_offset(slot.parameter),
    )
    first, second = (_pack_state(slot, name) for name in MOMENTS)
    return weight, slot.gradient, first, second


def _pack_state(slot: Slot, name: str) -> PackedState:
    values, key = read_local(slot.state[name]), slot.make_key(name)
    if values.dtype != torch.uint8:
        return PackedState(values, key)
    scales = read_local(slot.state[f"{name}_scale"])
    device = values.device
    return PackedState(values, key, scales, make_code(name, device), find_edges(name, device))


def update_adamw(
    weights: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    group: dict[str, Any],
    step: int,
) -> None:
    """One AdamW step in place, on tensors of the same dtype."""
    rate, (beta1, beta2), eps = float(group["lr"]), group["betas"], group["eps"]
    decay = group["weight_decay"]
    if weights[0].is_cuda and all(x.is_contiguous() for x in (*weights, *first, *second)):
        steps = [torch.full((), float(step), device=weights[0].device)] * len(weights)
        torch._fused_adamw_(
            weights,
            gradients,
            first,
            second,
            [],
            steps,
            lr=rate,
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )
        return
    torch._foreach_mul_(weights, 1 - rate * decay)
    torch._foreach_lerp_(first, gradients, 1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
    roots = torch._foreach_sqrt(second)
    torch._foreach_div_(roots, (1 - beta2**step) ** 0.5)
    torch._foreach_add_(roots, eps)
    torch._foreach_addcdiv_(weights, first, roots, -rate / (1 - beta1**step))


def read_weights(slots: Sequence[Slot]) -> list[Tensor]:
    """The weights in float32: themselves, or copies of bfloat16 ones with their low bits.

    Copies are views of one flat tensor, so the bits of all weights are combined at once.
    """
    if slots[0].weight.dtype != torch.bfloat16:
        return [slot.weight for slot in slots]
    flat = torch.cat([slot.weight.reshape(-1) for slot in slots])
    lows = _read_lows(slots)
    flat = flat.float() if lows is None else join_master(flat, _concatenate(lows))
    return _split_like(flat, slots)


def write_weights(slots: Sequence[Slot], weights: Sequence[Tensor]) -> None:
    """Store what `read_weights` gave and an update changed."""
    if slots[0].weight.dtype != torch.bfloat16:
        return
    flat = _concatenate(weights)
    lows = _read_lows(slots)
    if lows is None:
        bits = _concatenate([slot.random_bits("weight") for slot in slots])
        rounded = round_stochastic(flat, bits)
    else:
        rounded, low_bits = split_master(flat)
        torch._foreach_copy_(lows, _split_like(low_bits, slots))
    torch._foreach_copy_([slot.weight for slot in slots], _split_like(rounded, slots))


def read_gradients(slots: Sequence[Slot], weights: Sequence[Tensor]) -> list[Tensor]:
    """Gradients in the dtype of the arithmetic."""
    gradients = [slot.gradient.contiguous() for slot in slots]
    if all(g.dtype == weights[0].dtype for g in gradients):
        return gradients
    elements = sum(g.numel() for g in gradients)
    flat = torch.empty(elements, dtype=weights[0].dtype, device=weights[0].device)
    wide = _split_like(flat, slots)
    torch._foreach_copy_(wide, gradients)
    return wide


def _read_lows(slots: Sequence[Slot]) -> list[Tensor] | None:
    """Low bits of master weights; None: weights are rounded stochastically."""
    if "master_low" not in slots[0].state:
        return None
    return [read_local(slot.state["master_low"]) for slot in slots]


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _split_like(flat: Tensor, slots: Sequence[Slot]) -> list[Tensor]:
    """Views of a flat tensor with the shapes of the local weights."""
    shapes = [slot.weight.shape for slot in slots]
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def write_states(slots: Sequence[Slot], name: str, values: Sequence[Tensor]) -> None:
    for slot, new in zip(slots, values, strict=True):
        is_rounded = slot.state[name].dtype == torch.bfloat16
        write_state(slot.state, name, new, slot.random_bits(name) if is_rounded else None)


def _split_chunks(slots: Iterable[Slot]) -> Iterator[list[Slot]]:
    """Slots of the same device, dtype and step, in chunks of at most CHUNK_ELEMENTS.

    Ranks must cut alike, since Muon gathers the matrices of a chunk together. So the largest shard of
    a parameter counts, not that of this rank.
    """
    kinds: dict[tuple[torch.device, torch.dtype, int], list[Slot]] = {}
    for slot in slots:
        key = (slot.weight.device, slot.weight.dtype, slot.step)
        kinds.setdefault(key, []).append(slot)
    for same in kinds.values():
        chunk: list[Slot] = []
        elements = 0
        for slot in same:
            size = count_largest_shard(slot.parameter)
            if chunk and elements + size > CHUNK_ELEMENTS:
                yield chunk
                chunk, elements = [], 0
            chunk.append(slot)
            elements += size
        yield chunk


def _check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ArgumentError(f"optimizer.{name}={value!r}", next=f"use one of {', '.join(allowed)}")


def _check_group(group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ArgumentError(
            f"optimizer.betas={group['betas']}", next="use numbers from 0 to below 1"
        )
    if not (group["eps"] >= 0 and group["weight_decay"] >= 0):
        raise ArgumentError(
            f"optimizer.epsilon={group['eps']}, weight_decay={group['weight_decay']}",
            next="use numbers of at least 0",
        )
    for parameter in group["params"]:
        if parameter.dtype not in (torch.float32, torch.float64, torch.bfloat16):
            raise ArgumentError(
                f"a parameter has dtype {parameter.dtype}",
                next="train float32 or bfloat16 weights",
            )
