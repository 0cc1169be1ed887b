"""How each primitive is printed in Triton.

A template with `{0}` is formatted; any other text is a function to call. Names that start with
`libdevice.` or `tl.` are Triton's. Other functions are those of `device_functions.py`, which a
kernel's module imports where it uses them.
"""

LIBDEVICE = """
    exp expm1 log10 log1p tanh erfc tan asin acos atan sinh cosh asinh acosh atanh lgamma trunc
    fmod atan2 hypot pow copysign nextafter
"""

# Floats.
OP_TABLE: dict[str, str] = {
    **{name: f"libdevice.{name}" for name in LIBDEVICE.split()},
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": "tl.div_rn",  # `/` may be off by 2 ulp: floor(49 / 49) would be 0
    "softmax_div": "softmax_div",
    "neg": "(-1.0 * {0})",  # before Triton 3.7 `-x` is 0 - x: -(0.0) would be 0.0
    "reciprocal": "tl.div_rn(1.0, {0})",
    "fma": "({0} + {1} * {2})",
    "maximum": "nan_max",
    "minimum": "nan_min",
    "fmax": "tl.maximum",
    "fmin": "tl.minimum",
    "remainder": "floored_remainder",
    "floor_divide": "floored_divide",
    "trunc_divide": "truncated_divide",
    "round": "libdevice.rint",
    "sign": "sign",
    "signbit": "signbit",
    "sigmoid": "sigmoid",
    "uniform": "uniform",
    "uniform53": "uniform53",
    "random_integer": "random_integer",
    "nonzero_divisor": "{0}",
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

# Where float64 differs.
FLOAT64_OPS: dict[str, str] = {
    "div": "({0} / {1})",
    "softmax_div": "({0} / {1})",
    "reciprocal": "(1.0 / {0})",
    "exp": "tl.exp",
    "sqrt": "tl.sqrt",
}

# Fast math, for kernels whose inputs are all narrow floats: a few ulp of a float32 don't matter
# there.
FAST_MATH_OPS: dict[str, str] = {
    "div": "({0} / {1})",
    "softmax_div": "({0} * (1.0 / {1}))",
    "reciprocal": "(1.0 / {0})",
    "exp": "libdevice.fast_expf",  # flushes below 1e-38 to 0, on which tl.exp spends half its work
    "sqrt": "tl.sqrt",
    "sigmoid": "fast_sigmoid",
    "tanh": "fast_tanh",
}

# Fast-math functions that flush denormals to zero.
APPROXIMATIONS = ("libdevice.fast_expf", "fast_sigmoid", "fast_tanh", "tl.exp2(")

# Where integers differ.
INTEGER_OPS: dict[str, str] = {
    "neg": "(-{0})",
    "maximum": "tl.maximum",
    "minimum": "tl.minimum",
    "fmod": "int_truncated_remainder",
    "remainder": "int_floored_remainder",
    "floor_divide": "int_floored_divide",
    "trunc_divide": "int_truncated_divide",
    "pow": "int_pow",
    "gcd": "int_gcd",
    "lcm": "int_lcm",
    "and": "({0} & {1})",
    "or": "({0} | {1})",
    "xor": "({0} ^ {1})",
    "not": "(~{0})",
    "shift_left": "shift_left",
    "shift_right": "shift_right",
}

# Where bools differ.
BOOL_OPS: dict[str, str] = {
    "add": "({0} | {1})",
    "mul": "({0} & {1})",
    "maximum": "({0} | {1})",
    "minimum": "({0} & {1})",
    "and": "({0} & {1})",
    "or": "({0} | {1})",
    "xor": "({0} ^ {1})",
    "not": "(~{0})",
}
