"""The CUDA backend, measured: ``python -m benchmarks.cuda --help``."""
