"""Random programs for the fuser's tests: lines of ops over unusual inputs.

In: a seed. Out: a `RandomProgram`: its inputs, its text, and the eager and float64 value of each
line. Lines that torch can't run are dropped. A value is *exact* if everything it depends on is
equal in eager and float64. Comparisons, roundings and positions read only exact values, so that an
ulp never decides between two results.

Inputs have every dtype, sizes 0, 1 and primes, and are transposed, strided, expanded or at an
offset. They contain NaN, infinity, -0, denormals and the limits of integers.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

F = torch.nn.functional
SIZES = (0, 1, 1, 2, 3, 3, 5, 7, 8, 9, 16, 17, 31, 33)
MAX_ELEMENTS = 1200  # elements of an input
DTYPES = {
    **{
        "float32": 10,
        "float64": 3,
        "bfloat16": 3,
        "float16": 3,
        "int64": 4,
        "int32": 3,
        "int16": 1,
    },
    **{"int8": 2, "uint8": 2, "bool": 3, "complex64": 2, "float8_e4m3fn": 1, "float8_e5m2": 1},
}
LAYOUTS = ("plain", "plain", "plain", "transposed", "stepped", "expanded", "offset")

# x, y: values; d, e: dimensions; i: a small number; n: indices; b: bools. `!`: exact values only.
LINES = """
-{x} ; {x}.abs() ; {x}.sin() ; {x}.exp() ; torch.relu({x}) ; {x}.sigmoid() ; {x} * 2 ; {x} / 3 ; 1 - {x} ; {x} ** 3
!{x}.sign() ; {x}.clamp(-1, 1) ; {x}.isnan() ; !{x} > 0 ; !{x}.round() ; !{x}.floor() ; {x}.nan_to_num() ; {x} & 3
!{x} // 3 ; !{x} % -3 ; !torch.fmod({x}, -3) ; {x}.rsqrt() ; F.gelu({x}) ; F.silu({x}) ; {x}.nan_to_num().signbit() ; {x} >> 1
{x} + {y} ; {x} - {y} ; {x} * {y} ; {x} / {y} ; torch.maximum({x}, {y}) ; torch.fmax({x}, {y}) ; !{x} < {y} ; {x} ^ {y}
!torch.where({x} > {y}, {x}, {y}) ; torch.where({b}, {x}, {y}) ; torch.copysign({x}, {y}) ; !torch.remainder({x}, {y})
{x}.sum() ; {x}.sum({d}) ; {x}.sum(({d}, {e})) ; {x}.mean({d}) ; {x}.amax({d}) ; {x}.amin({d}, True) ; {x}.prod({d})
!{x}.any({d}) ; !{x}.argmax({d}) ; !{x}.argmin() ; {x}.var({d}, correction=0) ; {x}.softmax({d}) ; {x}.logsumexp({d})
!{x}.max({d})[1] ; {x}.cumsum({d}) ; {x}.cumprod({d}) ; !{x}.cummax({d})[1] ; {x} - {x}.mean({d}, True) ; {x}.std({d})
{x}.sum({d}).cumsum(0) ; {x}.cumsum({d}).sum({e}) ; {x}.amax({d}).sum(-1) ; ({x} - {x}.sum({d}, True)).amax({e})
{x}.sum() / {x} ; torch.stack([{x}, {x}], {d}).sum() - {x} ; ({x}.amax({d}, True) == {x}).sum({d})
{x}.transpose({d}, {e}) ; {x}.unsqueeze({d}) ; {x}.squeeze({d}) ; {x}.flatten()[::3] ; {x}[{i}:] ; {x}.select({d}, {i})
{x}.expand(3, *{x}.shape) ; {x}.diagonal({i}) ; {x}.unfold({d}, 2, 1) ; {x}.unfold({d}, 3, 2) ; {x}.reshape(-1, 3)
{x}.as_strided((3, {i}), (2, 1), 1) ; {x}.flip(({d}, {e})) ; {x}.roll(-2, {d}) ; {x}.roll(3) ; {x}.tril() ; {x}.T
F.pad({x}, (-1, 2), value=3) ; F.pad({x}, (1, 0, 0, 2)) ; torch.cat([{x}, {y}], {d}) ; {x}.repeat_interleave(2, {d})
torch.cat([{x}.sum({d}, keepdim=True), {x}], {d}) ; torch.cat([{x}.cumsum({d}), {x}.amax({d}, True)], {d})
{x}[{n}] ; {x}.index_select({d}, {n}) ; {x}.gather({d}, {n}.expand({x}.shape)) ; {x}.take({n}) ; {x}[{n}[:, None], {n}]
F.embedding({n}, {x}) ; {x}.flip(0)[{n}] ; {x}.gather({d}, torch.zeros_like({x}, dtype=torch.int64)) ; {x}.contiguous()
cast({x}, "float32") ; cast({x}, "float64") ; cast({x}, "float16") ; cast({x}, "bfloat16") ; cast({x}, "float8_e5m2")
!cast({x}, "int64") ; !cast({x}, "int8") ; !cast({x}, "uint8") ; !cast({x}, "bool") ; torch.full_like({x}, 3)
torch.arange({x}.numel()).reshape({x}.shape) * {x} ; {x}.new_ones({x}.shape) ; F.layer_norm({x}, {x}.shape[-1:])
"""
TEMPLATES = [part.strip() for part in LINES.replace("\n", " ; ").split(" ; ") if part.strip()]


@dataclass
class RandomProgram:
    """Inputs by name, lines `name = text`, outputs, and every value in eager and float64."""

    inputs: dict[str, torch.Tensor]
    lines: list[tuple[str, str]] = field(default_factory=list)
    discrete: set[str] = field(default_factory=set)  # lines that read exact values only
    outputs: list[str] = field(default_factory=list)
    eager: dict[str, torch.Tensor] = field(default_factory=dict)
    wide: dict[str, torch.Tensor] = field(default_factory=dict)
    exact: dict[str, bool] = field(default_factory=dict)
    coarsest: dict[str, torch.dtype] = field(
        default_factory=dict
    )  # the float dtype with the fewest digits on the way

    def __str__(self) -> str:
        notes = [f"# {n}: {t.dtype} {tuple(t.shape)} {t.stride()}" for n, t in self.inputs.items()]
        body = [f"    {name} = {text}" for name, text in self.lines]
        head = f"def program({', '.join(self.inputs)}):"
        return "\n".join([*notes, head, *body, f"    return ({', '.join(self.outputs)},)"])

    def function(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        scope: dict[str, Any] = {"torch": torch, "F": F, "cast": cast}
        exec(str(self), scope)
        return scope["program"]  # type: ignore[no-any-return]


def cast(x: torch.Tensor, name: str) -> torch.Tensor:
    return x.to(getattr(torch, name))


def cast_in_float64(x: torch.Tensor, name: str) -> torch.Tensor:
    """The cast in the float64 run, which does not round floats."""
    target: torch.dtype = getattr(torch, name)
    return x.to(torch.float64 if target.is_floating_point else target)


def to_float64(x: torch.Tensor) -> torch.Tensor:
    if x.is_complex():
        return x.to(torch.complex128)
    return x.double() if x.is_floating_point() else x


def as_real(x: torch.Tensor) -> torch.Tensor:
    """Views complex as real. If one part is NaN, both are: torch multiplies by 1 + 0j on the way."""
    if not x.is_complex():
        return x
    nan = complex(math.nan, math.nan)
    return torch.view_as_real(x.resolve_conj().masked_fill(x.isnan(), nan))


def coarsest_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Returns the float dtype with the fewest digits; float64 if there is none."""
    floats = [d.to_real() if d.is_complex else d for d in dtypes]
    floats = [d for d in floats if d.is_floating_point]
    return max(floats, key=lambda d: torch.finfo(d).eps, default=torch.float64)


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all values are equal; NaN equals NaN."""
    a, b = as_real(to_float64(a)), as_real(to_float64(b))
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def evaluate(text: str, known: dict[str, torch.Tensor], wide: bool) -> Any:
    scope = {"torch": torch, "F": F, "cast": cast_in_float64 if wide else cast, **known}
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if wide else usual)
    try:
        return eval(text, scope)
    finally:
        torch.set_default_dtype(usual)


def draw_numbers(rng: random.Random, dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Draws multiples of 1/4 or normal numbers, with special values among them."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.randint(-16, 17, (count,), generator=generator)
    hit = torch.rand(count, generator=generator) < 0.15
    if dtype == torch.bool:
        return small > 0
    if dtype.is_complex:
        return torch.complex(small / 4, small.flip(0) / 4).to(dtype)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        whole = (small.abs() if info.min == 0 else small).to(dtype)
        end = rng.choice((info.min, info.max))
        return whole.masked_fill(hit, end) if rng.random() < 0.2 else whole
    data = small.double() / 4
    kind = rng.choice(("quarters", "quarters", "normal", "odd"))
    if kind == "normal":
        data = torch.randn(count, generator=generator, dtype=torch.float64)
    elif kind == "odd":
        tiny = torch.finfo(dtype).tiny
        odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0, tiny, tiny / 4]).double()
        odd = odd[[0, 3, 4]] if dtype == torch.float8_e4m3fn else odd
        data = torch.where(hit, odd[small % len(odd)], data)
    return data.to(dtype)


def make_input(rng: random.Random, seed: int) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, rng.choices(list(DTYPES), list(DTYPES.values()))[0])
    shape = [math.inf]
    while math.prod(shape) > MAX_ELEMENTS:
        shape = [rng.choice(SIZES) for _ in range(rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 4)))]
    layout = rng.choice(LAYOUTS) if shape else "plain"
    storage_shape = list(shape)
    if layout == "transposed":
        storage_shape = storage_shape[::-1]
    elif layout == "stepped":
        storage_shape[-1] *= 2
    elif layout == "expanded":
        storage_shape[0] = 1
    offset = 3 if layout == "offset" else 0
    data = draw_numbers(rng, dtype, math.prod(storage_shape) + offset, seed)[offset:].view(
        storage_shape
    )
    if layout == "transposed":
        return data.permute(*range(len(shape))[::-1])
    if layout == "stepped":
        return data[..., ::2]
    return data.expand(shape)


def draw_line(rng: random.Random, program: RandomProgram) -> tuple[str, bool]:
    """Draws a line over existing values. Returns also whether it may only read exact ones."""
    known = program.eager
    pool = [name for name in known if name[0] in "at"]
    x = pool[-1] if rng.random() < 0.5 else rng.choice(pool)
    rank = max(known[x].dim(), 1)
    index_names = [n for n, t in known.items() if t.dtype == torch.int64 and t.dim() <= 2]
    template = rng.choice(TEMPLATES)
    text = template.lstrip("!").format(
        x=x,
        y=rng.choice(pool),
        d=rng.randrange(-rank, rank),
        e=rng.randrange(-rank, rank),
        i=rng.randrange(4),
        n=rng.choice(index_names),
        b=rng.choice([n for n, t in known.items() if t.dtype == torch.bool]),
    )
    return text, template.startswith("!")


def try_line(program: RandomProgram, text: str, discrete: bool) -> None:
    """Adds a line if torch can run it and float64 makes the same discrete decisions."""
    used = [name for name in program.eager if re.search(rf"\b{name}\b", text)]
    exact = all(program.exact[name] for name in used)
    if discrete and not exact:
        return
    try:
        value = evaluate(text, program.eager, wide=False)
        wide = evaluate(text, program.wide, wide=True)
    except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
        return
    if value.numel() > 3000 or value.shape != wide.shape:
        return
    floating = value.is_floating_point() or value.is_complex()
    if not floating and not is_same(value, wide):
        return
    # float64 is its own reference: a value counts as exact only if float32 can hold it.
    as_float32 = value.float() if value.dtype == torch.float64 else value
    name = f"t{len(program.lines)}"
    program.lines.append((name, text))
    program.discrete |= {name} if discrete else set()
    program.eager[name], program.wide[name] = value, wide
    program.coarsest[name] = coarsest_dtype(value.dtype, *(program.coarsest[n] for n in used))
    program.exact[name] = not floating or (
        exact and is_same(value, wide) and is_same(as_float32, value)
    )


def start_program(inputs: dict[str, torch.Tensor]) -> RandomProgram:
    """Creates a program without lines."""
    wide = {name: to_float64(value) for name, value in inputs.items()}
    coarsest = {name: coarsest_dtype(value.dtype) for name, value in inputs.items()}
    exact = dict.fromkeys(inputs, True)
    return RandomProgram(inputs, eager=dict(inputs), wide=wide, exact=exact, coarsest=coarsest)


def move_program(
    program: RandomProgram, move: Callable[[torch.Tensor], torch.Tensor]
) -> RandomProgram | None:
    """Moves a program to another device; None if integers differ there, which may be indices."""
    other = start_program({name: move(value) for name, value in program.inputs.items()})
    for name, text in program.lines:
        try_line(other, text, name in program.discrete)
        if name not in other.eager:
            return None
        value = program.eager[name]
        whole = not (value.is_floating_point() or value.is_complex())
        if whole and not is_same(other.eager[name].cpu(), value):
            return None
    other.outputs = program.outputs
    return other


def draw_program(seed: int) -> RandomProgram:
    rng = random.Random(seed)
    inputs = {f"a{k}": make_input(rng, seed + k) for k in range(rng.choice((1, 2, 2, 3)))}
    generator = torch.Generator().manual_seed(seed)
    inputs["n0"] = torch.randint(0, 2, (rng.choice((1, 2, 3, 5)),), generator=generator)
    inputs["b0"] = torch.rand(rng.choice(((), (1,), (3,))), generator=generator) < 0.5
    program = start_program(inputs)
    wanted = rng.choice((2, 4, 6, 9))
    for _ in range(300):
        if len(program.lines) == wanted:
            break
        try_line(program, *draw_line(rng, program))
    names = [name for name, _ in program.lines]
    chosen = set(rng.sample(names, min(len(names), rng.choice((1, 2, 3)))))
    program.outputs = [name for name in names if name in chosen or name == names[-1]]
    return program
