"""Loading checkpoints: a model name or path in, a model with its weights out.

hub.py                      name -> local path (downloads from the Hugging Face Hub)
checkpoint.py               path -> family, ModelConfig and weight assignments
safetensors_checkpoint.py   tensors of safetensors files
gguf_checkpoint.py          tensors and metadata of a GGUF file
checkpoint_tensor.py        one memory-mapped tensor, read in slices
fill.py                     copies slices of a checkpoint tensor into a (sharded) parameter
quantized.py                weights that stay quantized: linears and embeddings
quantized_experts.py        weights that stay quantized: stacked experts
loader.py                   load_model, load_shard
"""
