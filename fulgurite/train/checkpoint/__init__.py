"""Checkpoints of a run: asynchronous, whole or not there, loadable on any number of ranks.

In: a nested state of tensors (also DTensors) and values. Out: `step-000100/` in the run's folder.
docs/train_faults.md explains their use.
"""

from __future__ import annotations

from fulgurite.train.checkpoint.errors import (
    CheckpointError,
    CheckpointWarning,
    DamagedCheckpointError,
)
from fulgurite.train.checkpoint.folder import hash_checkpoint, list_checkpoints, verify_checkpoint
from fulgurite.train.checkpoint.loading import read_checkpoint
from fulgurite.train.checkpoint.manager import CheckpointManager
from fulgurite.train.checkpoint.state import hash_state, training_state

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "CheckpointWarning",
    "DamagedCheckpointError",
    "hash_checkpoint",
    "hash_state",
    "list_checkpoints",
    "read_checkpoint",
    "training_state",
    "verify_checkpoint",
]
