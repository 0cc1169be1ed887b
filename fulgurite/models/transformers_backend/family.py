"""A checkpoint's `ModelFamily` made of transformers' modules, and its weights.

In: a folder whose architecture is not in families/registry.py. Out: a family whose `build` makes a
`TransformersModel` on the meta device, and `load_transformers_model`, which loads one.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fulgurite.errors import WeightsError
from fulgurite.models.config import ConfigFields, ModelConfig
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.transformers_backend.attention import IMPLEMENTATION, attend
from fulgurite.models.transformers_backend.check import check_model
from fulgurite.models.transformers_backend.config import (
    convert_config,
    find_auto_class,
    import_transformers,
    read_transformers_config,
    refuse,
)
from fulgurite.models.transformers_backend.model import TransformersModel
from fulgurite.models.transformers_backend.probe import (
    PROBE,
    PROBE_FUNCTIONS,
    AttentionProbe,
    UnsupportedAttention,
    probe_attention,
    run_experts_on_meta,
)


@dataclass(frozen=True, eq=False)
class TransformersFamily(ModelFamily):
    """A family whose modules and weights are transformers'.

    architecture          its name in config.json
    transformers_config   transformers' configuration object
    where                 the config.json it comes from
    """

    architecture: str = ""
    transformers_config: Any = None
    where: str = ""


def make_transformers_family(fields: ConfigFields, path: Path) -> TransformersFamily:
    """The family of a checkpoint; WeightsError with the reason if transformers can't run it."""
    folder = path.parent if path.is_file() else path
    architecture, config = read_transformers_config(fields, folder)
    register_functions()
    return TransformersFamily(
        name=f"transformers {architecture}",
        read_config=lambda fields: convert_config(architecture, config, fields),
        build=lambda model_config: build_on_meta(model_config, architecture, config, fields.where),
        weights=(),
        architecture=architecture,
        transformers_config=config,
        where=fields.where,
    )


@functools.cache
def register_functions() -> None:
    """Add our functions to transformers' interfaces."""
    transformers = import_transformers("the attention interface is transformers'", "")
    transformers.AttentionInterface.register(IMPLEMENTATION, attend)
    transformers.AttentionInterface.register(PROBE, PROBE_FUNCTIONS.attend)
    transformers.AttentionMaskInterface.register(PROBE, PROBE_FUNCTIONS.make_mask)
    moe = importlib.import_module("transformers.integrations.moe")
    moe.ExpertsInterface.register(PROBE, run_experts_on_meta)


def build_on_meta(
    config: ModelConfig, architecture: str, transformers_config: Any, where: str
) -> TransformersModel:
    """The modules on the meta device, with the specs that a probe reads from them."""
    auto_class = find_auto_class(transformers_config, where)
    try:
        with torch.device("meta"):
            module = auto_class.from_config(
                copy.deepcopy(transformers_config),  # a module changes its config
                dtype=torch.get_default_dtype(),
                attn_implementation=PROBE,
            ).eval()
    except Exception as error:  # whatever foreign code raises is a reason not to run it
        reason = (
            f"its modules can't be built with another attention: {type(error).__name__}: {error}"
        )
        raise refuse(architecture, reason, where) from error
    if module._can_set_experts_implementation():
        module.set_experts_implementation(PROBE)
    probe = probe_module(module, config, architecture, where)
    module.set_attn_implementation(IMPLEMENTATION)
    drop_other_towers(module)
    names = {id(child): name for name, child in module.named_modules()}
    layers = [names[id(attention)] for attention in probe.modules]
    return TransformersModel(config, module, layers, probe.specs)


def probe_module(module: Any, config: ModelConfig, architecture: str, where: str) -> AttentionProbe:
    try:
        return probe_attention(module.get_decoder(), len(config.layers), config.max_positions)
    except UnsupportedAttention as error:
        raise refuse(architecture, str(error), where) from error


def load_transformers_model(
    family: ModelFamily,
    config: ModelConfig,
    path: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    state_dict: dict[str, Any],
    finish: Callable[[nn.Module], None],
) -> TransformersModel:
    """Load weights into transformers' modules and check them; see check.py.

    state_dict   the weights by their names in the checkpoint, read by `tensor[...]`
    finish       called with the loaded module, before it moves to the device
    """
    assert isinstance(family, TransformersFamily), f"{family.name} is not made of transformers"
    where, architecture = family.where, family.architecture
    layout = build_on_meta(config, architecture, family.transformers_config, where)
    transformers = import_transformers("the modules are transformers'", where)
    with hide_progress_bars(transformers):
        module, report = type(layout.module).from_pretrained(
            None,
            state_dict=state_dict,
            config=copy.deepcopy(family.transformers_config),
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            output_loading_info=True,
        )
    problems = {kind: report[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched")}
    if any(problems.values()):
        what = ", ".join(f"{len(names)} {kind}" for kind, names in problems.items() if names)
        lists = {kind: "\n".join(map(str, sorted(names))) for kind, names in problems.items()}
        raise WeightsError(
            f"the checkpoint does not match transformers' {architecture}: {what}",
            where=str(path),
            **lists,
            next="check that config.json belongs to these weights",
        )
    finish(module)
    model = TransformersModel(
        config, module.to(device).eval(), layout.attention_layers, layout.attention_specs
    )
    difference = check_model(model)
    if difference is not None:
        raise refuse(architecture, difference, where)
    drop_other_towers(module)
    return model


def drop_other_towers(module: Any) -> None:
    """Remove what only images and sound need: modules beside the text decoder.

    Afterwards the decoder and the head run, and not the module's whole forward.
    """
    decoder, base = module.get_decoder(), module.base_model
    if decoder is base:
        return
    for name, child in list(base.named_children()):
        if all(part is not decoder for part in child.modules()):
            base._modules[name] = None


@contextmanager
def hide_progress_bars(transformers: Any) -> Iterator[None]:
    """Loading has a progress bar of ours."""
    logging = transformers.utils.logging
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
