"""Subjects of checks: the kinds of plugins, given as a registered name, a spec, an object or a factory."""

from __future__ import annotations

import enum
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, ClassVar

import attrs

from specdec.config import RunConfig, TargetConfig, structure_options
from specdec.contract import (
    NO_NEEDS,
    DepthPolicy,
    DepthPolicySpec,
    DrafterSpec,
    ForwardPass,
    LogitsProcessor,
    ModelSpec,
    Needs,
    PrepareEnv,
    ProcessorSpec,
    Verifier,
    VerifierSpec,
)
from specdec.errors import ConfigError, SpecdecError, UnknownNameError, UnsupportedError, did_you_mean
from specdec.models.loading import foreign_target, load_target
from specdec.records.cost_table import CostTable
from specdec.registry import Entry, calling, registry
from specdec.registry.parts import DrafterPart
from specdec.testing.table_model import TableModel, second_model


class Subject(enum.Enum):
    """A kind of plugin: the letter of its clause ids, and the name of its contract page."""

    DRAFTER = ("D", "drafter")
    VERIFIER = ("V", "verifier")
    FORWARD_PASS = ("F", "forward_pass")
    DEPTH_POLICY = ("P", "depth_policy")
    OPS = ("O", "ops")
    LOGITS_PROCESSOR = ("L", "logits_processor")
    OBSERVER = ("S", "observer")  # it sees
    MODEL_FAMILY = ("M", "model_family")

    def __init__(self, letter: str, document: str) -> None:
        self.letter = letter  # the first of its clause ids
        self.document = document  # its page in docs/contract, and its argument of ``parametrize_checks``

    @property
    def words(self) -> str:
        """What a message calls it."""
        return {"forward_pass": "target", "ops": "backend"}.get(self.document, self.document.replace("_", " "))


@attrs.frozen(kw_only=True, eq=False)
class PluginSubject:
    """How to build a plugin.

    Attributes:
        make: may return the same one every time. It takes what the factory of a spec takes beside the options: for a
            drafter the sequence's DrafterEnv, for a logits processor its ProcessorEnv.
        needs: of a drafter.
        prepare: makes what the drafters of one pipeline have in common, for a target.
        shared: makes what the depth policies of one pipeline have in common, and ``make`` takes it; None: nothing.
        known: what its checks have computed for each other.
    """

    kind: Subject
    make: Callable[..., Any]
    needs: Needs = NO_NEEDS
    prepare: Callable[[ForwardPass], Any] = lambda target: None
    shared: Callable[[], Any] | None = None
    known: dict[object, Any] = attrs.field(factory=dict, init=False, repr=False)


@attrs.frozen(kw_only=True, eq=False)
class ModelFamilySubject:
    """A model family; ``config`` is a small config.json that it takes, if it does not take the kit's."""

    kind: ClassVar[Subject] = Subject.MODEL_FAMILY
    spec: ModelSpec
    config: Mapping[str, Any] | None = None


AnySubject = PluginSubject | ModelFamilySubject

_TYPES: Mapping[Subject, tuple[type, ...]] = {
    Subject.DRAFTER: (DrafterSpec,),
    Subject.VERIFIER: (VerifierSpec, Verifier),
    Subject.FORWARD_PASS: (ForwardPass,),
    Subject.DEPTH_POLICY: (DepthPolicySpec, DepthPolicy),
    Subject.LOGITS_PROCESSOR: (ProcessorSpec, LogitsProcessor),
    Subject.MODEL_FAMILY: (ModelSpec,),
}
"""What plugins of the kind are instances of."""
OBSERVES = "specdec_cycle"  # the hook of an observer
EXAMPLE = "example"
"""A class of options may have these: ``specdec check`` uses them if none are given."""
TABLE = "table"
"""The name by which options ask for a second model of the kit."""
_BYTES = 257  # ids that the kit's tokenizer has


def subject_of(plugin: Any) -> Subject | None:
    """The kind of a spec or an object; None for a factory, which may build anything."""
    if isinstance(plugin, AnySubject):
        return plugin.kind
    for subject, types in _TYPES.items():
        if isinstance(plugin, types):
            return subject
    return Subject.OBSERVER if not inspect.isclass(plugin) and hasattr(plugin, OBSERVES) else None


def as_subject(subject: Subject, given: Any, config: Any = None) -> AnySubject:
    """The subject that checks take, from a spec (with its config), an object or a factory.

    Raises: PluginError if the spec's plugin fails meanwhile.
    """
    if isinstance(given, AnySubject):
        return given
    if isinstance(given, ModelSpec):
        return ModelFamilySubject(spec=given)
    if isinstance(given, DrafterSpec | VerifierSpec | DepthPolicySpec | ProcessorSpec):
        with calling(given, "config, needs or prepare"):
            return _from_spec(subject, given, given.config() if config is None else config)
    if subject is Subject.DRAFTER:
        return _from_drafter_factory(given)
    single = isinstance(given, Verifier | ForwardPass | DepthPolicy | LogitsProcessor) or not callable(given)
    return PluginSubject(kind=subject, make=(lambda *env: given) if single else given)


