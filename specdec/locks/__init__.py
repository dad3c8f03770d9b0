"""Locks that survive what happens to a program that embeds the library: interruptions and forks."""

from specdec.locks.fork_safe import ForkSafeLock

__all__ = ["ForkSafeLock"]
