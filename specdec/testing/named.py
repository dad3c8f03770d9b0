"""From a registered name to what is checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specdec.config import Choice, structure_choice
from specdec.contract import BackendSpec, ModelSpec
from specdec.errors import SpecdecError, UnknownNameError, UnsupportedError, did_you_mean
from specdec.registry import Entry, Kind, registry
from specdec.testing.registry import AnySubject, OpsSubject, Subject, as_subject

_SUBJECTS = {
    Kind.DRAFTER: Subject.DRAFTER,
    Kind.VERIFIER: Subject.VERIFIER,
    Kind.DEPTH_POLICY: Subject.DEPTH_POLICY,
    Kind.BACKEND: Subject.OPS,
}
_DTYPES = ("float32", "bfloat16")


def subjects_named(
    name: str, config: Any = None, options: Mapping[str, Any] | None = None
) -> tuple[list[tuple[str, Subject, AnySubject]], list[str]]:
    """Everything registered as ``name`` (a plugin's distribution counts too), and notes about what cannot be checked.

    Raises: UnknownNameError when there is none; UnsupportedError when nothing about it can be checked; PluginError when
        its plugin failed to load.
    """
    entries = registry().entries()
    found = [entry for entry in entries if name in (entry.spec.name, entry.origin.distribution)]
    if not found:
        for failure in registry().failures:
            if failure.fatal and failure.stands_for(name):
                registry().drafter(name, asked_by="specdec check")  # raises with the plugin's own error
        known = sorted({entry.spec.name for entry in entries})
        raise UnknownNameError(
            f"nothing is registered as {name!r}.{did_you_mean(name, known)}", available=", ".join(known)
        )
    subjects: list[tuple[str, Subject, AnySubject]] = []
    notes: list[str] = []
    for entry in found:
        _add(entry, config, options, subjects, notes)
    if not subjects:
        raise UnsupportedError(f"there is nothing to check about {name!r}", reason="; ".join(notes))
    return subjects, notes


def _add(
    entry: Entry,
    config: Any,
    options: Mapping[str, Any] | None,
    subjects: list[tuple[str, Subject, AnySubject]],
    notes: list[str],
) -> None:
    spec = entry.spec
    label = f"{entry.kind.value} {spec.name}"
    subject = _SUBJECTS.get(entry.kind)
    if subject is None or isinstance(spec, ModelSpec):
        notes.append(
            f"{label} needs a checkpoint, so it was not checked; parametrize_checks(forward_pass=...) takes a target"
        )
        return
    if config is None:
        config = structure_choice(Choice(spec.name, dict(options or {})), spec.config, f"check.{spec.name}")
    if not isinstance(spec, BackendSpec):
        subjects.append((label, subject, as_subject(subject, spec, config)))
        return
    reason = spec.available()
    if reason is not None:
        notes.append(f"{label} was not checked: {reason}")
        return
    backend = spec.factory(config)
    for dtype in _DTYPES:
        try:
            backend.choose_dtype(dtype, dtype)
        except SpecdecError as refused:
            notes.append(f"{label} was not checked in {dtype}: {refused.message}")
            continue
        subjects.append((f"{label}, {dtype}", subject, OpsSubject(make=_ops_of(backend, dtype))))


def _ops_of(backend: Any, dtype: str) -> Callable[[], Any]:
    return lambda: backend.ops(dtype)