def _from_spec(subject: Subject, spec: Any, options: Any) -> PluginSubject:
    make, prepare = partial(spec.factory, options), getattr(spec, "prepare", None)
    if isinstance(spec, DrafterSpec):
        part = DrafterPart(spec=spec, config=options)
        known = part if isinstance(spec.needs, Needs) else part.prepared(prepare_env(TableModel.random(mtp=True)))
        return PluginSubject(
            kind=subject, make=make, needs=known.needs, prepare=lambda target: part.prepared(prepare_env(target)).shared
        )
    if prepare is None:
        return PluginSubject(kind=subject, make=make)
    table = CostTable(verify={1: 0.010, 4: 0.012, 8: 0.015}, draft={0: 0.0, 1: 0.001, 6: 0.006}, commit=0.0005)
    env = PrepareEnv(target=TableModel.random(mtp=True), costs=lambda: table)
    return PluginSubject(kind=subject, make=make, shared=lambda: prepare(options, env))


def _from_drafter_factory(factory: Any) -> PluginSubject:
    """A factory takes the sequence's environment or nothing; it may have an attribute ``needs``."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(factory).parameters.values()
    takes_env = any(one.kind in positional and one.default is inspect.Parameter.empty for one in parameters)
    make = factory if takes_env else (lambda env: factory())
    return PluginSubject(kind=Subject.DRAFTER, make=make, needs=getattr(factory, "needs", NO_NEEDS))


def prepare_env(target: ForwardPass) -> PrepareEnv:
    """What a drafter's ``prepare`` gets in the kit: a tokenizer, and ``load`` for a model named ``table``."""
    tokenizer = byte_tokenizer(min(target.info.vocab_size, _BYTES))

    def load(asked: TargetConfig) -> tuple[ForwardPass, Any]:
        if asked.model != TABLE:
            raise UnsupportedError(
                f"the conformance kit loads no checkpoints; a drafter asks for {asked.model!r}",
                try_=f'model = "{TABLE}", a small model of the kit',
            )
        return second_model(target.info.vocab_size), tokenizer

    return PrepareEnv(target=target, tokenizer=tokenizer, load=load)


@cache
def byte_tokenizer(vocab: int) -> Any:
    """A tokenizer of ``vocab`` tokens: bytes, and an end token."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    from specdec.text import Tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: max(vocab - 1, 1)]
    core = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if vocab > 1:
        core.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return Tokenizer(core)


# --- registered names ------------------------------------------------------------------------------------------------

_DTYPES = ("float32", "bfloat16")


def registered_subjects(name: str, options: Mapping[str, Any] | None = None) -> tuple[list[AnySubject], list[str]]:
    """Everything registered as ``name`` (or by the distribution of that name), and notes about what cannot be checked.

    Raises: UnknownNameError if there is none; UnsupportedError if nothing about it can be checked; PluginError if its
        plugin failed to load.
    """
    entries = registry().entries()
    found = [entry for entry in entries if name in (entry.spec.name, entry.origin.distribution)]
    observers = [
        plugin
        for word, plugin in registry().hooks()
        if word == "observer" and name in (plugin.name, plugin.origin.distribution)
    ]
    if not found and not observers:
        asked = structure_options({"backend": name, **(options or {})}, TargetConfig, f"check.{name}")
        if (foreign := foreign_target(asked)) is not None:
            return [as_subject(Subject.FORWARD_PASS, foreign.target)], []
        for failure in registry().failures:
            if failure.fatal and failure.stands_for(name):
                registry().drafter(name, asked_by="specdec check")  # raises the plugin's own error
        known = sorted({entry.spec.name for entry in entries})
        raise UnknownNameError(
            f"nothing is registered as {name!r}.{did_you_mean(name, known)}", available=", ".join(known)
        )
    notes: list[str] = []
    subjects = [one for entry in found for one in _of_entry(entry, options, notes)]
    subjects += [as_subject(Subject.OBSERVER, plugin.plugin) for plugin in observers]
    if not subjects:
        raise UnsupportedError(f"there is nothing to check about {name!r}", reason="; ".join(notes))
    return subjects, notes


def _of_entry(entry: Entry, options: Mapping[str, Any] | None, notes: list[str]) -> Iterator[AnySubject]:
    spec: Any = entry.spec
    label, where = f"{entry.kind.value} {spec.name}", f"check.{spec.name}"
    if isinstance(spec, ModelSpec):
        if not options:
            notes.append(f"{label} was checked without a checkpoint; try specdec check {spec.name} -s model=FOLDER")
            yield as_subject(Subject.MODEL_FAMILY, spec)
            return
        loaded = load_target(RunConfig(target=structure_options(options, TargetConfig, where)))
        if loaded.target.info.family != spec.name:
            raise ConfigError(f"the checkpoint's family is {loaded.target.info.family!r}, not {spec.name!r}")
        yield as_subject(Subject.FORWARD_PASS, loaded.target)
        return
    example = dict(getattr(spec.config, EXAMPLE, {}))
    if example and not options:
        shown = ", ".join(f"{key} = {json.dumps(value)}" for key, value in example.items())
        notes.append(f"{label} was checked with its example's options: {shown}; -s gives others")
    config = structure_options(options or example, spec.config, where)
    if (kind := subject_of(spec)) is not None:
        yield as_subject(kind, spec, config)
    elif (unavailable := registry().unavailable(spec)) is not None:
        notes.append(f"{label} was not checked: {unavailable}")
    else:
        backend = spec.factory(config)
        for dtype in _DTYPES:
            try:
                backend.choose_dtype(dtype, dtype)
                yield PluginSubject(kind=Subject.OPS, make=partial(backend.ops, dtype))
            except SpecdecError as refused:
                notes.append(f"{label} was not checked in {dtype}: {refused.message}")
