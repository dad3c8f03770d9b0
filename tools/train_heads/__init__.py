"""Trains draft heads for the embedded model; see README.md."""
