"""LSTM, GRU and RNN layers of float32 numbers in inference, on the CPU.

In: the projected inputs of all steps, packed recurrent weights, and the first state. Out: the states of all
steps, and the last ones.

    ops.py    the operator: schema, fake rule, reference
    cpu.py    calls of the C++ kernel (`include/recurrent.h`)
"""
