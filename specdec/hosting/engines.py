"""What a host is to a drafter: facts about its target, a target that runs no passes, and the versions that work."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from typing import Any

import attrs

from specdec.contract import ForwardPass, ModelInfo, Parity, State
from specdec.errors import UnsupportedError


def host_info(
    host: str, vocab_size: int, max_positions: int, *, hidden_size: int = 1, layers: int = 0, gives_hidden: bool = False
) -> ModelInfo:
    """Facts about a host's target. The defaults are those of a host that gives tokens only.

    ``Needs.unmet`` of these facts says which drafters can run in the host, and why another one cannot.
    """
    return ModelInfo(
        family=host,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_positions=max_positions,
        mtp_layers=0,
        layers=layers,
        gives_hidden=gives_hidden,
        max_rows=129,
        parity=Parity.NUMERIC,
        parity_reason=f"{host} runs the passes",
        backend=host,
    )


@attrs.frozen(eq=False)
class HostState(State):
    """The place of a sequence's state, which the host keeps: its length, and no arrays."""

    tokens: Sequence[int]
    capacity: int

    @property
    def length(self) -> int:
        return max(len(self.tokens) - 1, 0)

    def nbytes(self) -> int:
        return 0


class HostTarget(ForwardPass):
    """The target of a drafter in a host: ``info`` is true, and every pass is refused, because the host runs them."""

    def __init__(self, info: ModelInfo) -> None:
        self.info = info

    def _refused(self, *arguments: Any, **options: Any) -> Any:
        raise UnsupportedError(f"in {self.info.family} a drafter cannot run passes of the target: the host runs them")

    new_state = prefill = decode = commit = rewind = snapshot = restore = _refused


def supported(distributions: Sequence[str], first: str, end: str, why: str) -> str:
    """The installed version of a host, if it is from ``first`` up to but not including ``end``.

    Args:
        distributions: names under which it may be installed; the first is the usual one.
        why: what is missing outside of these versions.

    Raises: UnsupportedError if it is not installed, or of another version.
    """
    for name in distributions:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not _numbers(first) <= _numbers(version) < _numbers(end):
            raise UnsupportedError(
                f"{name} {version} is not supported: {why}", try_=f"pip install '{name}>={first},<{end}'"
            )
        return version
    raise UnsupportedError(
        f"{distributions[0]} is not installed", try_=f"pip install '{distributions[0]}>={first},<{end}'"
    )


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version as numbers: ``0.32.0rc1`` is (0, 32, 0)."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
