"""Decoding: the draft-verify-commit cycle, its executors, sessions, and results."""
