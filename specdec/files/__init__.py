"""Read untrusted files within limits, and keep files of our own."""
