"""Fused copies between tensors and flat buffers against torch's operators, on a GPU: `__main__`.

Imports `harness`.
"""
