"""Plain-torch operations, one file a family: the definition of each op, right on any device and dtype.

Softmax, norms and the router work in float32, or in float64 when their tensors are float64.
"""
