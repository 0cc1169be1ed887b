"""How each primitive is written in Triton.

A name that starts with `libdevice.` or `tl.` is Triton's; other functions are those of
`triton_functions.py`, which a kernel's module imports where it uses them.
"""

LIBDEVICE = """
    exp expm1 log10 log1p tanh erfc tan asin acos atan sinh cosh asinh acosh atanh lgamma trunc
    fmod atan2 hypot pow copysign nextafter
"""

# floats
SPELLING: dict[str, str] = {
    **{name: f"libdevice.{name}" for name in LIBDEVICE.split()},
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": "tl.div_rn",  # a slash may be two last places off: floor(49 / 49) would be 0
    "share": "share",
    "neg": "(-1.0 * {0})",  # before Triton 3.7 a minus subtracts from 0: -(0.0) would be 0.0
    "reciprocal": "tl.div_rn(1.0, {0})",
    "fma": "({0} + {1} * {2})",
    "maximum": "nan_max",
    "minimum": "nan_min",
    "fmax": "tl.maximum",
    "fmin": "tl.minimum",
    "remainder": "floored_remainder",
    "floor_divide": "floored_divide",
    "truncated_divide": "truncated_divide",
    "round": "libdevice.rint",
    "sign": "sign",
    "signbit": "signbit",
    "sigmoid": "sigmoid",
    "uniform": "uniform",
    "uniform53": "uniform53",
    "random_integer": "random_integer",
    "divisor": "{0}",
    "abs": "tl.abs",
    "floor": "tl.floor",
    "ceil": "tl.ceil",
    "sqrt": "tl.sqrt_rn",
    "rsqrt": "tl.rsqrt",
    "exp2": "tl.exp2",
    "log": "tl.log",
    "log2": "tl.log2",
    "erf": "tl.erf",
    "sin": "tl.sin",
    "cos": "tl.cos",
    "where": "tl.where",
    "eq": "({0} == {1})",
    "ne": "({0} != {1})",
    "lt": "({0} < {1})",
    "le": "({0} <= {1})",
    "gt": "({0} > {1})",
    "ge": "({0} >= {1})",
    "cast": "",
}

# where the spelling on doubles differs
DOUBLE_SPELLING: dict[str, str] = {
    "div": "({0} / {1})",
    "share": "({0} / {1})",
    "reciprocal": "(1.0 / {0})",
    "exp": "tl.exp",
    "sqrt": "tl.sqrt",
}

# where a few last places of a float32 don't matter: every float that is read is narrow
FAST_SPELLING: dict[str, str] = {
    "div": "({0} / {1})",
    "share": "({0} * (1.0 / {1}))",
    "reciprocal": "(1.0 / {0})",
    "exp": "libdevice.fast_expf",  # what is below 1e-38 is 0: tl.exp spends half its work on that
    "sqrt": "tl.sqrt",
    "sigmoid": "quick_sigmoid",
    "tanh": "quick_tanh",
}

# of these, functions for which a denormal is zero
APPROXIMATIONS = ("libdevice.fast_expf", "quick_sigmoid", "quick_tanh", "tl.exp2(")

# where the spelling on integers differs
INTEGER_SPELLING: dict[str, str] = {
    "neg": "(-{0})",
    "maximum": "tl.maximum",
    "minimum": "tl.minimum",
    "fmod": "whole_truncated_remainder",
    "remainder": "whole_floored_remainder",
    "floor_divide": "whole_floored_divide",
    "truncated_divide": "whole_truncated_divide",
    "pow": "whole_power",
    "gcd": "greatest_divisor",
    "lcm": "least_multiple",
    "and": "({0} & {1})",
    "or": "({0} | {1})",
    "xor": "({0} ^ {1})",
    "not": "(~{0})",
    "shift_left": "shift_left",
    "shift_right": "shift_right",
}

# and on bools
BOOL_SPELLING: dict[str, str] = {
    "add": "({0} | {1})",
    "mul": "({0} & {1})",
    "maximum": "({0} | {1})",
    "minimum": "({0} & {1})",
    "and": "({0} & {1})",
    "or": "({0} | {1})",
    "xor": "({0} ^ {1})",
    "not": "(~{0})",
}
