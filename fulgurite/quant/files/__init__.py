"""Quantized tensors in files.

In: paths or a checkpoint's tensors by name. Out: `QuantTensor`s and plain tensors.

    gguf.py  gguf_header.py   GGUF files
    checkpoint_layouts.py     reads the layouts of other projects    layouts/   one file per family
    safetensors_io.py         save and load our own layout
    lfs_pointer.py            detects Git LFS pointer files
"""
