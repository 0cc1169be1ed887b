"""Pooling: hidden states of sequences in, one vector a sequence out, as sentence-transformers does.

    modules.json          the modules after the transformer, in order
    1_Pooling             which hidden states become the vector: cls, last token, mean, max, ...
    2_Dense               activation(weight x + bias)
    2_Normalize           x / |x|

A folder without modules.json has no such modules; the caller's default pooling applies. A module of
another kind is refused by name. Everything is computed in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from fulgurite.errors import WeightsError
from fulgurite.models.config import ConfigFields

PostProcess = Callable[[Tensor], Tensor]
Json = TypeVar("Json")


def _weighted_mean(x_TD: Tensor) -> Tensor:
    """Later tokens count more: token i has the weight i + 1."""
    weights_T1 = torch.arange(1, len(x_TD) + 1, device=x_TD.device)[:, None].float()
    return (x_TD * weights_T1).sum(0) / weights_T1.sum()


# name -> function of the hidden states of one sequence, [T, D] -> [D]
POOLING_MODES: dict[str, Callable[[Tensor], Tensor]] = {
    "cls": lambda x_TD: x_TD[0],
    "max": lambda x_TD: x_TD.amax(0),
    "mean": lambda x_TD: x_TD.mean(0),
    "mean_sqrt_len_tokens": lambda x_TD: x_TD.sum(0) / len(x_TD) ** 0.5,
    "weightedmean": _weighted_mean,
    "lasttoken": lambda x_TD: x_TD[-1],
}
# fields of 1_Pooling/config.json that turn a mode on, in the order in which results are concatenated
MODE_FIELDS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS: dict[str, PostProcess] = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": torch.tanh,
}


def normalize(x_SD: Tensor) -> Tensor:
    return F.normalize(x_SD, dim=-1)


@dataclass(frozen=True)
class Pooling:
    """Turns hidden states into embeddings. The results of several modes are concatenated."""

    modes: tuple[str, ...]
    post_processing: tuple[PostProcess, ...] = ()

    def __call__(self, hidden_TD: Tensor, lengths: Sequence[int]) -> Tensor:
        """The embedding of each sequence, [S, D] in float32."""
        sequences = hidden_TD.float().split(list(lengths))
        x_SD = torch.stack(
            [torch.cat([POOLING_MODES[mode](x_TD) for mode in self.modes]) for x_TD in sequences]
        )
        for process in self.post_processing:
            x_SD = process(x_SD)
        return x_SD


def read_pooling(folder: Path, default: str, device: torch.device) -> Pooling:
    """The pooling of a folder. `default` is the mode where it has none."""
    file = folder / "modules.json"
    if not file.is_file():
        return Pooling((default,))
    modes: tuple[str, ...] = ()
    post_processing: list[PostProcess] = []
    for entry in _read_json(file, list):
        if not isinstance(entry, dict):
            raise WeightsError(f"an entry is {entry!r}, not an object", where=str(file))
        module = ConfigFields(entry, str(file))
        kind, path = module.get_str("type").rpartition(".")[2], folder / module.get_str("path", "")
        if kind == "Pooling":
            modes = _read_modes(path / "config.json")
        elif kind == "Dense":
            post_processing.append(_read_dense(path, device))
        elif kind == "Normalize":
            post_processing.append(normalize)
        elif kind != "Transformer":
            raise WeightsError(
                f"the module {module.get_str('type')} is not supported",
                where=str(file),
                next="supported: Transformer, Pooling, Dense, Normalize",
            )
    return Pooling(modes or (default,), tuple(post_processing))


def read_max_tokens(folder: Path) -> int | None:
    """The most tokens of a text that sentence-transformers reads; None: the model's maximum."""
    file = folder / "sentence_bert_config.json"
    if not file.is_file():
        return None
    fields = ConfigFields(_read_json(file, dict), str(file))
    return fields.get_optional_positive_int("max_seq_length")


def _read_modes(file: Path) -> tuple[str, ...]:
    fields = ConfigFields(_read_json(file, dict), str(file))
    if "pooling_mode" in fields:
        named = fields.values["pooling_mode"]
        modes = tuple(map(str, named)) if isinstance(named, list) else (str(named),)
    else:
        modes = tuple(mode for name, mode in MODE_FIELDS.items() if fields.get_bool(name, False))
    unknown = [mode for mode in modes if mode not in POOLING_MODES]
    if unknown or not modes:
        raise fields.error(
            f"pooling_mode {unknown[0]!r} is not supported; supported: {', '.join(POOLING_MODES)}"
            if unknown
            else "no pooling mode is on"
        )
    return modes


def _read_dense(folder: Path, device: torch.device) -> PostProcess:
    """activation(weight x + bias)."""
    fields = ConfigFields(_read_json(folder / "config.json", dict), str(folder / "config.json"))
    name = fields.get_str("activation_function", "torch.nn.modules.activation.Tanh")
    if name not in ACTIVATIONS:
        raise fields.error(
            f"activation_function {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    file = folder / "model.safetensors"
    if not file.is_file():
        raise WeightsError("this module has no model.safetensors", where=str(folder))
    tensors = {key: tensor.float().to(device) for key, tensor in load_file(file).items()}
    weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
    expected = (fields.get_positive_int("out_features"), fields.get_positive_int("in_features"))
    if weight is None or weight.shape != expected:
        raise WeightsError(f"linear.weight must be {list(expected)}", where=str(file))
    if (bias is None) == fields.get_bool("bias", True):
        raise fields.error("`bias` does not say what model.safetensors has")
    activation = ACTIVATIONS[name]
    return lambda x_SD: activation(F.linear(x_SD, weight, bias))


def _read_json(file: Path, kind: type[Json]) -> Json:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot read {file.name}: {error}", where=str(file)) from error
    if not isinstance(values, kind):
        raise WeightsError(f"{file.name} must hold a {kind.__name__}", where=str(file))
    return values
