"""Loading plugins, looking up what they registered, and guarding the calls to them."""

from specdec.registry.plugins import (
    BUILT_INS,
    KINDS,
    PUBLISHED,
    Entry,
    Failure,
    Kind,
    Registry,
    constructed,
    notify_cycle,
    registry,
    tracing,
    use_registry,
)

__all__ = [
    "BUILT_INS",
    "KINDS",
    "PUBLISHED",
    "Entry",
    "Failure",
    "Kind",
    "Registry",
    "constructed",
    "notify_cycle",
    "registry",
    "tracing",
    "use_registry",
]
