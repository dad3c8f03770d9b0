"""From a configuration to a language model: target, drafter, verifier and depth policy, each looked up by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import structlog

from specdec.config import Choice, RunConfig, TargetConfig, structure_choice
from specdec.contract import (
    DepthPolicySpec,
    DrafterSpec,
    ForwardPass,
    Guarantee,
    ModelInfo,
    Need,
    Parity,
    PrepareEnv,
    Verifier,
)
from specdec.decoding.cost_table import DEPTHS, CostTable, warm_up
from specdec.decoding.result import Result
from specdec.decoding.session import Session, Stream
from specdec.errors import PromptError, UnsupportedError
from specdec.models.loading import load_target
from specdec.records.cost_file import costs_of
from specdec.registry import constructed, registry
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
        shared = constructed("drafter", drafter_spec.name, lambda: prepare(drafter_config, env))
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
        lm.depth_shared = constructed("depth policy", lm.depth_spec.name, lambda: prepare(lm.depth_config, priced))
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


def _check_needs(spec: DrafterSpec, info: ModelInfo) -> None:
    if Need.MTP in spec.needs and not info.mtp_layers:
        raise UnsupportedError(
            f"the drafter {spec.name!r} needs an MTP head, and this {info.family} checkpoint has none",
            try_='drafter.name = "ngram", or a checkpoint that kept its mtp.* tensors',
        )


def _asked_by(choice: Choice, table: str) -> str:
    return f"{choice.source}, key {table}.name" if choice.source else f"{table}.name"
