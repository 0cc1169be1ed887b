"""All models of the suite `zoo`, and how each is built.

In: a pattern and a shard. Out: `ZooModel` values; `build_case` makes one ready to run.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.bench.zoo import inputs, timm_models, torchvision_models, transformers_models
from fulgurite.bench.zoo.build import (
    Case,
    disable_dropout,
    disable_sampling,
    model_loss,
    move,
    seed_everything,
    sum_of_means,
)
from fulgurite.bench.zoo.sizes import SIZES, Sizes
from fulgurite.errors import ArgumentError

Mode = Literal["inference", "training"]
MODES: tuple[Mode, ...] = ("inference", "training")
PACKAGES = ("transformers", "timm", "torchvision")


@dataclass(frozen=True)
class ZooModel:
    """One model: `family` is a task of transformers, or a module of the other two packages."""

    package: str
    family: str
    name: str

    def __str__(self) -> str:
        return f"{self.package}/{self.name}"


MODELS: tuple[ZooModel, ...] = (
    *(
        ZooModel("transformers", task, name)
        for task, names in transformers_models.TASKS.items()
        for name in names
    ),
    *(ZooModel("timm", family, model.name) for family, model in timm_models.FAMILIES.items()),
    *(
        ZooModel("torchvision", family, name)
        for name, (family, _) in torchvision_models.MODELS.items()
    ),
)
QUICK = ("transformers/LlamaForCausalLM", "transformers/BertForMaskedLM", "timm/test_resnet")


def select(only: str | None, shard: str | None, quick: bool) -> list[ZooModel]:
    """The models whose `package/name` or family contains the pattern, of one shard `i/n`."""
    chosen = [model for model in MODELS if not quick or str(model) in QUICK]
    if only:
        pattern = re.compile(only, re.IGNORECASE)
        chosen = [one for one in chosen if pattern.search(str(one)) or pattern.search(one.family)]
    if shard:
        match = re.fullmatch(r"(\d+)/(\d+)", shard)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise ArgumentError(f"--shard {shard}", next="give i/n with i from 1 to n, as 1/4")
        chosen = chosen[int(match[1]) - 1 :: int(match[2])]
    if not chosen:
        raise ArgumentError(f"no model matches {only!r}", next="try --only Llama, timm or speech")
    return chosen


def missing_packages(models: list[ZooModel]) -> dict[str, str]:
    """Why packages of the models can't be imported; empty if all can."""
    found = {}
    for package in dict.fromkeys(model.package for model in models):
        try:
            import_package(package)
        except (ImportError, RuntimeError) as problem:  # RuntimeError: built for another torch
            found[package] = f"{problem}; pip install 'fulgurite[zoo]'"
    return found


def import_package(package: str) -> Any:
    """Import a package. timm and transformers import torchvision, timm always."""
    if importlib.util.find_spec("torchvision") or package != "transformers":
        torchvision_models.import_torchvision()
    return importlib.import_module(package)


def build_case(
    model: ZooModel, mode: Mode, device: str, dtype: torch.dtype, sizes: Sizes = SIZES["small"]
) -> Case:
    """The model with random weights, the same ones each time, in the mode."""
    import_package(model.package)
    seed_everything()
    training = mode == "training"
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    loss = model_loss
    # large models are initialized where they run: on a CPU a billion numbers take seconds
    with torch.device(device if sizes.name == "default" else "cpu"):
        if model.package == "transformers":
            module = transformers_models.build(model.name, sizes)
            kwargs = inputs.make_inputs(module, sizes)
            kwargs |= inputs.make_labels(module, sizes) if training else {}
        elif model.package == "timm":
            module, images = timm_models.build(model.name, sizes)
            args, loss = (images,), _classification_loss
        else:
            module, args = torchvision_models.build(model.name, training, sizes)
            loss = sum_of_means
    disable_dropout(module)
    module.train(training).to(device, dtype)
    disable_sampling(module)
    return Case(module, move(args, device, dtype), move(kwargs, device, dtype), loss)


def _classification_loss(result: Any) -> Tensor:
    """Cross entropy with class 0; models that return features or several heads: the mean."""
    if isinstance(result, Tensor) and result.ndim == 2:
        target = torch.zeros(len(result), dtype=torch.int64, device=result.device)
        return F.cross_entropy(result, target)
    return sum_of_means(result)
