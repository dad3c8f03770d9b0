"""The kinds of specs that plugins can register, their hooks, and the checks that a spec must pass."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import attrs

from specdec.contract import BackendSpec, DepthPolicySpec, DrafterSpec, ModelSpec, ProcessorSpec, VerifierSpec
from specdec.errors import PluginError, typed

Spec = DrafterSpec | VerifierSpec | DepthPolicySpec | ProcessorSpec | BackendSpec | ModelSpec

BUILT_INS = (
    "specdec.drafters.none",
    "specdec.drafters.ngram",
    "specdec.drafters.mtp",
    "specdec.drafters.draft_model",
    "specdec.drafters.first_of",
    "specdec.drafters.forced",
    "specdec.drafters.heads.plugin",
    "specdec.verifiers.strict",
    "specdec.verifiers.rejection",
    "specdec.verifiers.margin",
    "specdec.verifiers.typical",
    "specdec.policies.fixed",
    "specdec.policies.adaptive",
    "specdec.processors.grammar",
    "specdec.backends.cpu",
    "specdec.backends.cuda",
    "specdec.backends.metal",
    "specdec.models.families",
)
"""Built-in modules; they register through the same hooks as third-party plugins."""


class Kind(enum.Enum):
    """What a spec describes; the value is the word used in messages."""

    DRAFTER = "drafter"
    VERIFIER = "verifier"
    DEPTH_POLICY = "depth policy"
    PROCESSOR = "logits processor"
    BACKEND = "backend"
    MODEL = "model family"


@attrs.frozen
class KindInfo:
    """How a kind is registered and configured."""

    hook: str
    spec: type[Any]
    key: str | None  # the configuration key that names one
    plural: str
    usual: str | None = None  # what works with every model and machine, for advice
    has_auto: bool = False  # whether the key takes "auto" as well


KINDS: Mapping[Kind, KindInfo] = {
    Kind.DRAFTER: KindInfo("specdec_drafters", DrafterSpec, "drafter.name", "drafters", "ngram", has_auto=True),
    Kind.VERIFIER: KindInfo("specdec_verifiers", VerifierSpec, "verifier.name", "verifiers", "strict"),
    Kind.DEPTH_POLICY: KindInfo(
        "specdec_depth_policies", DepthPolicySpec, "depth.name", "depth_policies", "fixed", has_auto=True
    ),
    Kind.PROCESSOR: KindInfo("specdec_logits_processors", ProcessorSpec, None, "logits_processors"),
    Kind.BACKEND: KindInfo("specdec_backends", BackendSpec, "target.backend", "backends", "cpu", has_auto=True),
    Kind.MODEL: KindInfo("specdec_models", ModelSpec, None, "models"),
}

PUBLISHED: Mapping[tuple[Kind, str | None], tuple[str, str]] = {
    (Kind.BACKEND, "transformers"): ("specdec-transformers", "the plugin that provides 'transformers'"),
    (Kind.MODEL, None): ("specdec-transformers", "which runs every causal language model of transformers"),
}
"""The plugin to install for an unregistered name, and why; None matches every name of the kind."""


def kind_of(spec: Spec) -> Kind:
    """The kind that a spec describes."""
    return next(kind for kind, info in KINDS.items() if isinstance(spec, info.spec))


def names_of(spec: Spec) -> tuple[str, ...]:
    """The names under which a spec is found; for a family, its model types."""
    return tuple(spec.model_types) if isinstance(spec, ModelSpec) else (spec.name,)


def check_specs(info: KindInfo, result: object) -> list[Spec]:
    """A hook's result as a list of specs. Raises: PluginError when it is something else, or a spec has no name."""
    listed = isinstance(result, list | tuple)
    specs: list[Any] = list(result) if listed else [result]  # type: ignore[call-overload]
    wrong = [spec for spec in specs if not isinstance(spec, info.spec)]
    if not listed or wrong:
        other = wrong[0] if wrong else result
        got = f"the class {other.__name__}" if isinstance(other, type) else typed(other)
        raise PluginError(f"{info.hook} returns a list of {info.spec.__name__}, got {got}")
    for spec in specs:
        if not spec.name or spec.name != spec.name.strip() or spec.name == "auto":
            raise PluginError(f"{info.spec.__name__} {spec.name!r}: a name is a word other than 'auto'")
    return specs
