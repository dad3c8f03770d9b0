"""The checks, one per clause of ``docs/contract``, in one module per kind of plugin."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from specdec.errors import ConfigError, did_you_mean
from specdec.testing.checks import CHECKS, Check
from specdec.testing.clauses import (  # noqa: F401  (importing them registers the checks)
    depth_policy,
    drafter,
    forward_pass,
    logits_processor,
    model_family,
    observer,
    ops,
    verifier,
)
from specdec.testing.subjects import Subject


def iter_checks(subject: Subject | None = None) -> Iterator[Check]:
    """All checks, or those of one subject, ordered by kind of plugin and number."""
    order = list(Subject)
    for check in sorted(CHECKS.values(), key=lambda one: (order.index(one.subject), int(one.id[1:]))):
        if subject is None or check.subject is subject:
            yield check


def expect_ids(ids: Iterable[str], subjects: Collection[Subject]) -> None:
    """Raises: ConfigError for an id that no check of these kinds of plugins has."""
    known = [check.id for check in iter_checks() if check.subject in subjects]
    for id_ in ids:
        if id_ not in known:
            words = " or ".join(sorted({subject.words for subject in subjects}))
            hint = did_you_mean(id_, known)
            raise ConfigError(f"there is no check {id_!r} of a {words}.{hint}", available=", ".join(known))
