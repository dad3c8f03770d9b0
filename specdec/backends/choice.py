"""Choose and build the backend for ``target.backend`` on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.backends import Backend
from specdec.config import Choice
from specdec.contract import BackendSpec
from specdec.errors import UnsupportedError
from specdec.registry import Kind, calling, reason, registry


def auto_backend() -> tuple[str, list[str]]:
    """Return the available backend of highest preference, and a sentence on each preferred one that cannot run.

    Raises: UnsupportedError if no backend can run.
    """
    wanted: list[tuple[int, BackendSpec]] = []
    unusable: dict[str, str] = {}
    for entry in registry().entries(Kind.BACKEND):
        spec = entry.spec
        assert isinstance(spec, BackendSpec)
        try:
            preference = spec.preference()
        except Exception as error:  # noqa: BLE001 - one broken plugin must not disable the others
            unusable[spec.name] = reason(spec, "preference", error)
        else:
            if preference is not None:
                wanted.append((-preference, spec))
    for _, spec in sorted(wanted, key=lambda pair: pair[0]):  # stable: ties go to the first registered
        unavailable = registry().unavailable(spec)
        if unavailable is None:
            return spec.name, [
                f'target.backend = "auto" runs on the {spec.name}: the {other} backend cannot run here: {why}'
                for other, why in unusable.items()
            ]
        unusable[spec.name] = unavailable
    raise UnsupportedError("no backend can run here", **unusable)


def make_backend(
    name: str, options: Mapping[str, Any] = {}, sources: Mapping[str, str] = {}
) -> tuple[Backend, tuple[str, ...]]:
    """Build the backend of that name, or the one that "auto" resolves to, and return it with notices for the user.

    Args:
        options: ``[target.backend_options]``.
        sources: of these options, as for ``structure_options``.

    Raises: UnsupportedError with the reason if it cannot run; ConfigError for invalid options; PluginError if it is
        broken.
    """
    notices: list[str] = []
    if name == "auto":
        name, notices = auto_backend()
    spec = registry().backend(name, asked_by="target.backend")
    unavailable = registry().unavailable(spec)
    if unavailable is not None:
        raise UnsupportedError(f"the {spec.name} backend cannot run here: {unavailable}", try_='target.backend = "cpu"')
    config = registry().options(spec, Choice(name, options, sources), "target.backend_options")
    with calling(spec, "factory"):
        backend: Backend = spec.factory(config)
    return backend, (*notices, *backend.notices)
