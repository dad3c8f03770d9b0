"""specdec's Metal kernels, each as source text, with a reference in MLX operations."""
