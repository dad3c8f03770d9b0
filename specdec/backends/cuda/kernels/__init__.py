"""Triton kernels of the CUDA backend; each module has a kernel and its wrapper.

All kernels also run on host tensors in Triton's interpreter (``TRITON_INTERPRET=1`` before the first import).
"""
