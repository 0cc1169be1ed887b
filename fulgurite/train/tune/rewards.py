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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fulgurite.errors import ArgumentError
from fulgurite.train.user_code import user_code

Reward = Callable[..., float]


def load_reward(name: str) -> Reward:
    """The function `module:function`; modules of the working directory are found, too."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ArgumentError(f"{name!r} is no reward", next="--tune.rewards module:function")
    if module_name.endswith(".py"):
        path = Path(module_name)
        place = "" if path.parent == Path() else f", in the folder {path.parent}"
        raise ArgumentError(
            f"{name!r} names a file; a reward is named by its module",
            next=f"--tune.rewards {path.stem}:{function_name}{place}",
        )
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    with user_code(
        f"the module of the reward {name!r} can't be imported: it",
        next="run in the folder of the module, or install it",
    ):
        module = importlib.import_module(module_name)
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
        where = f"completion {completion[:80]!r}"
        with user_code(
            f"the reward {name}",
            where=where,
            next="a reward takes prompt, completion and the other fields of a line as **columns",
        ):
            value = reward(fields["prompt"], completion, **columns)
        number = read_number(value)
        if number is None or not math.isfinite(number):
            raise ArgumentError(
                f"the reward {name} returned {value!r}", where=where, next="return a finite number"
            )
        total += number
    if not math.isfinite(total):
        raise ArgumentError("the sum of rewards is not finite", where=where, next="scale them down")
    return total


def read_number(value: Any) -> float | None:
    """A number of Python, NumPy or torch as a float; None: it is none."""
    if isinstance(value, (int, float)):
        return float(value)
    is_scalar = getattr(value, "ndim", None) == 0
    return read_number(value.item()) if is_scalar else None
