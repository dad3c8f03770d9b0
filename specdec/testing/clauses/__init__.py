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
    """Raises: ConfigError for an unknown id, and for one whose clause is about another kind of plugin."""
    known = [check.id for check in iter_checks()]
    for id_ in ids:
        if id_ not in known:
            raise ConfigError(f"there is no check {id_!r}.{did_you_mean(id_, known)}", available=", ".join(known))
        subject = next(subject for subject in Subject if subject.letter == id_[0])
        if subject not in subjects:
            here = ", ".join(sorted({one.words for one in subjects}))
            raise ConfigError(f"{id_} is about another kind of plugin ({subject.words}; here: {here})")
