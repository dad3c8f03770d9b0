"""Builds a language model from a configuration: target, drafter, verifier and depth policy, each looked up by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from specdec.config import Choice, RunConfig, TargetConfig
from specdec.contract import ForwardPass, Guarantee, Needs, Parity, PrepareEnv
from specdec.decoding.cycle_timing import DEPTHS, costs_of, warm_up
from specdec.decoding.parts import DepthPart, DrafterPart, Parts, make_verifier
from specdec.decoding.result import Result
from specdec.decoding.session import Session
from specdec.decoding.stream import Stream
from specdec.errors import PromptError, UnsupportedError
from specdec.models.loading import load_target
from specdec.records.cost_table import CostTable
from specdec.text import Tokenizer

FIXED_DEPTH, ADAPTIVE_DEPTH = Choice("fixed", {"depth": 2}), Choice("adaptive")  # what depth.name = "auto" becomes


@attrs.frozen(kw_only=True, eq=False)
class LanguageModel(Parts):
    """A target with its drafter, verifier and depth policy, ready to generate. Make one with ``specdec.load``.

    Its parts are the attributes of ``Parts``. A variant over the same weights is made with ``attrs.evolve``.
    """

    def session(self) -> Session:
        """An empty session: feed, generate, feed more, rewind."""
        return Session(self)

    def stream(self, prompt: str | Sequence[int], *, chat: bool = False, **settings: Any) -> Stream:
        """Generate in a fresh session; iterate for text, then read ``result``.

        Args:
            prompt: text or token ids.
            chat: wrap the text as a user message in the checkpoint's chat template.
            **settings: fields of ``specdec.config.GenerationConfig``; the configuration's values if omitted.
        """
        if chat:
            if not isinstance(prompt, str):
                raise PromptError("a chat prompt is text, got token ids")
            text = self.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
            prompt = self.tokenizer.encode(text, add_special=False)
        return self.session().stream(prompt, **settings)

    def generate(self, prompt: str | Sequence[int], *, chat: bool = False, **settings: Any) -> Result:
        """Run ``stream`` to the end and return its result."""
        return self.stream(prompt, chat=chat, **settings).result


def build(config: RunConfig) -> LanguageModel:
    """Load the target and compose the pipeline. Raises: SpecdecError with the reason."""
    verifier = make_verifier(config.verifier)  # wrong names and options fail before gigabytes of weights are read
    depth = DepthPart.of(FIXED_DEPTH if config.depth.name == "auto" else config.depth)
    named = None if config.drafter.name == "auto" else DrafterPart.of(config.drafter)
    loaded = load_target(config)
    target, notices = loaded.target, list(loaded.notices)
    drafter = named or DrafterPart.of(Choice("mtp" if target.info.mtp_layers else "ngram", source="drafter = auto"))
    if isinstance(drafter.spec.needs, Needs):  # else they are known after ``prepare``
        _check_needs(drafter, drafter.spec.needs, target)

    def load_second(asked: TargetConfig) -> tuple[ForwardPass, Tokenizer]:
        second = load_target(attrs.evolve(config, target=asked))
        notices.extend(f"{asked.model}: {notice}" for notice in second.notices)
        return second.target, second.tokenizer

    env = PrepareEnv(target=target, tokenizer=loaded.tokenizer, load=load_second, notices=notices)
    drafter = drafter.prepared(env)
    _check_needs(drafter, drafter.needs, target)
    lm = LanguageModel(
        config=config, target=target, tokenizer=loaded.tokenizer, drafter=drafter, verifier=verifier, depth=depth
    )
    lm.session()  # fail now if a drafter or policy cannot start
    known = functools.cache(lambda file: costs_of(lm, notices, file))

    def costs(file: str | None = None) -> CostTable:  # this form makes costs() and costs(None) share one measurement
        return known(file)

    if config.depth.name == "auto" and _may_adapt(lm, costs, notices):
        depth = DepthPart.of(ADAPTIVE_DEPTH)
    if depth.spec.prepare is not None:
        depth = depth.prepared(attrs.evolve(env, costs=costs))
        warm_up(lm, range(getattr(depth.config, "max_depth", max(DEPTHS)) + 1))  # the policy measures time
    depth.make()
    return attrs.evolve(lm, depth=depth, notices=tuple(notices))


def _may_adapt(lm: Parts, costs: Callable[[], CostTable], notices: list[str]) -> bool:
    """Whether a timing-dependent depth cannot change the output here, and costs are available.

    If not, adds the reason to ``notices``, except without a drafter, where every result says that nothing was drafted.
    """
    if lm.drafter.spec.name == "none":
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
    notices.append(f'depth.name = "auto" drafts {FIXED_DEPTH.options["depth"]} tokens in every cycle: {reason}')
    return False


def _check_needs(drafter: DrafterPart, needs: Needs, target: ForwardPass) -> None:
    unmet = needs.unmet(target.info)
    if unmet is not None:
        kept = ", or a checkpoint that kept its mtp.* tensors" if needs.mtp else ""
        raise UnsupportedError(f"the drafter {drafter.spec.name!r} needs {unmet}", try_=f'drafter.name = "ngram"{kept}')
