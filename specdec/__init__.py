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
    from specdec.contract import (
        BackendSpec,
        Context,
        CycleRecord,
        DepthPolicy,
        DepthPolicySpec,
        Draft,
        Drafter,
        DrafterEnv,
        DrafterSnapshot,
        DrafterSpec,
        DraftHead,
        FamilyConfig,
        ForwardOutput,
        ForwardPass,
        GreedyCycle,
        GreedyCycles,
        GreedyStart,
        Guarantee,
        Logits,
        LogitsProcessor,
        ModelInfo,
        ModelSpec,
        Need,
        Parity,
        PrepareEnv,
        ProcessorEnv,
        ProcessorSpec,
        Sampling,
        Stats,
        Verdict,
        Verifier,
        VerifierSpec,
    )
    from specdec.decoding.result import Result
    from specdec.decoding.session import Session, Stream
    from specdec.errors import SpecdecError
    from specdec.hookspecs import hookimpl
    from specdec.pipeline import LanguageModel

_HOME = {
    "specdec.api": ("inspect_checkpoint", "load"),
    "specdec.config": ("RunConfig", "between", "load_config", "one_of"),
    "specdec.contract": (
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
        "FamilyConfig",
        "ForwardOutput",
        "ForwardPass",
        "GreedyCycle",
        "GreedyCycles",
        "GreedyStart",
        "Guarantee",
        "Logits",
        "LogitsProcessor",
        "ModelInfo",
        "ModelSpec",
        "Need",
        "Parity",
        "PrepareEnv",
        "ProcessorEnv",
        "ProcessorSpec",
        "Sampling",
        "Stats",
        "Verdict",
        "Verifier",
        "VerifierSpec",
    ),
    "specdec.errors": ("SpecdecError",),
    "specdec.hookspecs": ("hookimpl",),
    "specdec.pipeline": ("LanguageModel",),
    "specdec.decoding.session": ("Session", "Stream"),
    "specdec.decoding.result": ("Result",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

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
    "GreedyCycle",
    "GreedyCycles",
    "GreedyStart",
    "Guarantee",
    "LanguageModel",
    "Logits",
    "LogitsProcessor",
    "ModelInfo",
    "ModelSpec",
    "Need",
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
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
