"""The types that describe a model family."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from torch import nn

from fulgurite.models.config import ConfigFields, ModelConfig
from fulgurite.models.families.expert_names import select_experts
from fulgurite.models.weight_mapping import WeightMapping


@dataclass(frozen=True)
class GGUFMapping:
    """How GGUF files store a family.

    read_config_fields   GGUF metadata -> the fields of a config.json
    weights              tensor names -> parameters
    ignored              patterns of tensor names that are not needed
    alternatives         several ways to store the same weights; a file uses one of them
    """

    read_config_fields: Callable[[ConfigFields], dict[str, object]]
    weights: tuple[WeightMapping, ...]
    ignored: tuple[str, ...] = ()
    alternatives: tuple[tuple[WeightMapping, ...], ...] = ()

    def select_mappings(self, names: Collection[str]) -> tuple[WeightMapping, ...]:
        """The mappings for a file that holds tensors of these names."""
        for mappings in self.alternatives:
            if any(mapping.source.replace("{layer}", "0") in names for mapping in mappings):
                return self.weights + mappings
        return self.weights + (self.alternatives[0] if self.alternatives else ())


@dataclass(frozen=True, eq=False)
class ModelFamily:
    """One family of models.

    read_config      config.json fields -> ModelConfig
    build            ModelConfig -> modules
    weights          safetensors names -> parameters
    ignored          patterns of tensor names that are known and not needed
    gguf             the same for GGUF files, if supported
    sharding_rules   module name pattern -> parallel style; see `fulgurite.parallel.tensor`
    named_experts    experts under names of their own, for families that stack experts: what
                     `fulgurite quantize` writes; gate before up
    """

    name: str
    read_config: Callable[[ConfigFields], ModelConfig]
    build: Callable[[ModelConfig], nn.Module]
    weights: tuple[WeightMapping, ...]
    ignored: tuple[str, ...] = ()
    gguf: GGUFMapping | None = None
    sharding_rules: Mapping[str, str] = field(default_factory=dict)
    named_experts: tuple[WeightMapping, ...] = ()

    def select_weights(self, names: Collection[str]) -> tuple[WeightMapping, ...]:
        """The mappings for a checkpoint that holds tensors of these names."""
        return select_experts(self.weights, names)
