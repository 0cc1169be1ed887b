"""Quantized tensors in files.

In: paths or a checkpoint's tensors by name. Out: `QuantTensor`s and plain tensors.

    gguf.py  gguf_header.py   GGUF files
    checkpoint_layouts.py     compressed-tensors, ModelOpt, DeepSeek and gpt-oss layouts
    safetensors_io.py         save and load our own layout
    lfs_pointer.py            detects Git LFS pointer files
"""
