"""The registry: loads plugins, looks up what they registered, and names them in errors."""

from specdec.registry.kinds import BUILT_INS, KINDS, PUBLISHED, Kind
from specdec.registry.lookup import Registry, calling, notify_cycle, reason, registry, use_registry
from specdec.registry.parts import checked_draft, checked_verdict
from specdec.registry.plugins import Entry, Failure, Origin

__all__ = [
    "BUILT_INS",
    "KINDS",
    "PUBLISHED",
    "Entry",
    "Failure",
    "Kind",
    "Origin",
    "Registry",
    "calling",
    "checked_draft",
    "checked_verdict",
    "notify_cycle",
    "reason",
    "registry",
    "use_registry",
]
