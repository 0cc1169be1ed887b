"""Loading checkpoints: a model name or path in, a model with its weights out.

hub.py                      name -> local path (downloads from the Hugging Face Hub)
checkpoint.py               path -> family, ModelConfig, tensor headers
weight_assignment.py        weight mappings -> the checkpoint tensors that fill each parameter
quantization_config.py      quantization_config of config.json -> method, schemes, ignore lists
safetensors_checkpoint.py   tensors of safetensors files, one handle a shard
saved_tensors.py            tensors of files that fulgurite.quantize.save wrote
gguf_checkpoint.py          tensors and metadata of a GGUF file
checkpoint_tensor.py        header fields of a tensor; its memory-mapped data, read in slices
packed_rows.py              rows of packed weights, selected without unpacking
parameter_formats.py        which parameters stay quantized, and why others don't
load_plan.py                a model on the meta device with the formats that will be held
fill.py                     copies slices of a checkpoint tensor into a (sharded) parameter
quantized.py                copies packed data into a (sharded) quantized parameter
loader.py                   load_model, load_shard
"""
