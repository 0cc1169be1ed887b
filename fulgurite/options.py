"""The options of `fulgurite.compile`.

In: the keyword arguments of `compile`. Out: a frozen `Options`, or an `ArgumentError` that lists what is
allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fulgurite.config import read_env
from fulgurite.cudagraph import CUDAGRAPH_MODES, CudaGraphMode
from fulgurite.errors import ArgumentError
from fulgurite.executors import Executor, resolve_executors
from fulgurite.executors.autotune import Autotune
from fulgurite.transforms import Phase, Transform, as_transform
from fulgurite.transforms.remat import REMAT_POLICIES, Remat

# values of FULGURITE_AUTOTUNE
AUTOTUNE_VALUES: dict[str, Autotune] = {"0": False, "1": True, "auto": "auto"}
Granularity = Literal["auto", "blocks", "model"]
DEFAULT_EXECUTORS = ("fuser", "torch")


@dataclass(frozen=True)
class Options:
    """Checked options; see `fulgurite.compile` for their meaning."""

    executors: tuple[Executor, ...]
    transforms: tuple[Transform, ...]
    dynamic: bool | None
    fullgraph: bool
    remat: Remat
    granularity: Granularity
    autotune: Autotune
    cudagraph: CudaGraphMode = "auto"

    def transforms_in(self, phase: Phase) -> list[Transform]:
        return [transform for transform in self.transforms if transform.phase == phase]

    def __str__(self) -> str:
        executors = ", ".join(executor.name for executor in self.executors)
        return f"executors {executors} · remat {self.remat} · granularity {self.granularity}"


def make_options(
    *,
    executors: Sequence[Executor | str] | Executor | str | None = None,
    transforms: Sequence[Any] = (),
    dynamic: bool | None = None,
    fullgraph: bool = False,
    remat: Remat = "mincut",
    granularity: Granularity = "auto",
    autotune: Autotune | None = None,
    cudagraph: CudaGraphMode = "auto",
) -> Options:
    """Check the user's arguments and fill in defaults."""
    _check_choice("remat", remat, REMAT_POLICIES)
    _check_choice("granularity", granularity, get_args(Granularity))
    _check_choice("dynamic", dynamic, (None, True, False))
    _check_choice("fullgraph", fullgraph, (True, False))
    autotune = _default_autotune() if autotune is None else autotune
    _check_choice("autotune", autotune, ("auto", True, False))
    _check_choice("cudagraph", cudagraph, CUDAGRAPH_MODES)
    if fullgraph and granularity == "blocks":
        raise ArgumentError(
            "fullgraph=True asks for one graph, and granularity='blocks' for one per layer",
            next="drop one of the two",
        )
    if isinstance(transforms, (str, Transform)) or not isinstance(transforms, Sequence):
        raise ArgumentError("transforms is not a list", next="a list: transforms=[my_transform]")
    chosen = [executors] if isinstance(executors, (str, Executor)) else executors
    return Options(
        executors=tuple(resolve_executors(DEFAULT_EXECUTORS if chosen is None else chosen)),
        transforms=tuple(as_transform(entry) for entry in transforms),
        dynamic=dynamic,
        fullgraph=fullgraph,
        remat=remat,
        granularity=granularity,
        autotune=autotune,
        cudagraph=cudagraph,
    )


def _default_autotune() -> Autotune:
    asked = read_env("FULGURITE_AUTOTUNE") or "auto"
    _check_choice("FULGURITE_AUTOTUNE", asked, tuple(AUTOTUNE_VALUES))
    return AUTOTUNE_VALUES[asked]


def _check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if not any(value is choice or (type(value) is str and value == choice) for choice in allowed):
        choices = ", ".join(map(repr, allowed))
        raise ArgumentError(f"{name}={value!r} is not allowed", next=f"one of {choices}")
