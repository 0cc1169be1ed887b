"""`fulgurite quantize`: a checkpoint in, a quantized checkpoint that other engines load out.

source.py        a folder or file -> tensors under their Hugging Face names, config.json, tokenizer
gguf_source.py   the same for GGUF files, whose names and layouts are mapped back
weights.py       which tensors are quantized, and what becomes of each
layers.py        runs texts through the model, one layer in memory at a time
observe.py       what a layer's linears see: largest inputs, Hessians; and simulated input rounding
texts.py         texts -> sequences of token ids
pipeline.py      quantize_checkpoint: all of it, layer by layer
report.py        size and perplexity beside the original's, as a table and as JSON
command.py       the options of the command
"""
