"""From a configuration to a language model: target, drafter, verifier and depth policy, each looked up by name."""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import structlog
import torch

from specdec.backends import Backend
from specdec.backends.cuda.device import nvidia_here
from specdec.checkpoints import (
    Checkpoint,
    TensorSpec,
    Weights,
    audit,
    canonical_names,
    fingerprint,
    locate,
    text_config,
)
from specdec.checkpoints.quantised import DecodedCache, formats_of
from specdec.config import Choice, RunConfig, TargetConfig, structure_choice, structure_options
from specdec.contract import (
    DepthPolicySpec,
    DrafterSpec,
    ForwardPass,
    Guarantee,
    ModelInfo,
    ModelSpec,
    Need,
    Parity,
    PrepareEnv,
    Verifier,
)
from specdec.decoding.cost_table import DEPTHS, CostTable, warm_up
from specdec.decoding.result import Result
from specdec.decoding.session import Session, Stream
from specdec.errors import CheckpointError, PluginError, PromptError, SpecdecError, UnsupportedError
from specdec.models.causal_lm import CausalLM, DecoderModel
from specdec.models.parity import probe_rows
from specdec.records.cost_file import costs_of
from specdec.records.probes import unproved
from specdec.registry import registry
from specdec.text import Tokenizer

log = structlog.get_logger(__name__)

FIXED_DEPTH, ADAPTIVE_DEPTH = Choice("fixed", {"depth": 2}), Choice("adaptive")  # what depth.name = "auto" becomes


