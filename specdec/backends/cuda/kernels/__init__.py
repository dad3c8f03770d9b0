"""Triton kernels of the CUDA backend: one module per noun, each kernel beside its wrapper and its torch reference.

All of them run in Triton's interpreter on host tensors too (``TRITON_INTERPRET=1`` before the first import).
"""
