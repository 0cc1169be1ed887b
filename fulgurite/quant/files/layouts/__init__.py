"""Readers of the quantized layouts that other projects publish, one file per family.

In: the stored tensors of one weight (`StoredParts`). Out: a `PackedWeight` in a format of `FORMATS`,
or a `DenseWeight` with the reason why no format holds it. `checkpoint_layouts.py` has the table.

    stored.py              names and tensors of a weight, results    section.py   config.json's section
    integers.py            integer codes of any width -> formats     kv_scales.py KV-cache scales
    compressed_tensors.py  modelopt.py  fp8.py  awq.py  gptq.py  bitsandbytes.py  torchao.py  gpt_oss.py
"""
