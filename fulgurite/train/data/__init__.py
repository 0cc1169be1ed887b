"""Text in, batches out.

find_sources ─▶ read_documents ─▶ tokenize_sources ─▶ PackedDataset ─▶ Loader ─▶ Batch
sources.py      sources.py        token_file.py       packing.py       loader.py

demo.py        text that comes with an install       encoding.py      texts to token ids
tokenizer.py   trains or copies a tokenizer          token_format.py  layouts of token files
dataset.py     the splits of a config                order.py         a permutation of each epoch
"""

from __future__ import annotations

from fulgurite.train.data.dataset import open_dataset
from fulgurite.train.data.loader import Loader, collate
from fulgurite.train.data.packing import Dataset, PackedDataset, Sample
from fulgurite.train.data.tokenizer import prepare_tokenizer

__all__ = [
    "Dataset",
    "Loader",
    "PackedDataset",
    "Sample",
    "collate",
    "open_dataset",
    "prepare_tokenizer",
]
