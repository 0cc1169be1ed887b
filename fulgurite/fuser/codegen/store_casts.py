"""Casts that a store makes anyway: kernels of both targets leave them out."""

from __future__ import annotations

from dataclasses import replace

import torch

from fulgurite.fuser.ir.expression import NARROW_FLOATS, Load, Operation, opmath_dtype
from fulgurite.fuser.ir.loop_nest import LoopNest, Store


def drop_store_casts(nest: LoopNest) -> LoopNest:
    """Drops casts of floats to the dtype that the store rounds to anyway.

    Casts to integers and bools stay: a store would make 0.5 a False, and overflow is undefined. So do those
    of row programs, whose stores name a step.
    """
    if nest.is_row_program:
        return nest

    def drop_cast(store: Store) -> Store:
        value = store.value
        if isinstance(value, Load) and not value.index:
            local = nest.locals[value.name]
            value = value if local.reduction else local.expression
        if isinstance(value, Operation) and value.name == "cast":
            (argument,) = value.arguments
            is_rounding = value.dtype == store.tensor.dtype and value.dtype in NARROW_FLOATS
            if is_rounding and opmath_dtype(argument.dtype) == torch.float32:
                return replace(store, value=argument)
        return store

    return replace(nest, stores=tuple(drop_cast(s) for s in nest.stores))
