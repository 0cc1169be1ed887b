"""The lines that random programs are made of, by kind.

Placeholders:

{x} {y} {z}   values; y and z mostly broadcast with x       {f} {g}   float values
{w}           an integer value      {o}  a bool value       {c}       a complex value
{d} {e}       dimensions of x       {k}  an integer of either sign, a constant or an argument
{p} {q}       0..3 and 1..3         {s}  a number of either sign and kind, a constant or an argument
{n}           indices along {d} of x, -size <= n < size, with duplicates     {n2}  the same, 2-D
{m}           the same, 0 <= m < size; {u} without duplicates
{h}           indices of the rank of x for gather and scatter along {d}; {hu} without duplicates

Marks: `!` reads exact values only, because an ulp may change the result by more; `~` is correct to a
few ulp only; `=` reads bits, so float64 says nothing about it.
"""

from __future__ import annotations

POINTWISE = """
-{x} | {x}.abs() | {x} * {s} | {x} + {s} | {s} - {x} | !~{x} / {s} | ~{x} ** 3 | ~{x} ** {p} | ~{x} ** -1 | {x}.square()
~{f}.sin() | ~{f}.cos() | ~{f}.exp() | ~{f}.sigmoid() | ~{f}.tanh() | ~{f}.abs().sqrt() | ~{f}.abs().log1p() | ~{f}.erf()
torch.relu({x}) | {x}.clamp({k}, 2) | {x}.clamp(min={s}) | !{x}.sign() | !{x}.isnan() | !{x} > {s} | !{x} == {s} | !{x}.round()
!{x}.floor() | !{x}.ceil() | !{x}.trunc() | !{x} // {s} | !{x} % {s} | !torch.fmod({x}, {s}) | {x}.nan_to_num() | ~{f}.rsqrt()
~F.gelu({f}) | ~F.silu({f}) | ~F.softplus({f}) | ~F.elu({f}) | F.leaky_relu({f}) | F.hardtanh({f}) | ~F.mish({f}) | ~F.logsigmoid({f})
F.hardswish({f}) | !F.hardshrink({f}) | F.softshrink({f}) | F.relu6({f}) | ~F.selu({f}) | ~F.celu({f}) | ~F.glu({f}, {d})
{x} + {y} | {x} - {y} | {x} * {y} | ~{x} / {y} | torch.maximum({x}, {y}) | torch.minimum({x}, {y}) | torch.fmax({x}, {y})
!{x} < {y} | !{x} == {y} | !{x} != {y} | !torch.where({x} > {y}, {x}, {y}) | torch.where({o}, {x}, {y}) | torch.where({o}, {x}, {s})
!{x} // {y} | !torch.remainder({x}, {y}) | !torch.copysign({f}, {g}.nan_to_num()) | ~torch.add({x}, {y}, alpha={k})
~torch.addcmul({x}, {y}, {z}, value=2) | ~torch.addcdiv({x}, {y}, {z}) | torch.lerp({f}, {g}, 0.25) | ~torch.hypot({f}, {g})
~torch.atan2({f}, {g}) | ~torch.logaddexp({f}, {g}) | {w} & {y} | torch.bitwise_or({w}, {y}) | {w} ^ 5 | {w}.bitwise_not() | {w} << {p} | {w} >> {p}
{o}.logical_not() | !{x}.logical_and({y}) | !{x}.logical_xor({y}) | {x}.masked_fill({o}, {s}) | !torch.div({x}, {y}, rounding_mode="floor")
!torch.div({x}, {s}, rounding_mode="trunc") | ~{x}.float().pow({s}) | ~torch.xlogy({f}, {g}.abs()) | !torch.heaviside({f}, {g})
!torch.isclose({x}, {x}) | !{f}.frac() | ~{f}.reciprocal() | {f}.nan_to_num().deg2rad() | !torch.signbit({x}.nan_to_num()) | ~torch.logit({f}, 0.1)
~{f}.expm1() | ~{f}.exp2() | ~{f}.abs().log2() | ~{f}.atan() | ~{f}.asinh() | ~{f}.sinc() | ~torch.special.erfcx({f}) | ~{f}.lgamma() | ~{f}.digamma()
torch.gcd({w}, {w}) | torch.lcm({w}, {w}) | !torch.nextafter({f}, {f} + 1) | !torch.isin({x}, {y}) | !{f}.isinf() | !{x}.isfinite() | ~torch.ldexp({f}, {w})
~{f}.clamp(-1, 1).acos() | ~{f}.asin() | ~{f}.abs().acosh() | ~{f}.sinh() | ~{f}.cosh() | ~{f}.tan() | ~{f}.erfc() | ~{f}.erfinv() | ~{f}.abs().log10() | ~F.hardsigmoid({f}) | torch.fmin({x}, {y})
+{x} | {w} & 5 | torch.bitwise_left_shift({w}, {p}) | torch.bitwise_right_shift({w}, {p}) | !F.threshold({x}, {k}, {s}) | ~F.gelu({f}, approximate="tanh") | ~{f}.atanh() | {x}.new_full({x}.shape, {s})
~torch.special.i0e({f}) | ~torch.special.log_ndtr({f}) | ~torch.special.xlog1py({f}, {g}.abs()) | ~torch.logaddexp2({f}, {g}) | ~{f}.float_power(2) | ~torch.rsub({x}, {y}, alpha={k}) | ~torch.nn.functional.softsign({f})
"""
REDUCTIONS = """
{x}.sum() | {x}.sum({d}) | {x}.sum(({d}, {e})) | {x}.sum({d}, keepdim=True) | ~{f}.mean({d}) | ~{f}.mean() | {x}.amax({d}) | {x}.amin({d}, True)
{x}.prod({d}) | {x}.prod() | !{x}.any({d}) | !{x}.all({d}) | !{x}.all() | !{x}.argmax({d}) | !{x}.argmin({d}) | !{x}.argmax() | !{x}.max({d})[1]
{x}.max({d})[0] | {x}.min() | ~{f}.var({d}, correction={p}) | ~{f}.std({d}) | ~torch.var_mean({f}, {d})[0] | ~{f}.softmax({d}) | ~{f}.log_softmax({d})
~{f}.logsumexp({d}) | ~{f}.norm() | ~{f}.norm(p=1, dim={d}) | ~torch.linalg.vector_norm({f}, 3, {d}) | !{x}.count_nonzero({d}) | {x}.nansum({d})
~{f} - {f}.mean({d}, True) | ({x} - {x}.sum({d}, True)).amax({e}) | !({x}.amax({d}, True) == {x}).sum({d}) | {x}.sum({d}).sum() | {x}.amax({d}).sum(-1)
torch.aminmax({x}, dim={d})[0] | {x}.sum({d}, dtype=torch.float64) | {x}.sum() * {x} | !{x}.mean({d}) > 0 | {x}.dist({x}) | ~{f}.std() | ~{f}.nanmean({d})
{x}.amin(({d}, {e})) | !{x}.min({d})[1] | !{x}.any() | {x}.max() | ~torch.std_mean({f}, {d})[0] | ~F.softmin({f}, {d}) | !{x}.argmin({d}, keepdim=True) | ~{f}.renorm(2, {d}, 1.5) | {x}.sum({d}).amax() | !{x}.isnan().any({d})
~{f}.var(({d}, {e})) | ~torch.linalg.vector_norm({f}, {s}, {d}) | {x}.amax({d}, True) - {x}.amin({d}, True) | {x}.sum({d}, True) + {x}.sum({e}, True) | ~{f}.softmax({d}).sum({e}) | ({x} * {y}).sum({d}) | !({x} > {s}).sum({d})
"""
SCANS = """
{x}.cumsum({d}) | {x}.cumprod({d}) | !{x}.cummax({d})[1] | {x}.cummax({d})[0] | {x}.cummin({d})[0] | !{x}.cummin({d})[1] | ~{f}.logcumsumexp({d})
{x}.sum({d}).cumsum(0) | {x}.cumsum({d}).sum({e}) | {x}.cumsum({d}).flip({d}) | {x}.flip({d}).cumsum({d}) | {x}.cumsum({d}).cumsum({e}) | {x}.diff(dim={d})
torch.trapezoid({x}, dim={d}) | {x}.cumsum({d}, dtype=torch.float64) | {x}.cumsum({d}) - {x} | torch.cumulative_trapezoid({x}, dim={d}) | {o}.cumsum({d})
"""
VIEWS = """
{x}.transpose({d}, {e}) | {x}.unsqueeze({d}) | {x}.squeeze({d}) | {x}.flatten() | {x}.flatten()[::3] | {x}.reshape(-1) | {x}[..., ::2] | {x}[{k}:]
{x}[:{k}] | {x}[:, {k}:] | {x}[{k}] | {x}.select({d}, {k}) | {x}.narrow({d}, {k}, 1) | {x}[..., -{q}:] | {x}[..., {k}::2] | {x}.movedim({d}, {e})
{x}.expand(3, *{x}.shape) | {x}.diagonal({k}) | {x}.unfold({d}, 2, 1) | {x}.unfold({d}, 3, 2) | {x}.T | {x}.mT | {x}.detach() | {x}.unbind({d})[-1]
{x}.chunk(2, {d})[0] | {x}.split(2, {d})[-1] | {x}.view(-1) | {x}[None] | {x}[1::3] | {x}.as_strided((3, {q}), (2, 1), 1) | {x}.as_strided(({q},), (1,))
{x}.reshape(-1, {q}) | {x}.reshape({q}, -1) | {x}.unflatten({d}, (-1, {q})) | {x}.permute(*reversed(range({x}.dim()))) | {x}.swapaxes({d}, {e})
{x}.view({x}.shape) | {x}.expand_as({y}) | torch.broadcast_to({x}, {y}.shape) | {x}.tensor_split(3, {d})[1] | {x}.contiguous() | {x}.clone() | {x}.ravel()
{x}[..., None, :] | {x}[{k}:, ..., :{k}] | {x}.flatten({d}, {e}) | {x}[{k}:{k}] | {x}[:, ::{q}] | torch.atleast_3d({x}) | {x}.t() | {x}.hsplit(1)[0]
{x}[{x}.size(0) // 2:] | {x}[:{x}.size(0) - 1] | {x}.narrow({d}, 0, {x}.size({d}) // 2) | {x}.reshape({x}.numel() // {x}.size(-1), -1)
torch.unsafe_split_with_sizes({x}, [1, {x}.size({d}) - 1], {d})[1] | torch.unsafe_chunk({x}, 2, {d})[-1]
{x}.split([1, {x}.size({d}) - 1], {d})[1] | torch.unsafe_split({x}, 2, {d})[0] | {x}.unbind({d})[0] | {x}[..., 1:].transpose({d}, {e}) | {x}.transpose({d}, {e})[{k}:][::2] | {x}.expand(2, *{x}.shape)[:, {k}] | {x}.unfold({d}, 2, 1)[{k}]
{x}.diagonal({k}).unsqueeze({d}) | {x}[{k}:].T | {x}.flatten()[{k}:].unfold(0, 2, 2) | {x}.movedim({d}, {e}).flatten() | {x}.as_strided((2, {q}), (1, 1), {p}) | {x}.view(-1)[{k}:].view(-1, {q}) | {x}[None, ..., None].squeeze()
"""
MOVES = """
{x}.flip(({d}, {e})) | {x}.flip({d}) | {x}.roll({k}, {d}) | {x}.roll({k}) | {x}.roll(({k}, {k}), ({d}, {e})) | {x}.tril({k}) | {x}.triu({k}) | {x}.rot90()
torch.cat([{x}, {y}], {d}) | torch.cat([{x}, {x}], {d}) | torch.stack([{x}, {x}], {d}) | torch.cat([{x}.flatten(), {y}.flatten()]) | {x}.repeat(2, *[1] * {x}.dim())
{x}.repeat_interleave({q}, {d}) | {x}.tile(2) | torch.cat([{x}.sum({d}, keepdim=True), {x}], {d}) | torch.cat([{x}.cumsum({d}), {x}.amax({d}, True)], {d})
F.pad({x}, ({k}, {p}), value=3) | F.pad({x}, ({p}, 0, 0, {k})) | torch.full_like({x}, {s}) | torch.zeros_like({x}) | {x}.new_ones({x}.shape) | torch.block_diag({x}, {x})
torch.arange({x}.numel(), device={x}.device).reshape({x}.shape) * {x} | torch.arange({k}, 7, {q}, device={x}.device) | torch.diag_embed({x}, {k})
torch.select_scatter({x}, {x}.select({d}, 0), {d}, {k}) | torch.slice_scatter({x}, {x}[1:], 0, 1) | torch.diagonal_scatter({x}, {x}.diagonal(), 0) | torch.vander({x})
torch.meshgrid({x}, {y}, indexing="ij")[0] | torch.cartesian_prod({x}, {y}) | {x}.diag({k}) | torch.outer({x}, {y}) | torch.eye({q}, device={x}.device) | {x}.trace()
torch.linspace({k}, 3, {q}, device={x}.device) | torch.tril_indices(3, {q}, {k}, device={x}.device) | torch.hstack([{x}, {x}]) | torch.dstack([{x}, {x}]) | torch.kron({x}, {y})
torch.empty_like({x}).fill_({s}) | torch.ones({x}.shape, device={x}.device) * {x} | {x}.new_empty({x}.shape).copy_({x}) | torch.zeros(({q}, 3), device={x}.device) | {x}.new_full(({q}, 2), {s}) | torch.cat([{x}[{k}:], {x}[:{k}]])
torch.randn_like({f}).isfinite() | torch.rand({x}.shape, device={x}.device) < 1 | torch.randint(0, 5, {x}.shape, device={x}.device) < 5 | {f}.clone().uniform_(-1, 1).abs() <= 1 | torch.randn({q}, 3, device={x}.device).isnan()
{f}.clone().normal_().isnan() | {f}.clone().exponential_() >= 0 | {f}.clone().cauchy_().isnan() | {f}.clone().log_normal_() >= 0 | {x}.clone().random_(0, 3) < 3 | {f}.clone().geometric_(0.5) >= 1 | torch.randperm({x}.numel(), device={x}.device).sort()[0]
torch.normal(torch.zeros_like({f}), 1.0).isnan() | torch.normal(0.0, {q}, ({q}, 3), device={x}.device).isnan() | {x}.clone().random_() >= 0 | torch.empty_permuted(({q}, 3), (1, 0), device={x}.device).fill_({s})
torch.cat([{x}, {y}, {x}], {d}) | torch.stack([{x}, {y}], {d}) | torch.column_stack([{x}, {x}]) | {x}.fliplr() | {x}.roll({k}, {d}).flip({d}) | torch.cat([{x}[..., :1], {x}[..., 1:]], -1) | {x}.repeat_interleave({m}, {d}) | torch.tril({x}, {k}).triu()
"""
CASTS = """
{x}.to(torch.float32) | {x}.to(torch.float64) | {x}.to(torch.float16) | {x}.to(torch.bfloat16) | {x}.float() | {x}.half() | {x}.to(torch.complex64)
!{x}.nan_to_num().clamp(-99, 99).to(torch.int64) | !{x}.nan_to_num().clamp(-99, 99).to(torch.int32) | !{x}.nan_to_num().clamp(-99, 99).to(torch.int8)
!{x}.nan_to_num().clamp(0, 99).to(torch.uint8) | !{x}.bool() | {w}.to(torch.int16) | {w}.to(torch.uint8) | {w}.to(torch.int8) | {x}.to(torch.float8_e5m2)
{x}.to(torch.float8_e4m3fn).float() | {x}.type_as({y}) | ={x}.view(torch.uint8) | ={x}.view(torch.int16) | ={x}.view(torch.int32) | {x}.to(torch.float64) + {y}
{x}.sum({d}, dtype=torch.float32) | torch.tensor(2.5, device={x}.device) * {x} | torch.tensor(3, device={x}.device) + {x} | {x} + {y}.to(torch.float16)
torch.where({o}, {x}, 1.5) | {o} + {x} | {o} * {s} | {w} + 1.5 | {w} * True | {x}.to(torch.bfloat16).sum({d})
"""
INDEX = """
{x}.index_select({d}, {m}) | {x}.transpose(0, {d})[{n}] | {x}[..., {n}] | {x}.transpose(0, {d})[{n2}] | {x}.transpose(0, {d})[{n}[:, None], None]
{x}.gather({d}, {h}) | torch.take_along_dim({x}, {h}, {d}) | {x}.take({w} % {x}.numel()) | {x}.flip({d}).index_select({d}, {m}) | {x}.transpose(0, {d})[{n}, 0]
{x}.transpose(0, {d})[{n}][:, None] | F.embedding({m}, {f}) | ({x} * 2).transpose(0, {d})[{n}] | {x}.transpose(0, {d})[{n}, ..., -1] | {x}.take({w} % {x}.numel() - {x}.numel())
{x}.index_select({d}, {m}.to(torch.int32)) | {x}.transpose(0, {d})[{n} % {x}.size({d})].sum() | {x}.gather({d}, torch.zeros_like({x}, dtype=torch.int64))
{x}[{n} % {x}.size(0), {n} % {x}.size(1)] | {x}[:, {n} % {x}.size(1)] | {x}[{n} % {x}.size(0), :, {n} % {x}.size(2)] | {x}.transpose(0, {d})[{n} // 2]
!{x}.gather({d}, {x}.argmax({d}, True)) | {x}[{w} % {x}.size(0)] | {x}[-1 - {w} % {x}.size(0)] | {x}[[0, -1]] | {x}[:, [0, 0]] | {x}[..., [-1]]
F.embedding_bag({m}[None], {f}, mode="sum") | F.embedding_bag({m}[None], {f}, mode="max") | ~F.embedding_bag({m}[None], {f}) | {x}[{o}] | {x}.masked_select({o})
~F.embedding_bag({m}, {f}, torch.tensor([0, {m}.numel() // 2], device={m}.device), mode="sum") | {x}.transpose(0, {d})[{m}[:, None], {m}.new_zeros(1)] | {x}.index_select({d}, {m}).index_select({d}, {m}[:0])
F.embedding_bag({m}[None] % {f}.size(0), {f}.reshape({f}.size(0), -1), mode="sum") | ~F.embedding_bag({m} % {f}.size(0), {f}.reshape({f}.size(0), -1), torch.tensor([0, {m}.numel() // 2], device={m}.device)) | F.embedding_bag({m}[None] % {f}.size(0), {f}.reshape({f}.size(0), -1), mode="max") | F.embedding({m} % {f}.size(0), {f}.reshape({f}.size(0), -1), padding_idx=0)
{x}.transpose(0, {d})[{n}].transpose(0, {d}) + 1 | F.embedding({m}, {f}, padding_idx=0) | {x}.gather({d}, {h}).sum({d}) | {x}[..., None].index_select(-1, torch.zeros(3, dtype=torch.int64, device={x}.device)) | {x}.transpose(0, {d})[{n}.to(torch.int32)]
"""
SCATTER = """
{x}.scatter({d}, {hu}, {s}) | {x}.scatter({d}, {hu}, {x}) | {x}.scatter_add({d}, {h}, {x}) | {x}.scatter_reduce({d}, {h}, {x}, "sum") | {x}.scatter_reduce({d}, {h}, {x}, "amax")
{x}.scatter_reduce({d}, {h}, {x}, "amin", include_self=False) | {x}.scatter_reduce({d}, {h}, {x}, "prod") | ~{f}.scatter_reduce({d}, {h}, {f}, "mean") | {x}.scatter({d}, {h}, 1)
{x}.index_add({d}, {m}, {x}.index_select({d}, {m})) | {x}.index_add({d}, {m}, {x}.index_select({d}, {m}), alpha={k}) | {x}.index_copy({d}, {u}, {x}.index_select({d}, {u}) * 2)
{x}.index_fill({d}, {m}, {s}) | {x}.transpose(0, {d}).index_put(({n},), {x}.new_ones(()), accumulate=True) | {x}.index_put(({u} % {x}.size(0),), {x}.new_ones(()))
{x}.transpose(0, {d}).index_put(({n},), {x}.transpose(0, {d})[{n}], accumulate=True) | {x}.masked_scatter({o}, {x}.flatten()) | {x}.put({w} % {x}.numel(), {x}.new_ones({w}.shape), accumulate=True)
{x}.index_reduce({d}, {m}, {x}.index_select({d}, {m}), "amax") | torch.bincount({w}.flatten().abs(), minlength=3) | F.one_hot({w} % 5, 5) | F.one_hot({w}.abs().flatten() % 3)
torch.zeros_like({x}).scatter_add({d}, {h}, {x} * 2) | {x}.new_zeros({x}.shape).index_add({d}, {m}, {x}.index_select({d}, {m})).sum({d}) | torch.histc({f}.nan_to_num(), 5, -4, 4)
{x}.masked_scatter({x} > 0, torch.arange({x}.numel(), device={x}.device).to({x}.dtype)) | {x}.scatter({d}, {hu}, {y}) | {x}.index_put(({n} % {x}.size(0), {n} % {x}.size(1)), {x}.new_ones(()), accumulate=True)
"""
SORT = """
!{x}.sort({d})[0] | !{x}.sort(dim={d}, stable=True)[1] | !{x}.sort({d}, descending=True)[0] | !{x}.sort(dim={d}, descending=True, stable=True)[1] | !{x}.argsort(dim={d}, stable=True)
!{x}.topk(min({q}, {x}.size({d})), {d})[0] | !{x}.topk(min({q}, {x}.size({d})), {d}, largest=False)[0] | !{x}.kthvalue(1, {d})[0] | !{x}.median({d})[0] | !{x}.median() | !{x}.nanmedian({d})[0]
!{x}.mode({d})[0] | ~{f}.quantile(0.25, {d}) | ~{f}.nanquantile(0.5, {d}, keepdim=True) | !({x} * 2).sort({d})[0].cumsum({d}) | !{x}.msort() | ~{f}.quantile(0.75)
!torch.searchsorted({x}.sort(-1)[0], {x}) | !torch.bucketize({x}, torch.arange(-2, 3, device={x}.device), right=True) | !{x}.sort({d})[0].flip({d}) | !{x}.sort(dim={d}, stable=True)[1].argsort({d})
!{x}.sort(dim={d}, stable=True)[1].gather({d}, {h}) | !torch.topk({x}.sum({d}), 1)[0] | !{x}.topk({x}.size({d}), {d})[0] | !{x}.gather({d}, {x}.argsort(dim={d}, stable=True)) | !torch.unique({x})
!torch.unique_consecutive({w}) | !{x}.kthvalue({x}.size({d}), {d})[0] | !{x}.sort(dim={d}, stable=True)[1] + {k} | ~{f}.softmax({d}).sort({d})[0]
!torch.bucketize({f}, torch.linspace(-2, 2, 5, device={f}.device)) | !torch.searchsorted({x}.sort(-1)[0], {x}, right=True) | !torch.searchsorted({x}.flatten().sort()[0], {y}) | !{x}.nanmedian() | !{x}.argsort(dim={d}, descending=True, stable=True) | !{x}.sort(dim={d}, stable=True)[0].diff(dim={d})
!{x}.topk({x}.size({d}) // 2, {d}, largest=False)[0].sum({d}) | !{x}.kthvalue({x}.size({d}) // 2 + 1, {d})[0] | !{x}.median({d}, keepdim=True)[0] - {x} | !torch.isin({x}, {x}.sort({d})[0][..., :1]) | !{x}.sort(dim={d}, stable=True)[0].cummax({d})[0] | !{x}.transpose({d}, {e}).sort({d})[0]
"""
IN_PLACE = """
{x}.add_({s}) | {x}.mul_({s}) | {x}.neg_() | {x}.zero_() | {x}.fill_({s}) | {x}.relu_() | {x}.clamp_(min=0) | {x}[..., ::2] = {s} | {x}[{k}] = {s} | {x}[..., {k}:].mul_(3)
{x}[{k}:] = {s} | {x}[:{k}] = {x}[{k}:].sum() | {x}[..., {k}:{k}] += 1 | {x}.masked_fill_({o}, {s}) | {x}.select({d}, {k}).add_(1) | {x}.transpose({d}, {e}).cumsum_(0) | ~{f}.sin_()
{x}[[0, -1]] = 1 | {x}.index_fill_({d}, {m}, 7) | {x}.detach().mul_(2) | {x}.flatten().add_(1) | {x}.view(-1).sub_(1) | {x}.tril_({k}) | {x}.diagonal().zero_() | {x}.diagonal({k}).add_(1)
{x}.add_({y}) | {x}.mul_({y}) | {x}.copy_({y}) | {x}[...] = {y} | {x}.transpose({d}, {e}).add_({y}) | {x}[{k}] = {y} | {x}[{k}:].sub_({y}) | {x}[..., ::2].copy_({y}) | {x}.sub_({y}, alpha={k})
{x}.index_put_(({n},), {y}, accumulate=True) | {x}.masked_fill_({y} > 0, 2) | {x}.unbind({d})[0].copy_({x}.unbind({d})[-1]) | {x}.scatter_add_({d}, {h}, {x}.clone()) | {x}.scatter_({d}, {hu}, {s})
{x}[{u} % {x}.size(0)] = {s} | {x}.index_add_({d}, {m}, {x}.index_select({d}, {m})) | {x}.unfold({d}, 2, 2).mul_(2) | {x}.squeeze().add_(1) | {x}.T.mul_(2) | {x}.index_copy_({d}, {u}, {x}.index_select({d}, {u}) + 1)
{x}[..., -1:].view(-1)[...] = 5 | {x}.narrow({d}, {k}, 1).zero_() | {x}[..., 1:] += {x}[..., :-1].clone() | {x}[:, {k}] = {x}[:, 0] | {x}.reshape(-1)[{k}] = {s} | {x}[None].mul_(2) | {x}.addcmul_({y}, {z})
!{x}[{x} > 0] = {s} | {x}.as_strided(({q},), (1,)).add_(1) | {x}.chunk(2, {d})[0].mul_({s}) | !{x}.floor_() | {x}.cumsum_({d}) | {x}.unsqueeze({d}).neg_() | {x}.swapaxes_({d}, {e})
{x}[{k}:][{k}:] = {s} | {x}.select({d}, {k}).select(0, {k}).fill_({s}) | {x}.transpose({d}, {e})[{k}:].mul_(2) | {x}.exp_().clamp_(max=3) | {x}.masked_scatter_({o}, {y}.flatten().clone()) | {w}.bitwise_and_(3)
{x}.transpose({d}, {e})[{k}:].copy_({s}) | {x}[::2][{k}] = {s} | {x}[..., {k}:][..., ::2].mul_(2) | {x}.unfold({d}, 2, 2)[{k}] = {s} | {x}.view(-1)[::2].add_(1) | {x}.T[{k}].add_({s}) | {x}[None][0].neg_() | {x}.diagonal({k})[1:].fill_({s}) | {x}.transpose({d}, {e}).flatten(0).add_(1)
{x}.split(1, {d})[0].add_({x}.split(1, {d})[-1]) | {x}.unbind({d})[-1].mul_({s}) | {x}.narrow({d}, 0, 1).add_({x}.narrow({d}, -1, 1)) | {x}[{k}:] += {s} | {x}.scatter_reduce_({d}, {h}, {x}.clone(), "amax") | {x}.index_put_(({m},), {x}[0], accumulate=True) | {x}.view({x}.shape).add_({y})
"""
MATMUL = """
~{f} @ {f}.mT | ~{f}.mT @ {f} | ~torch.matmul({f}, {g}) | ~({f} @ {g}.mT).relu() + 1 | ~F.linear({f}, {f}) | ~torch.einsum("...i,...j->...ij", {f}, {g}) | ~torch.dot({f}, {f}) | ~torch.mv({f}, {f}[0])
~torch.bmm({f}[None], {f}.mT[None]) | ~torch.addmm({f}, {f}, {f}.T @ {f}) | ~torch.baddbmm({f} @ {f}.mT, {f}, {f}.mT) | ~torch.outer({f}, {g}).sum({d}) | ~F.linear({f}, {f}, {f}[..., 0]).softmax(-1) | ~torch.linalg.norm({f})
~F.scaled_dot_product_attention({f}, {f}, {f}) | ~torch.cdist({f}, {f}) | ~F.cosine_similarity({f}, {g}, dim={d}) | ~torch.tensordot({f}, {f}, 1) | ~F.bilinear({f}, {f}, {f}[None] @ {f}.mT)
~mixed_precision(torch.matmul, {f}, {g}.mT) | ~mixed_precision(F.linear, {f}, {f}).relu() | ~mixed_precision(torch.bmm, {f}, {f}.mT) * 2 | ~mixed_precision(torch.matmul, {f} + 1, {f}.mT)
"""
LAYERS = """
~F.layer_norm({f}, {f}.shape[-1:]) | ~F.rms_norm({f}, {f}.shape[-1:]) | ~F.group_norm({f}, 1) | ~F.instance_norm({f}) | ~F.batch_norm({f}, None, None, training=True) | ~F.normalize({f}, dim={d})
~F.mse_loss({f}, {g}) | ~F.l1_loss({f}, {g}) | ~F.smooth_l1_loss({f}, {g}) | ~F.huber_loss({f}, {g}, reduction="sum") | ~F.binary_cross_entropy_with_logits({f}, {g}) | ~F.kl_div({f}, {g}.softmax(-1), reduction="sum")
~F.cross_entropy({f}, torch.full_like({f}[:, 0], {p}, dtype=torch.int64) % {f}.size(1)) | ~F.nll_loss({f}, torch.full_like({f}[:, 0], {p}, dtype=torch.int64) % {f}.size(1)) | ~F.margin_ranking_loss({f}, {g}, {f}) | ~F.soft_margin_loss({f}, {g}) | ~F.pairwise_distance({f}, {g}) | ~F.poisson_nll_loss({f}, {g})
~F.dropout({f}, 0.0) | F.dropout({f}, 1.0) | torch.rand_like({f}) < 2 | torch.randint_like({x}, 3, 4) | F.dropout({f}, 0.5, training=False) | torch.bernoulli(torch.ones_like({f})) | ~F.local_response_norm({f}, 2)
~F.cosine_embedding_loss({f}, {f}, {f}.new_ones({f}.size(0))) | ~F.triplet_margin_loss({f}, {g}, {f}) | ~F.gumbel_softmax({f}, hard=True).sum(-1) | ~F.cross_entropy({f}, {f}.softmax(1), label_smoothing=0.1)
"""
RESIZE = """
~F.interpolate({f}, scale_factor=2) | ~F.interpolate({f}, size={q}) | ~F.interpolate({f}, scale_factor=2, mode="linear") | ~F.interpolate({f}, size=(3, {q}), mode="bilinear") | ~F.interpolate({f}, scale_factor=1.5, mode="bilinear", align_corners=True)
~F.interpolate({f}, size=(5, {q}), mode="bicubic") | ~F.interpolate({f}, size=(4, 3), mode="area") | ~F.interpolate({f}, scale_factor=0.5, mode="nearest-exact") | ~F.interpolate({f}, size=(3, 7), mode="bilinear", antialias=True)
~F.interpolate({f}, size=(2, 3, 4), mode="trilinear") | {x} + F.pad({x}, (1, 0), mode="reflect")[..., 1:] | F.pad({f}, ({q}, {p}), mode="reflect") | F.pad({f}, (1, {p}), mode="replicate") | F.pad({f}, (1, {p}), mode="circular")
F.pad({f}, (1, 1, 0, 1), mode="reflect") | F.pad({f}, (2, 1, 1, 3), mode="replicate") | F.pad({f}, (1, 0, 1, 0, 0, 1), mode="replicate") | F.pad({f}, (-1, 1), mode="circular") | F.pad({f}, ({k}, {k}), mode="replicate")
F.max_pool2d({f}, 2) | F.max_pool2d({f}, 3, 2, 1) | ~F.avg_pool2d({f}, 2) | ~F.avg_pool2d({f}, 3, 2, 1, count_include_pad=False) | ~F.avg_pool2d({f}, 2, ceil_mode=True) | F.max_pool1d({f}, 2) | ~F.avg_pool1d({f}, 2, 1)
F.max_pool3d({f}, 2) | ~F.adaptive_avg_pool2d({f}, ({q}, 2)) | F.adaptive_max_pool2d({f}, (2, {q})) | ~F.adaptive_avg_pool1d({f}, {q}) | !F.max_pool2d({f}, 2, return_indices=True)[1] | ~F.lp_pool2d({f}, 2, 2) | F.max_pool2d({f}, 2, dilation=2)
F.pixel_shuffle({f}, 2) | F.pixel_unshuffle({f}, 2) | F.channel_shuffle({f}, 1) | F.unfold({f}, 2) | F.fold(F.unfold({f}, 2), {f}.shape[-2:], 2) | ~F.grid_sample({f}, {f}.new_zeros({f}.size(0), 2, 2, 2)) | ~F.affine_grid({f}.flatten()[:6].view(1, 2, 3), (1, 1, 2, 3))
~F.conv1d({f}, {f}[:1]) | ~F.conv2d({f}, {f}[:1, :, :1, :1]).relu() | ~F.conv_transpose2d({f}, {f}[:1].transpose(0, 1)[:, :, :2, :2]) | F.max_unpool1d(*F.max_pool1d({f}, 2, return_indices=True), 2)
~F.avg_pool3d({f}, 2) | ~F.adaptive_avg_pool3d({f}, (1, {q}, 2)) | F.adaptive_max_pool3d({f}, (1, 2, {q})) | ~F.interpolate({f}, size=(2, 3), mode="nearest-exact") | ~F.interpolate({f}, size=(2, 3, 2), mode="nearest-exact") | ~F.interpolate({f}, size=(2, 3, 2), mode="nearest")
F.pad({f}, (1, 1, 1, 0, 0, 1), mode="reflect") | F.pad({f}, (1, 2, 0, 1), mode="replicate") | ~F.interpolate({f}, size=(4, {q}), mode="bilinear", align_corners=True) | ~F.interpolate({f}, scale_factor=2, mode="bicubic", align_corners=True) | ~F.interpolate({f}, size=({q}, 2, 3), mode="trilinear", align_corners=True)
~F.interpolate({f}.reshape(1, 1, -1), scale_factor=2, mode="linear") | ~F.interpolate({f}.reshape(1, 1, -1), size=7, mode="linear", align_corners=True) | ~F.interpolate({f}.reshape(1, 1, -1), size=5, mode="nearest-exact") | ~F.interpolate({f}.reshape(1, 1, -1), size={q})
~F.interpolate({f}.reshape(1, 1, -1, {f}.size(-1)), size=(3, {q}), mode="bicubic") | ~F.interpolate({f}.reshape(1, 1, -1, {f}.size(-1)), scale_factor=2, mode="bilinear") | ~F.interpolate({f}.reshape(1, 1, -1, {f}.size(-1)), size=(4, 5), mode="nearest-exact") | ~F.interpolate({f}.reshape(1, 1, 1, -1, {f}.size(-1)), size=(2, 3, {q}), mode="nearest-exact")
~F.interpolate({f}.reshape(1, 1, 1, -1, {f}.size(-1)), size=(2, 3, {q}), mode="trilinear") | F.pad({f}.reshape(1, 1, -1), ({q}, {p}), mode="reflect") | F.pad({f}.reshape(1, 1, -1), ({q}, {p}), mode="replicate") | F.pad({f}.reshape(1, 1, -1, {f}.size(-1)), (1, 0, {p}, 1), mode="reflect")
F.pad({f}.reshape(1, 1, 1, -1, {f}.size(-1)), (1, {p}, {q}, 0, 1, 1), mode="replicate") | F.pad({f}.reshape(1, 1, -1, 1, {f}.size(-1)), (1, 1, 0, 0, {p}, 1), mode="reflect") | F.adaptive_max_pool3d({f}.reshape(1, 1, -1, 1, {f}.size(-1)), (2, 1, {q})) | ~F.adaptive_avg_pool3d({f}.reshape(1, 1, -1, 1, {f}.size(-1)), (3, 1, {q}))
F.max_pool3d({f}.reshape(1, 1, -1, 1, {f}.size(-1)), (2, 1, 2), 1) | ~F.avg_pool3d({f}.reshape(1, 1, -1, 1, {f}.size(-1)), (2, 1, 2), 1) | F.adaptive_max_pool2d({f}.reshape(1, 1, -1, {f}.size(-1)), (2, {q})) | ~F.grid_sample({f}.reshape(1, 1, -1, {f}.size(-1)), torch.linspace(-1.25, 1, 6, dtype={f}.dtype, device={f}.device).reshape(1, 1, 3, 2))
~F.avg_pool2d({f}, (2, 3), (1, 2), (1, 1), divisor_override=3) | F.max_pool2d({f}, 3, 1, 1, ceil_mode=True) | ~F.adaptive_avg_pool2d({f}, 1) | ~F.adaptive_avg_pool2d({f}, (5, 3)) | F.adaptive_max_pool1d({f}, {q}) | F.max_pool3d({f}, (1, 2, 2), 1)
"""
GRAD_MODES = """
without_gradient(torch.Tensor.view, {x}, -1) | without_gradient(torch.select, {x}, {d}, {k}) | without_gradient(torch.transpose, {x}, {d}, {e}) | without_gradient(torch.unsqueeze, {x}, {d}) | without_gradient(torch.mul, {x}, {y})
without_gradient(torch.narrow, {x}, {d}, {k}, 1) | without_gradient(torch.Tensor.expand, {x}, 2, *{x}.shape) | without_gradient(torch.diagonal, {x}, {k}) | without_gradient(torch.chunk, {x}, 2, {d})[0] | {x} + without_gradient(torch.squeeze, {x})
without_gradient(torch.Tensor.detach, {x}) | without_gradient(torch.flatten, {x}) | {x} * without_gradient(torch.sum, {x}, {d}, True) | with_gradient(torch.Tensor.view, {x}, -1) | with_gradient(torch.select, {x}, {d}, {k}) | with_gradient(torch.mul, {x}, {y})
{x} - without_gradient(torch.amax, {x}, {d}, True) | without_gradient(torch.Tensor.clone, {x}) | without_gradient(torch.Tensor.contiguous, {x}) | {x}.detach() | {x}.data | {x}.detach() + {x} | {x} - {x}.detach() | with_gradient(torch.add, {x}.detach(), {x})
"""
AUTOGRAD = """
~square({f}) | ~product({f}, {g}, {s}) | ~doubled({f}) | ~square({f} * {g}) | partly_written({f}, {q}) | hooked({f}, {s}) | hooked({f}, {s}) * {g} | ~recomputed(torch.sin, {f}) | ~recomputed(torch.mul, {f}, {g}) | ~recomputed(square, {f})
~gradient_inside(torch.sin, {f}) | ~gradient_inside(square, {f}) | {f} * gradient_inside(torch.neg, {f}) | ~square({f}[{k}:]) | square({f}).detach() | ~hooked(square({f}), 2) | ~recomputed(F.softmax, {f}, {d}) | partly_written({f}.mT, {q}) | ~doubled({f}.T) | ~product({f}, {f}, {s})
~recomputed(lambda r: r.exp().sum({d}), {f}) | partly_written({f}, {q}).view(-1) | ~without_gradient(square, {f}) | hooked({f}.expand(2, *{f}.shape), {s}) | ~recomputed(lambda r: partly_written(r, 2).cumsum({d}), {f}) | ~mixed_precision(square, {f} @ {f}.mT)
"""
TRANSFORMS = """
~torch.vmap(torch.sin)({f}) | ~torch.vmap(lambda r: r.softmax(-1))({f}) | torch.vmap(lambda r: r.sum(-1))({x}) | torch.vmap(lambda r: r.flip(0), {d}, {d})({x}) | torch.vmap(lambda r: r * 2, {d}, {e})({x}) | torch.vmap(torch.add, (0, None))({x}, {y}) | torch.vmap(torch.vmap(lambda r: r + 1))({x})
~torch.func.grad(lambda r: (r * r * {s}).sum())({f}) | ~torch.func.grad(lambda r: r.sin().sum())({f}) | ~torch.func.jvp(torch.sin, ({f},), ({f},))[1] | ~torch.func.vjp(torch.tanh, {f})[1]({f})[0] | torch.func.vjp(lambda r: r[{k}:] * 2, {f})[0] | ~torch.func.jacrev(torch.cos)({f}.flatten()[:4])
torch.func.jacfwd(lambda r: r.cumsum(0))({f}.flatten()[:4]) | ~torch.func.hessian(lambda r: (r ** 3).sum())({f}.flatten()[:3]) | torch.vmap(lambda r: r.clone().mul_(2))({x}) | torch.vmap(lambda r: r.cumsum(0))({x}) | torch.vmap(lambda r: r.unsqueeze(0).expand(2, *r.shape))({x})
torch.vmap(lambda r: torch.where(r > {s}, r, 0))({x}) | torch.vmap(lambda r: r.amax(-1))({x}) | ~torch.vmap(lambda r: F.layer_norm(r, r.shape[-1:]))({f}) | ~torch.vmap(torch.func.grad(lambda r: (r * r).sum()))({f}) | ~torch.func.grad(lambda r: square(r).sum())({f}) | torch.vmap(lambda r: r.to(torch.float64))({x})
~torch.vmap(lambda r: r @ r.mT)({f}) | ~torch.vmap(lambda r: r.var(-1))({f}) | torch.vmap(lambda r: r.roll(1, 0))({x}) | torch.vmap(lambda r: r.diagonal())({x}) | torch.vmap(lambda r: torch.stack([r, r * 2]), out_dims=1)({x}) | torch.vmap(lambda r: r.tril())({x}) | torch.vmap(lambda r: r.view(-1)[{k}:])({x}.contiguous())
"""
OUT = """
with_out(torch.add, {x}, {y}) | with_out(torch.mul, {x}, {s}) | with_out(torch.sum, {x}, {d}) | with_out(torch.cumsum, {x}, {d}) | with_out(torch.maximum, {x}, {y}) | ~with_out(torch.sin, {f}) | with_out(torch.neg, {x}) | with_out(torch.clamp, {x}, {s}) | with_out(torch.index_select, {x}, {d}, {m})
with_new_out(torch.add, {x}, {y}) | with_new_out(torch.mul, {x}, {s}) | with_new_out(torch.sum, {x}, {d}) | with_new_out(torch.cumsum, {x}, {d}) | with_new_out(torch.amax, {x}, {d}) | ~with_new_out(torch.exp, {f}) | with_new_out(torch.tril, {x}) | with_new_out(torch.gather, {x}, {d}, {h}) | with_new_out(torch.where, {o}, {x}, {y})
~with_out(torch.matmul, {f}, {f}.mT) | ~with_new_out(torch.matmul, {f}, {f}.mT) | with_new_out(torch.abs, {x}) | with_out(torch.amin, {x}, {d}) | !with_new_out(torch.gt, {x}, {y}) | !with_out(torch.argmax, {x}, {d}) | ~with_out(torch.mean, {f}, {d}) | with_new_out(torch.sub, {x}, {y}) | ~with_out(torch.pow, {f}, 2)
"""
OUT_WRITES = """
torch.mul({x}, {s}, out={x}) | torch.add({x}, {y}, out={x}) | torch.neg({x}, out={x}) | torch.add({y}, {z}, out={x}[{k}:]) | torch.mul({y}, 2, out={x}.T) | torch.sum({y}.clone(), 0, out={x}[0]) | torch.maximum({x}, {y}, out={x}) | torch.index_select({y}.clone(), 0, {m}, out={x})
"""
COMPLEX = """
{c} * {y} | {c} + {s} | {c}.conj() | {c}.real | {c}.imag | ~{c}.abs() | ~{c}.angle() | torch.view_as_real({c}) | {c}.conj() * {c} | ~{c}.exp() | {c}.sum({d}) | ~{c} / 3 | -{c} | {c}.conj().real + 1
~{c}.abs().sqrt() | torch.complex({f}.float(), {f}.float()) | {c}.imag.neg() | !{c} == {c} | ~{c} @ {c}.mT | {c}.cumsum({d}) | ~{c}.sgn() | {c}.prod({d}) | ~{c}.sin() | {c}.T.conj() | {c}[..., ::2].conj() | {c}.mH
~{c}.reciprocal() | ~torch.polar({f}.float().abs(), {f}.float()) | {c}.resolve_conj() | {c}.real * {c}.imag | ~{c}.mean({d}) | {c}.conj_physical() | ~{c}.tanh() | {c}.conj().imag * 2 | {c}.flip({d}).conj() | ~{c} ** 2
{c}.sum({d}, dtype=torch.complex128) | {c}.real.clone().add_(1) | torch.view_as_complex(torch.view_as_real({c}) * 2) | {c}.mul(2j) | {c}.conj().T | !{c} != {y} | {c}.index_select({d}, {m}) | {c}.roll({k}, {d}) | {c}[..., {k}:] | {c}.tril() | {c} * {c}.real | {c}.to(torch.complex128)
"""
SYMBOLS = """
{x}[{k}] | {x}[{k}:] | {x}[:{k}] | {x}[:, {k}:] | {x}[:, -{q}:] | {x}[..., {k}] | {x}.narrow({d}, {k}, 1) | {x}.select({d}, {k}) | {x}.roll({k}, {d}) | {x}.diagonal({k}) | {x}.tril({k}) | {x} + {k} | {x} * {s}
{x}[{k}:{k}] | {x}[{k}:, {k}] | F.pad({x}, ({k}, {k})) | {x}.unfold({d}, {q}, 1) | {x}.reshape({x}.size(0), -1) | {x}.reshape(-1, {x}.size(-1)) | {x}.expand({q}, *{x}.shape) | {x}.repeat({q}, *[1] * {x}.dim()) | {x} * {x}.size({d})
torch.arange({k}, {x}.size(0), device={x}.device) | torch.full(({q}, 2), {s}, device={x}.device) | {x}.sum({d}) * {k} | {x} // {k} | {x} % {k} | {x}.clamp({k}, {s}) | {x}.view(*{x}.shape, 1) | {x}.new_zeros({x}.size(0), {q}) | {x}.split({q}, {d})[0]
{x}.narrow({d}, {x}.size({d}) // 2, 1) | {x}[{x}.size(0) // 2] | {x}[:{x}.size(0) // 2] | {x}[{k} % {x}.size(0)] | {x}[-1 - {k} % {x}.size(0)] | {x}.flatten() | {x}.sum({d}, keepdim=True) | {x}.transpose({d}, {e}).reshape(-1)
torch.cat([{x}, {x}[{k}:]], 0) | {x}.index_select({d}, {w}.flatten() % {x}.size({d})) | torch.where({x} > {s}, {x}, {k}) | {x}.as_strided(({q},), (1,), 0) | {x}.chunk({q}, {d})[0] | {x}.repeat_interleave({q}, {d}) | {x}[..., {k}::{q}]
{x}[..., None] * {k} | torch.eye({q}, device={x}.device) * {s} | {x}.triu({k}).sum() | torch.select_scatter({x}, {x}.select({d}, 0), {d}, {k}) | {x}.mean() if {x}.size(0) > {k} else {x}.sum() | {x} / ({k} * 2 + 1) | {x}.unflatten(0, ({q}, -1))
"""
SYMBOLIC_WRITES = """
{x}[{k}] = {s} | {x}[{k}:] = {s} | {x}[:{k}].add_({s}) | {x}.select({d}, {k}).mul_(2) | {x}.narrow({d}, {k}, 1).zero_() | {x}[:, {k}] = {x}[:, 0] | {x}[..., {k}:{k}] = {s} | {x}.diagonal({k}).fill_({s}) | {x}.mul_({k})
"""

