"""specdec-transformers: any Hugging Face causal language model as a target of specdec, and specdec in transformers.

``candidates`` gives ``model.generate`` specdec's drafters (assisted generation); ``generate``, as ``custom_generate``,
replaces its loop by specdec's.

Entry point, group ``specdec``: ``transformers = "specdec_transformers"``. Importing this package imports neither
torch nor transformers: the hook runs on every load and imports transformers only for a target that it takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec import hookimpl

if TYPE_CHECKING:
    from specdec.config import TargetConfig
    from specdec.contract import ForwardPass

    from specdec_transformers.assisted import candidates
    from specdec_transformers.own_loop import generate

__all__ = ["candidates", "generate", "specdec_forward_pass"]


@hookimpl
def specdec_forward_pass(target_config: TargetConfig) -> ForwardPass | None:
    """The target on transformers, if requested by name or if no family of specdec reads its model_type."""
    from specdec_transformers.choice import chosen_folder

    folder = chosen_folder(target_config)
    if folder is None:
        return None
    from specdec_transformers.loading import load

    return load(folder, target_config)


def __getattr__(name: str) -> Any:
    if name == "candidates":
        from specdec_transformers.assisted import candidates

        return candidates
    if name == "generate":
        from specdec_transformers.own_loop import generate

        return generate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
