"""Models of suite `models` on a GPU: what to build, and inputs.

In: whether to keep it small. Out: a module whose forward returns a loss, and its inputs, in bfloat16 on the device.
Weights are random; sizes are those of models that people train.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fulgurite.models.config import ConfigFields
from fulgurite.models.families.registry import find_family
from fulgurite.models.tiny import Transformer

Workload = tuple[nn.Module, tuple[Any, ...]]


def llama_1b(quick: bool) -> Workload:
    """16 layers, width 2048, the vocabulary of Llama 3; batch 4, sequence length 2048."""
    layers, vocabulary, length = (2, 8192, 512) if quick else (16, 128256, 2048)
    model = CausalLM(layers, 2048, num_heads=32, intermediate_size=8192, vocab_size=vocabulary)
    return model, (torch.randint(0, vocabulary, (4, length)),)


def deepseek_block(quick: bool) -> Workload:
    """Two layers of DeepSeek-V3's attention and router over 8 of its experts; batch 2 x 1024."""
    fields = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 4096,
        "hidden_size": 1024 if quick else 7168,
        "intermediate_size": 2048 if quick else 18432,
        "moe_intermediate_size": 512 if quick else 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 16 if quick else 128,
        "num_key_value_heads": 16 if quick else 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    read = ConfigFields(fields, "the DeepSeek-V3-shaped block")
    family = find_family(read)
    model = initialize_weights(family.build(family.read_config(read)))
    length = 128 if quick else 1024
    return NextTokenLoss(model), (torch.randint(0, 4096, (2, length)),)


def initialize_weights(model: nn.Module) -> nn.Module:
    """Random matrices, norm weights of one, biases of zero. (Models of `models/` are built uninitialized.)"""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
            else:
                parameter.fill_(1.0 if "norm" in name else 0.0)
    return model


def resnet50(quick: bool) -> Workload:
    """ResNet-50 in shape, channels-last; batch 64 of 224 x 224."""
    batch, size = (4, 64) if quick else (64, 224)
    images = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (batch,))
    return ResNet((3, 4, 6, 3)).to(memory_format=torch.channels_last), (images, labels)


WORKLOADS: dict[str, Callable[[bool], Workload]] = {
    "llama_1b": llama_1b,
    "resnet50": resnet50,
    "deepseek_block": deepseek_block,
}


def make_workload(workload: str, device: str, quick: bool) -> Workload:
    """Build the workload with seeded random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        model, inputs = WORKLOADS[workload](quick)
    model = model.to(device, torch.bfloat16)  # buffers that were computed on the CPU, too
    return model, tuple(x.bfloat16() if x.is_floating_point() else x for x in inputs)


class Backbone(Transformer):
    """The transformer without its head: returns the last hidden states."""

    def __init__(self, *sizes: int, **more: int) -> None:
        super().__init__(*sizes, **more)
        del self.lm_head

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed_tokens(tokens_BT)
        cos, sin = self.compute_cos_sin(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class CausalLM(nn.Module):
    """A causal LM as most are written: a backbone, a head and a loss."""

    def __init__(self, num_layers: int, hidden_size: int, *, vocab_size: int, **more: int) -> None:
        super().__init__()
        self.model = Backbone(num_layers, hidden_size, vocab_size=vocab_size, **more)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits = self.lm_head(self.model(tokens_BT))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())


class NextTokenLoss(nn.Module):
    """Next-token cross entropy of a model that returns logits; sequences start at position 0."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor) -> Tensor:
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        logits = self.model(tokens_BT, positions_T.expand_as(tokens_BT))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens_BT[:, 1:].flatten())


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a residual connection."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(width_in, width, 1, bias=False)
        self.mix = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.expand = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in (width, width, 4 * width))
        changes = stride > 1 or width_in != 4 * width
        self.shortcut = (
            nn.Sequential(
                nn.Conv2d(width_in, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )
            if changes
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.reduce(x)))
        y = F.relu(self.norms[1](self.mix(y)))
        return F.relu(self.norms[2](self.expand(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, depths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64)
        blocks: list[nn.Module] = []
        width_in = 64
        for stage, depth in enumerate(depths):
            width = 64 << stage
            for position in range(depth):
                stride = 2 if stage and not position else 1
                blocks.append(Bottleneck(width_in, width, stride))
                width_in = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width_in, 1000)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, 2, padding=1)
        logits = self.head(self.blocks(x).mean((2, 3)))
        return F.cross_entropy(logits.float(), labels)
