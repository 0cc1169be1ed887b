"""PyTorch program → graphs.

In: a function or module and its arguments. Out: torch-level graphs from TorchDynamo, then functional ATen
graphs of forward and backward from AOTAutograd, with input names from the user's program. Graph breaks
come with reasons. The repeated layers of a model are compiled once.

    dynamo.py           entry into TorchDynamo: graph breaks, errors, is_capturing
    direct_call.py      later calls, without TorchDynamo's overhead
    autograd.py         AOTAutograd: functionalize, differentiate, build each graph
    autograd_functions.py  `torch.autograd.Function` as TorchDynamo traces it
    failed_functions.py  functions on which TorchDynamo itself fails
    foreach.py          foreach ops as one op a tensor
    training.py         forward and backward graphs in a small autograd function
    training_signature.py  which training graphs need no more than that
    subclasses.py       tensor subclasses: no symbols in the context of a result
    input_aliasing.py   inputs that share memory, if a graph mutates one of them
    strided_inputs.py   inputs that are slices, if a graph calls as_strided
    input_names.py      input names from the user's program
    blocks.py           repeated layers, compiled once
    units.py            the modules that distributed wrappers (DDP, FSDP) run
    runner.py           runs layers and units compiled while their model runs
    outer_graph.py      the graph around the repeated layers
    compiled_module.py  a compiled nn.Module that is still an instance of its class
"""
