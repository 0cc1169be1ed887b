"""Hand-written operators: tensors in, tensors out, opaque to capture.

Each operator is a torch custom op (`fulgurite.op`) with a fake kernel and a reference in plain
torch, which the tests compare with and which runs on every device. Faster kernels are in the
operator's own table, `<OP>_KERNELS`: device type -> function. A kernel returns `NotImplemented` for
what it does not support, and the reference runs (`registry.py`).

    attention/     attention over paged KV caches        mla/         multi-head latent attention
    gemm/          GEMM with quantized operands          quantize/    casts to quantized formats
    grouped_gemm/  rows sorted by expert                 moe/         routing, experts, combine
    sampling/      tokens from logits                    elementwise/ norms, RoPE, activations
    dispatch/      expert-parallel all-to-all            conv/        packed convolutions on the CPU
    recurrent/     LSTM, GRU and RNN on the CPU
    common/        what kernels share: device functions, launches, the C++ library
    tuning/        launch configs, a table a device family
    include/       C++ headers of the CPU kernels
"""
