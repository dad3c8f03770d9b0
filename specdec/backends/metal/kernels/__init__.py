"""specdec's own kernels for Metal: each one as text, and the same function in MLX operations."""
