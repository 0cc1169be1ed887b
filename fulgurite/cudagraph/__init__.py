"""CUDA graphs: capture a function of tensors once, then replay it in one launch.

capture.py    capture_graph, the only place that captures; samplers and decode steps call it, too
memory.py     memory that captures share, and which of their outputs are still held
seeds.py      seeds of random kernels, new at every replay
attention_seeds.py  seeds of attention's dropout, on the host or on the device
replay.py     one captured call: inputs read in place or copied, outputs copied or shared
capture_call.py  one call captured: static buffers, a warm-up, the capture
timing.py     host and device time of a call
decision.py   whether capturing a function pays
graphed.py    GraphedFunction: a function that is captured after some calls, and replayed
"""

from fulgurite.cudagraph.capture import (
    Capture,
    CapturedCall,
    CapturedGraph,
    CudaCapturedCall,
    GraphPool,
    capture_graph,
)
from fulgurite.cudagraph.capture_call import GraphInterface
from fulgurite.cudagraph.decision import CUDAGRAPH_MODES, CudaGraphMode
from fulgurite.cudagraph.graphed import GraphedFunction
from fulgurite.cudagraph.memory import CUDA, CaptureBackend, CaptureMemory, StaticAddresses
from fulgurite.cudagraph.replay import OutputMode, ResultTail
from fulgurite.cudagraph.timing import CallTime, CudaStopwatch, Stopwatch

__all__ = [
    "CUDA",
    "CUDAGRAPH_MODES",
    "CallTime",
    "Capture",
    "CaptureBackend",
    "CaptureMemory",
    "CapturedCall",
    "CapturedGraph",
    "CudaCapturedCall",
    "CudaGraphMode",
    "CudaStopwatch",
    "GraphInterface",
    "GraphPool",
    "GraphedFunction",
    "OutputMode",
    "ResultTail",
    "StaticAddresses",
    "Stopwatch",
    "capture_graph",
]
