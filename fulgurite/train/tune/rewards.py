"""Rewards of GRPO: names of Python functions in, one number a completion out.

    def reward(prompt, completion, **columns) -> float: ...          # in my_rewards.py

    --tune.rewards my_rewards:reward

`prompt` is what the line of the file says (text or messages), `completion` the sampled text, `columns`
all other fields of the line. The rewards of several functions are added.
"""

from __future__ import annotations

import importlib
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fulgurite.errors import ArgumentError

Reward = Callable[..., float]


def load_reward(name: str) -> Reward:
    """The function `module:function`; modules of the working directory are found, too."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ArgumentError(f"{name!r} is no reward", next="--tune.rewards module:function")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ArgumentError(
            f"the module of the reward {name!r} can't be imported: {error}",
            next="run in the folder of the module, or install it",
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ArgumentError(f"{module_name} has no function {function_name!r}")
    reward: Reward = function
    return reward


def load_rewards(names: Sequence[str | Reward]) -> list[Reward]:
    if not names:
        raise ArgumentError("GRPO needs a reward", next="--tune.rewards module:function")
    return [load_reward(name) if isinstance(name, str) else name for name in names]


def compute_reward(rewards: Sequence[Reward], fields: Mapping[str, Any], completion: str) -> float:
    """The sum of all rewards of one completion; ArgumentError if one is no finite number."""
    columns = {
        name: value for name, value in fields.items() if name not in ("prompt", "completion")
    }
    total = 0.0
    for reward in rewards:
        name = getattr(reward, "__name__", reward)
        try:
            value = reward(fields["prompt"], completion, **columns)
        except Exception as error:  # the user's code
            raise ArgumentError(
                f"the reward {name} raised {type(error).__name__}: {error}",
                where=f"{_find_line(error)}; completion {completion[:80]!r}",
                next="a reward takes prompt, completion and the other fields of a line as **columns",
            ) from error
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ArgumentError(
                f"the reward {name} returned {value!r}",
                where=f"completion {completion[:80]!r}",
                next="return a finite number",
            )
        total += float(value)
    return total


def _find_line(error: Exception) -> str:
    """Where an error was raised, as `file:line`."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"