class LanguageModel:
    """A target with everything that was composed around it. Make one with ``specdec.load``.

    Attributes:
        info: what the target is and what its backend promises.
        tokenizer: text to token ids and back.
        notices: what a user should know about this load (a downgrade, unused tensors, a fallback), one sentence each.
        config: the configuration it was built from.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        target: ForwardPass,
        tokenizer: Tokenizer,
        drafter_spec: DrafterSpec,
        drafter_config: Any,
        drafter_shared: Any,
        verifier: Verifier,
        depth_spec: DepthPolicySpec,
        depth_config: Any,
        depth_shared: Any = None,
        notices: Sequence[str],
    ) -> None:
        self.config = config
        self.target = target
        self.tokenizer = tokenizer
        self.drafter_spec = drafter_spec
        self.drafter_config = drafter_config
        self.drafter_shared = drafter_shared
        self.verifier = verifier
        self.depth_spec = depth_spec
        self.depth_config = depth_config
        self.depth_shared = depth_shared
        self.notices = list(notices)

    @property
    def info(self) -> ModelInfo:
        """What the target is."""
        return self.target.info

    @property
    def capacity(self) -> int:
        """Tokens that a session can hold: the model's limit, or ``target.capacity`` where that is lower."""
        asked = self.config.target.capacity
        return self.info.max_positions if asked is None else min(asked, self.info.max_positions)

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt. Raises: PromptError when it is empty or has ids outside the vocabulary."""
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens:
            raise PromptError("the prompt is empty", try_="at least one character, or one token id")
        for token in tokens:
            if type(token) is not int or not 0 <= token < self.info.vocab_size:
                raise PromptError(f"token id {token!r} is outside the vocabulary (0 to {self.info.vocab_size - 1})")
        return tokens

    def session(self) -> Session:
        """An empty session: feed, generate, feed more, rewind."""
        return Session(self)

    def stream(self, prompt: str | Sequence[int], *, chat: bool = False, **settings: Any) -> Stream:
        """Generate in a fresh session; iterate for text, then read ``result``.

        Args:
            prompt: text or token ids.
            chat: put the text into the checkpoint's chat template as a user's message.
            **settings: fields of ``specdec.config.GenerationConfig``; the configuration's where not given.
        """
        if chat:
            if not isinstance(prompt, str):
                raise PromptError("a chat prompt is text, got token ids")
            text = self.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
            prompt = self.tokenizer.encode(text, add_special=False)
        return self.session().stream(prompt, **settings)

    def generate(self, prompt: str | Sequence[int], *, chat: bool = False, **settings: Any) -> Result:
        """``stream`` to its end."""
        return self.stream(prompt, chat=chat, **settings).result


@attrs.frozen(kw_only=True)
class LoadedTarget:
    """A target and what was learnt while it was loaded."""

    target: ForwardPass
    tokenizer: Tokenizer
    notices: tuple[str, ...]


def build(config: RunConfig) -> LanguageModel:
    """Load the target and compose the pipeline. Raises: SpecdecError with the reason, whatever is wrong."""
    verifier_spec = registry().verifier(config.verifier.name, asked_by=_asked_by(config.verifier, "verifier"))
    verifier_config: Any = structure_choice(config.verifier, verifier_spec.config, "verifier")
    verifier = registry().make_verifier(verifier_spec, verifier_config)
    depth_spec, depth_config = _depth_policy(FIXED_DEPTH if config.depth.name == "auto" else config.depth)
    named_drafter = None
    if config.drafter.name != "auto":  # a wrong name should not wait for gigabytes of weights
        named_drafter = registry().drafter(config.drafter.name, asked_by=_asked_by(config.drafter, "drafter"))

    loaded = load_target(config)
    info = loaded.target.info
    drafter_spec = named_drafter or registry().drafter("mtp" if info.mtp_layers else "ngram", asked_by="drafter = auto")
    _check_needs(drafter_spec, info)
    drafter_config: Any = structure_choice(config.drafter, drafter_spec.config, "drafter")
    notices = list(loaded.notices)

    def load_second(asked: TargetConfig) -> tuple[ForwardPass, Tokenizer]:
        second = load_target(attrs.evolve(config, target=asked))
        notices.extend(f"{asked.model}: {notice}" for notice in second.notices)
        return second.target, second.tokenizer

    env = PrepareEnv(target=loaded.target, tokenizer=loaded.tokenizer, load=load_second, notices=notices)
    prepare, shared = drafter_spec.prepare, None
    if prepare is not None:
        shared = _constructed("drafter", drafter_spec.name, lambda: prepare(drafter_config, env))
    lm = LanguageModel(
        config=config,
        target=loaded.target,
        tokenizer=loaded.tokenizer,
        drafter_spec=drafter_spec,
        drafter_config=drafter_config,
        drafter_shared=shared,
        verifier=verifier,
        depth_spec=depth_spec,
        depth_config=depth_config,
        notices=notices,
    )
    lm.session()  # a drafter or policy that cannot start should say so now
    known = functools.cache(lambda file: costs_of(lm, lm.notices, file))

    def costs(file: str | None = None) -> CostTable:  # in this form costs() and costs(None) measure once
        return known(file)

    if config.depth.name == "auto" and _may_adapt(lm, costs):
        lm.depth_spec, lm.depth_config = _depth_policy(ADAPTIVE_DEPTH)
    prepare = lm.depth_spec.prepare
    if prepare is not None:
        priced = attrs.evolve(env, costs=costs, notices=lm.notices)
        lm.depth_shared = _constructed("depth policy", lm.depth_spec.name, lambda: prepare(lm.depth_config, priced))
        warm_up(lm, range(getattr(lm.depth_config, "max_depth", max(DEPTHS)) + 1))  # it looks at the clock
    registry().make_depth_policy(lm.depth_spec, lm.depth_config, lm.depth_shared)
    return lm


def _depth_policy(choice: Choice) -> tuple[DepthPolicySpec, Any]:
    spec = registry().depth_policy(choice.name, asked_by=_asked_by(choice, "depth"))
    return spec, structure_choice(choice, spec.config, "depth")


def _may_adapt(lm: LanguageModel, costs: Callable[[], CostTable]) -> bool:
    """Whether a depth that follows the clock leaves the output alone here, and has costs to start from.

    Where not, the reason is a notice. Without a drafter nothing is said: every result says that there was none.
    """
    if lm.drafter_spec.name == "none":
        return False
    if lm.verifier.guarantee is not Guarantee.EXACT:
        reason = f"with the verifier {lm.config.verifier.name!r} the output depends on the depth"
    elif lm.info.parity is not Parity.BITWISE:
        reason = f"with {lm.info.parity.value} parity the output may depend on the depth"
    else:
        try:
            costs()
        except UnsupportedError as error:
            reason = str(error)
        else:
            return True
    depth = FIXED_DEPTH.options["depth"]
    lm.notices.append(f'depth.name = "auto" drafts {depth} tokens in every cycle: {reason}')
    return False


def load_target(config: RunConfig) -> LoadedTarget:
    """Open the checkpoint, audit it, and put its weights on a backend."""
    asked = config.target
    foreign = registry().forward_pass(asked)
    folder = locate(asked.model, revision=asked.revision)
    if foreign is not None:
        return LoadedTarget(target=foreign, tokenizer=Tokenizer.from_folder(folder), notices=tuple(foreign.notices))
    if asked.backend != "auto":  # a wrong name is said before the model_type is: the backend may read it itself
        registry().backend(asked.backend, asked_by="target.backend")
    with_notices: list[str] = []
    checkpoint = Checkpoint.open(folder)
    model_config = text_config(checkpoint.config)
    spec = family_of(model_config, checkpoint.path)
    family = spec.parse(model_config)
    tokenizer = Tokenizer.from_folder(folder)
    backend = _backend(asked.backend, with_notices, asked.backend_options, asked.source)
    dtype, dtype_reason = backend.choose_dtype(asked.dtype, _stored_dtype(checkpoint))
    decoded: torch.dtype = getattr(torch, dtype, torch.bfloat16)
    source = _audited(checkpoint, spec.tensors(family), asked.decoded_cache, decoded, with_notices)
    ops = backend.ops(dtype)
    keeps: frozenset[str] = getattr(ops, "keeps", frozenset())
    weights = Weights(source, canonical_names(source.names), dtype=decoded, keeps=keeps)
    model: DecoderModel = spec.build(family, weights, ops)
    info = ModelInfo(
        family=spec.name,
        vocab_size=family.vocab_size,
        hidden_size=family.hidden_size,
        max_positions=family.max_positions,
        mtp_layers=family.mtp_layers,
        max_rows=ops.max_rows,
        parity=ops.parity,
        parity_reason=ops.parity_reason,
        backend=backend.name,
        device=backend.device,
        dtype=dtype,
        dtype_reason=dtype_reason,
        kernels=ops.kernels,
        fingerprint=fingerprint(checkpoint),
    )
    target = CausalLM(info, model)
    if ops.kernels.startswith("torch reference"):
        with_notices.append(f"slow kernels: {ops.kernels}")
    if info.parity is Parity.BITWISE and getattr(ops, "exact_needs_probe", False):
        missing = unproved(target.info, asked.model)
        if missing is not None:
            target.info = attrs.evolve(target.info, parity=Parity.NUMERIC, parity_reason=missing)
            with_notices.append(f"parity is numeric: {missing}")
    if target.info.parity is Parity.BITWISE:
        broken = probe_rows(target)
        if broken is not None:
            target.info = attrs.evolve(target.info, parity=Parity.NUMERIC, parity_reason=broken)
            with_notices.append(f"parity downgraded from bitwise to numeric: {broken}")
            log.warning("parity_downgraded", reason=broken)
    if tokenizer.vocab_size > info.vocab_size:
        raise CheckpointError(
            f"tokenizer.json has {tokenizer.vocab_size} tokens, the model only {info.vocab_size}", folder=folder
        )
    return LoadedTarget(target=target, tokenizer=tokenizer, notices=tuple(with_notices))


def _audited(
    checkpoint: Checkpoint,
    expected: Mapping[str, TensorSpec],
    cache_folder: str | None,
    dtype: torch.dtype,
    notices: list[str],
) -> Checkpoint:
    """What the weights are taken from, audited: the checkpoint, or its decoded form in the cache that was asked for."""
    cache, cached = None, None
    if cache_folder is not None:
        if any(found.quantised for found in formats_of(checkpoint).values()):
            cache = DecodedCache(cache_folder, checkpoint, dtype)
            cached, told = cache.find()
            notices += told
        else:
            notices.append("target.decoded_cache is not used: the checkpoint has no quantised weights")
    report = audit(checkpoint if cached is None else cached, expected)
    report.raise_for_errors()
    notices += [notice for notice in report.notices if notice not in notices]  # the cache keeps those of its source
    if cache is None or cached is not None:
        return checkpoint if cached is None else cached
    written = cache.write(report.notices)
    notices.append(f"weights decoded into the cache {cache.path}")
    return written


def family_of(model_config: Mapping[str, Any], folder: Path) -> ModelSpec:
    """The family that reads this ``model_type``. Raises: CheckpointError when config.json has none."""
    model_type = model_config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError("config.json has no 'model_type'", file=folder / "config.json")
    return registry().model(model_type, asked_by=str(folder / "config.json"))


def _stored_dtype(checkpoint: Checkpoint) -> str:
    """The dtype that most weights are stored in; quantised ones count as the one that they stand for."""
    sizes: dict[str, int] = {}
    for found in formats_of(checkpoint).values():
        if found.error is None:
            plain = str(checkpoint.dtype(found.tensors[0])).removeprefix("torch.")
            dtype = plain if found.coding is None else found.coding.stands_for
            sizes[dtype] = sizes.get(dtype, 0) + math.prod(found.shape)
    return max(sizes, key=lambda dtype: sizes[dtype], default="bfloat16")


def _backend(name: str, notices: list[str], options: Mapping[str, Any] | None = None, source: str = "") -> Backend:
    """The backend of that name, or the one that ``auto`` means here; what it has to say joins ``notices``."""
    spec = registry().backend(_auto_backend(notices) if name == "auto" else name, asked_by="target.backend")
    reason = spec.available()
    if reason is not None:
        raise UnsupportedError(f"the {spec.name} backend cannot run here: {reason}", try_='target.backend = "cpu"')
    config: Any = structure_options(options or {}, spec.config, "target.backend_options", source)
    backend: Backend = _constructed("backend", spec.name, lambda: spec.factory(config))
    notices += getattr(backend, "notices", ())
    return backend


def _auto_backend(notices: list[str]) -> str:
    """``metal`` on Apple silicon and ``cuda`` where there is an NVIDIA device, if they can run; else ``cpu``.

    A device that is there and cannot be used is a notice, with the reason; a machine without one is none.
    """
    if (platform.system(), platform.machine()) == ("Darwin", "arm64"):
        name = "metal"
    elif nvidia_here():
        name = "cuda"
    else:
        return "cpu"
    reason = registry().backend(name, asked_by="target.backend = auto").available()
    if reason is None:
        return name
    notices.append(f'target.backend = "auto" runs on the cpu: the {name} backend cannot run here: {reason}')
    return "cpu"


def _check_needs(spec: DrafterSpec, info: ModelInfo) -> None:
    if Need.MTP in spec.needs and not info.mtp_layers:
        raise UnsupportedError(
            f"the drafter {spec.name!r} needs an MTP head, and this {info.family} checkpoint has none",
            try_='drafter.name = "ngram", or a checkpoint that kept its mtp.* tensors',
        )


def _asked_by(choice: Choice, table: str) -> str:
    return f"{choice.source}, key {table}.name" if choice.source else f"{table}.name"


def _constructed(kind: str, name: str, make: Any) -> Any:
    """Run a plugin's constructor; any failure of it names the plugin."""
    try:
        return make()
    except SpecdecError:
        raise
    except Exception as error:
        raise PluginError(f"the {kind} {name!r} failed to start: {type(error).__name__}: {error}") from error
