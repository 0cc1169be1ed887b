"""Number formats in plain torch: the oracle every quantized kernel is compared with.

In: float tensors, or packed ones from safetensors and GGUF files. Out: `QuantTensor`s, and back.

    format.py      FORMATS, the one table: element, blocks, scales, packing, range, hardware
    shapes.py      shapes of packed data and scales; what doesn't divide
    blocks.py      block maxima, spreading scales, nibbles     minifloat.py   e2m1, e4m3, e5m2, e8m0
    fp8.py  nvfp4.py  mx.py  ints.py  casts.py  gguf.py  gguf_search.py       one codec a family
    codec.py       format -> encode, decode, pack, unpack
    tensor.py      QuantTensor, quantize                       sharding.py    cutting at boundaries
    checks.py      scales that can't be right                  hardware.py    what runs where
    layouts.py     checkpoints as others publish them          storage.py     our own layout
    gguf_header.py gguf_file.py   .gguf files                  error.py       signal to noise
    optional.py    packages only some functions need
"""

from fulgurite.quant.blocks import Codes, Packed
from fulgurite.quant.codec import decode, encode, pack, unpack
from fulgurite.quant.error import signal_to_noise
from fulgurite.quant.format import (
    ALIASES,
    FORMATS,
    WHOLE,
    Element,
    Format,
    Scale,
    describe_formats,
    resolve,
)
from fulgurite.quant.gguf_file import read_gguf
from fulgurite.quant.hardware import features_of, is_native, require_native
from fulgurite.quant.layouts import PublishedWeight, read_weight, weight_names
from fulgurite.quant.regroup import regroup
from fulgurite.quant.storage import load_quantized, save_quantized
from fulgurite.quant.tensor import QuantTensor, quantize

__all__ = [
    "ALIASES",
    "FORMATS",
    "WHOLE",
    "Codes",
    "Element",
    "Format",
    "Packed",
    "PublishedWeight",
    "QuantTensor",
    "Scale",
    "decode",
    "describe_formats",
    "encode",
    "features_of",
    "is_native",
    "load_quantized",
    "pack",
    "quantize",
    "read_gguf",
    "read_weight",
    "regroup",
    "require_native",
    "resolve",
    "save_quantized",
    "signal_to_noise",
    "unpack",
    "weight_names",
]