FOREACH = """
torch._foreach_add_([{x}, {y}], {s}) | torch._foreach_mul_([{x}, {x}[0]], 2) | torch._foreach_add_([{x}, {x}[{k}:]], 1) | torch._foreach_copy_([{x}[0], {x}[1]], [{x}[1], {x}[0]]) | torch._foreach_neg_([{x}, {y}])
torch._foreach_sub_([{x}, {y}], [{y}, {x}]) | torch._foreach_add_([{x}[0], {x}[-1]], [{x}[-1], {x}[0]], alpha={k}) | torch._foreach_zero_([{x}[:1], {y}]) | torch._foreach_clamp_min_([{x}, {x}.T], 0) | torch._foreach_addcmul_([{x}, {x}[0]], [{y}, {y}[0]], [{z}, {z}[0]], 2)
"""


def parse(table: str) -> list[str]:
    """The templates of a table."""
    rows = [row for row in table.strip().splitlines() if row.strip()]
    return [entry.strip() for row in rows for entry in row.split(" | ") if entry.strip()]


TABLES = {
    "pointwise": parse(POINTWISE),
    "reduction": parse(REDUCTIONS),
    "scan": parse(SCANS),
    "view": parse(VIEWS),
    "move": parse(MOVES),
    "cast": parse(CASTS),
    "index": parse(INDEX),
    "scatter": parse(SCATTER),
    "sort": parse(SORT),
    "inplace": parse(IN_PLACE),
    "matmul": parse(MATMUL),
    "layer": parse(LAYERS),
    "resize": parse(RESIZE),
    "autograd": parse(AUTOGRAD),
    "transform": parse(TRANSFORMS),
    "out": parse(OUT),
    "out write": parse(OUT_WRITES),
    "complex": parse(COMPLEX),
    "grad mode": parse(GRAD_MODES),
    "symbol": parse(SYMBOLS),
    "symbolic write": parse(SYMBOLIC_WRITES),
    "foreach": parse(FOREACH),
}
# kind of program → the tables of its lines, with weights; "table" draws ops of the fuser's tables
KINDS: dict[str, dict[str, int]] = {
    "pointwise": {"pointwise": 5, "table": 5, "cast": 2, "view": 1},
    "reduction": {"reduction": 5, "pointwise": 3, "view": 1},
    "scan": {"scan": 4, "pointwise": 2, "reduction": 1},
    "view": {"view": 5, "pointwise": 2, "reduction": 1, "move": 2},
    "move": {"move": 5, "pointwise": 2, "view": 2},
    "index": {"index": 4, "pointwise": 2, "view": 1},
    "scatter": {"scatter": 4, "pointwise": 2, "view": 1},
    "sort": {"sort": 4, "pointwise": 2, "view": 1},
    "inplace": {"inplace": 5, "view": 3, "pointwise": 2, "foreach": 1},
    "matmul": {"matmul": 3, "pointwise": 3, "reduction": 1},
    "layer": {"layer": 3, "pointwise": 2, "view": 1},
    "resize": {"resize": 4, "pointwise": 2},
    "complex": {"complex": 5, "view": 1, "pointwise": 1},
    "autograd": {"autograd": 5, "inplace": 2, "view": 2, "pointwise": 2, "grad mode": 1},
    "transform": {"transform": 5, "view": 1, "pointwise": 2},
    "out": {"out": 4, "out write": 2, "view": 2, "pointwise": 1},
    "symbol": {"symbol": 5, "symbolic write": 2, "pointwise": 2, "reduction": 1},
    "subclass": {"pointwise": 4, "reduction": 2, "view": 3, "move": 1, "inplace": 2, "matmul": 1},
    "grad mode": {"grad mode": 5, "view": 2, "pointwise": 2, "reduction": 1},
    "shared": {"inplace": 4, "view": 4, "pointwise": 2, "foreach": 1},
    "error": {"pointwise": 2, "view": 1},
    "mixed": {
        "pointwise": 3,
        "table": 1,
        "reduction": 2,
        "scan": 1,
        "view": 2,
        "move": 2,
        "cast": 1,
        "index": 1,
        "scatter": 1,
        "sort": 1,
        "inplace": 1,
        "matmul": 1,
        "layer": 1,
        "resize": 1,
    },
}
WEIGHTS = {"pointwise": 2, "view": 2, "inplace": 2, "mixed": 4, "error": 0.3}
# the last line of a program of kind "error": eager refuses the index
ERRORS = parse(
    """
{x}.index_select({d}, {m} + 1) | {x}.transpose(0, {d})[{n} + 1] | {x}.transpose(0, {d})[{n} - 1] | {x}.gather({d}, {h} + 1) | {x}.gather({d}, {h} - 1) | F.embedding({m} + 1, {f})
{x}.scatter({d}, {h} + 1, 1) | {x}.scatter_add({d}, {h} - 1, {x}) | {x}.index_add({d}, {m} + 1, {x}.index_select({d}, {m})) | {x}.transpose(0, {d}).index_put(({n} + 1,), {x}.new_ones(()))
{x}.take({m} + {x}.numel()) | F.one_hot({w}.abs() % 4 + 1, 4) | {x}.index_fill({d}, {m} + 1, 1)
"""
)
