"""The registry: loads plugins, looks up what they registered, and guards calls into them."""

from specdec.registry import answers
from specdec.registry.guard import Check, Guard, Switch
from specdec.registry.kinds import BUILT_INS, KINDS, PUBLISHED, Kind
from specdec.registry.loading import tracing
from specdec.registry.lookup import Registry, notify_cycle, registry, use_registry
from specdec.registry.origin import Entry, Failure, Origin

__all__ = [
    "BUILT_INS",
    "KINDS",
    "PUBLISHED",
    "Check",
    "Entry",
    "Failure",
    "Guard",
    "Kind",
    "Origin",
    "Registry",
    "Switch",
    "answers",
    "notify_cycle",
    "registry",
    "tracing",
    "use_registry",
]
