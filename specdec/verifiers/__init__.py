"""Built-in verifiers, one per file."""
