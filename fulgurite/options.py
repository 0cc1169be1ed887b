"""The options of one compilation, checked once.

In: the keyword arguments of `compile`. Out: a frozen `Options`, or an ArgumentError that says what is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fulgurite.config import environment
from fulgurite.errors import ArgumentError
from fulgurite.executors import Executor, resolve_executors
from fulgurite.executors.tune import Tune
from fulgurite.transforms import Phase, Transform, as_transform
from fulgurite.transforms.remat import REMAT, Remat

TUNE: dict[str, Tune] = {"0": False, "1": True, "auto": "auto"}  # by what FULGURITE_TUNE says
Regions = Literal["auto", "blocks", "whole"]
DEFAULT_EXECUTORS = ("fuser", "torch")


@dataclass(frozen=True)
class Options:
    executors: tuple[Executor, ...]
    transforms: tuple[Transform, ...]
    dynamic: bool | None
    fullgraph: bool
    remat: Remat
    regions: Regions
    tune: Tune
    cudagraph: bool = False

    def transforms_in(self, phase: Phase) -> list[Transform]:
        return [transform for transform in self.transforms if transform.phase == phase]

    def __str__(self) -> str:
        executors = ", ".join(executor.name for executor in self.executors)
        return f"executors {executors} · remat {self.remat} · regions {self.regions}"


def make_options(
    *,
    executors: Sequence[Executor | str] | Executor | str | None = None,
    transforms: Sequence[Any] = (),
    dynamic: bool | None = None,
    fullgraph: bool = False,
    remat: Remat = "mincut",
    regions: Regions = "auto",
    tune: Tune | None = None,
    cudagraph: bool = False,
) -> Options:
    """Options from what the user wrote."""
    _one_of("remat", remat, REMAT)
    _one_of("regions", regions, get_args(Regions))
    _one_of("dynamic", dynamic, (None, True, False))
    _one_of("fullgraph", fullgraph, (True, False))
    tune = _tune_setting() if tune is None else tune
    _one_of("tune", tune, ("auto", True, False))
    _one_of("cudagraph", cudagraph, (True, False))
    if cudagraph and regions == "blocks":
        raise ArgumentError(
            "cudagraph=True records everything as one graph and regions='blocks' makes one a layer",
            next="drop one of the two",
        )
    if fullgraph and regions == "blocks":
        raise ArgumentError(
            "fullgraph=True asks for one graph and regions='blocks' for one a layer",
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
        regions="whole" if cudagraph else regions,
        tune=tune,
        cudagraph=cudagraph,
    )


def _tune_setting() -> Tune:
    asked = environment("FULGURITE_TUNE") or "auto"
    _one_of("FULGURITE_TUNE", asked, tuple(TUNE))
    return TUNE[asked]


def _one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if not any(value is choice or (type(value) is str and value == choice) for choice in allowed):
        choices = ", ".join(map(repr, allowed))
        raise ArgumentError(f"{name}={value!r} is not allowed", next=f"one of {choices}")
