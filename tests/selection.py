"""How much of a long test the default run includes. ``pyproject.toml`` says what the markers mean."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings

_CI = settings.get_profile("ci").max_examples


def examples(count: int) -> settings:
    """Hypothesis settings for ``count`` examples in CI, and as much fewer in other profiles as those say."""
    return settings(max_examples=max(1, count * settings().max_examples // _CI))


def cases(
    values: Iterable[Any], *, sample: int | Collection[str], name: Callable[[Any], str] = str, mark: str = ""
) -> list[Any]:
    """Values for ``parametrize``, named by ``name``; the first ``sample``, or those of these names, are the sample.

    ``mark`` is put on those outside the sample. Without it the test or its file carries a marker that leaves all
    of them out, and the sample is put back.
    """
    made = []
    for number, value in enumerate(values):
        chosen = number < sample if isinstance(sample, int) else name(value) in sample
        if mark:
            marks = [] if chosen else [getattr(pytest.mark, mark)]
        else:
            marks = [pytest.mark.sample] if chosen else []
        made.append(pytest.param(value, id=name(value), marks=marks))
    return made
