"""specdec: speculative decoding with the same output, at a measured price, open at every joint.

    import specdec

    lm = specdec.load()                 # the embedded model; or a folder, or a hub id
    print(lm.generate("def add(a, b):").text)

Importing this package loads no plugin, no kernel and no configuration; names below are resolved when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from specdec._version import __version__

if TYPE_CHECKING:
    from specdec.api import inspect_checkpoint, load
    from specdec.config import RunConfig, between, load_config, one_of
    from specdec.contract import *
    from specdec.decoding.result import Result
    from specdec.decoding.session import Session
    from specdec.decoding.stream import Stream
    from specdec.errors import SpecdecError
    from specdec.hookspecs import hookimpl
    from specdec.pipeline import LanguageModel

_MODULES = (  # where the names below stand; the first four import no tensor library
    "specdec.contract",
    "specdec.config",
    "specdec.errors",
    "specdec.hookspecs",
    "specdec.api",
    "specdec.pipeline",
    "specdec.decoding.session",
    "specdec.decoding.stream",
    "specdec.decoding.result",
)

__all__ = [
    "BackendSpec",
    "Context",
    "CycleRecord",
    "DepthPolicy",
    "DepthPolicySpec",
    "Draft",
    "DraftHead",
    "Drafter",
    "DrafterEnv",
    "DrafterSnapshot",
    "DrafterSpec",
    "FamilyConfig",
    "ForwardOutput",
    "ForwardPass",
    "Guarantee",
    "LanguageModel",
    "Logits",
    "LogitsProcessor",
    "ModelInfo",
    "ModelSpec",
    "MtpPairs",
    "Needs",
    "Parity",
    "PrepareEnv",
    "ProcessorEnv",
    "ProcessorSpec",
    "Result",
    "RunConfig",
    "Sampling",
    "Session",
    "SpecdecError",
    "Stats",
    "Stream",
    "Verdict",
    "Verifier",
    "VerifierSpec",
    "__version__",
    "between",
    "hookimpl",
    "inspect_checkpoint",
    "load",
    "load_config",
    "one_of",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in map(importlib.import_module, _MODULES):
            if name in vars(module):
                globals()[name] = value = vars(module)[name]
                return value
    raise AttributeError(f"module 'specdec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
