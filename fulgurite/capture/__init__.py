"""A PyTorch program → graphs.

In: a function or module and its arguments. Out: torch-level graphs (TorchDynamo), then functional ATen graphs of
forward and backward (AOTAutograd), with names from the user's program; graph breaks with reasons; the repeated
blocks of a model.

    dynamo.py    the way into TorchDynamo, graph breaks, its errors as ours
    autograd.py  the way through AOTAutograd            names.py   names from the user's program
    blocks.py    equal layers, compiled once            module.py  a compiled nn.Module that is still that module
"""
