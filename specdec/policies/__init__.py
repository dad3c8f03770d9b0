"""Built-in depth policies, one per file."""
