"""Choose and build the backend for ``target.backend`` on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.backends import Backend
from specdec.config import Choice
from specdec.contract import BackendSpec
from specdec.errors import SpecdecError, UnsupportedError
from specdec.registry import Kind, answers, registry


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
            preference = registry().call(spec, "preference", check=answers.preference)
        except SpecdecError as error:  # one broken plugin must not disable the others
            unusable[spec.name] = error.message
        else:
            if preference is not None:
                wanted.append((-preference, spec))
    for _, spec in sorted(wanted, key=lambda pair: pair[0]):  # stable: ties go to the first registered
        reason = registry().unavailable(spec)
        if reason is None:
            return spec.name, [
                f'target.backend = "auto" runs on the {spec.name}: the {other} backend cannot run here: {why}'
                for other, why in unusable.items()
            ]
        unusable[spec.name] = reason
    raise UnsupportedError("no backend can run here", **unusable)


def make_backend(
    name: str, options: Mapping[str, Any] | None = None, source: str = ""
) -> tuple[Backend, tuple[str, ...]]:
    """Build the backend of that name, or the one that "auto" resolves to, and return it with notices for the user.

    Args:
        options: ``[target.backend_options]``.
        source: the file with these options, for error messages.

    Raises: UnsupportedError with the reason if it cannot run; ConfigError for invalid options; PluginError if it is
        broken.
    """
    notices: list[str] = []
    if name == "auto":
        name, notices = auto_backend()
    spec = registry().backend(name, asked_by="target.backend")
    reason = registry().unavailable(spec)
    if reason is not None:
        raise UnsupportedError(f"the {spec.name} backend cannot run here: {reason}", try_='target.backend = "cpu"')
    config = registry().options(spec, Choice(name, options or {}, source=source), "target.backend_options")
    backend: Backend = registry().call(spec, "factory", config, check=_complete)
    return backend, (*notices, *backend.notices)


def _complete(made: Any) -> Any:
    """What a backend's factory returned, with all attributes of ``Backend``."""
    answers.an(Backend, "a subclass of specdec.backends.Backend")(made)
    lacking = [name for name in Backend.__annotations__ if not hasattr(made, name)]
    if lacking:
        raise answers.Refused(
            f"a {type(made).__name__} without {', '.join(lacking)}", "what specdec.backends.Backend lists"
        )
    for name in ("name", "device"):
        answers.text(getattr(made, name))
    if not answers.sentences(made.dtypes):
        raise answers.Refused("a backend without dtypes", "one of bfloat16, float16 and float32 or more")
    answers.sentences(made.notices)
    return made
