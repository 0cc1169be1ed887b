"""Train a small compiled model; print what is saved for backward under each remat policy.

python examples/02_train.py
"""

import torch
from torch import nn

import fulgurite

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 1))
compiled = fulgurite.compile(model, remat="mincut")
optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)

x = torch.randn(256, 16)
target = x.square().sum(-1, keepdim=True).sqrt()
for step in range(60):
    loss = (compiled(x) - target).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0:
        print(f"step {step:3d}   loss {loss.item():.4f}")

print(f"last      loss {loss.item():.4f}")
assert loss.item() < 0.5
print(compiled.explain())
print(compiled.last_trace("backward"))
