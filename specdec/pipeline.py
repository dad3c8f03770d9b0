"""Builds a language model from a configuration: target, drafter, verifier and depth policy, each looked up by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import attrs

from specdec.checking import checked
from specdec.config import Choice, RunConfig, TargetConfig
from specdec.contract import OTHER_HEAD, ForwardPass, Guarantee, Needs, Parity, PrepareEnv
from specdec.decoding.cycle_timing import DEPTHS, costs_of, warm_up
from specdec.decoding.parts import CallSettings, DepthPart, DrafterPart, Parts, Prompt, make_verifier
from specdec.decoding.result import Result, html_table
from specdec.decoding.session import Session
from specdec.decoding.stream import Stream
from specdec.errors import PromptError, UnsupportedError
from specdec.logs import get_logger
from specdec.models.loading import load_target
from specdec.records.cost_table import CostTable
from specdec.registry import calling
from specdec.text import Tokenizer

log = get_logger(__name__)

FIXED_DEPTH, ADAPTIVE_DEPTH = Choice("fixed", {"depth": 2}), Choice("adaptive")  # what depth.name = "auto" becomes


@attrs.frozen(kw_only=True, eq=False)
class LanguageModel(Parts):
    """A target with its drafter, verifier and depth policy, ready to generate. Make one with ``specdec.load``.

    Its parts are the attributes of ``Parts``. A variant over the same weights is made with ``attrs.evolve``.
    """

    def session(self) -> Session:
        """An empty session: feed, generate, feed more, rewind."""
        return Session(self)

    @checked(PromptError)
    def stream(self, prompt: Prompt, *, chat: bool = False, **settings: Unpack[CallSettings]) -> Stream:
        """Generate in a fresh session; iterate for text, then read ``result``.

        Args:
            prompt: text or token ids, as a sequence or a 1-d array of integers.
            chat: wrap the text as a user message in the checkpoint's chat template.
            **settings: fields of ``specdec.config.GenerationConfig``; the configuration's values if omitted. Also
                ``prediction``, a text that the output is expected to repeat, such as the file that it edits, and
                ``depth``, draft tokens per cycle in place of the depth policy.
        """
        if chat:
            if not isinstance(prompt, str):
                raise PromptError("a chat prompt is text, got token ids")
            prompt = self.chat_prompt([{"role": "user", "content": prompt}])
        return self.session().stream(prompt, **settings)

    @checked(PromptError)
    def generate(self, prompt: Prompt, *, chat: bool = False, **settings: Unpack[CallSettings]) -> Result:
        """Generate a whole continuation, and return its text, tokens and counters.

        Args: as for ``stream``.

        Raises: PromptError for an unusable prompt or setting; PluginError when a plugin fails that decides the output.
        """
        return self.stream(prompt, chat=chat, **settings).result

    @checked(PromptError)
    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        template: Mapping[str, Any] | None = None,
        **settings: Unpack[CallSettings],
    ) -> Result:
        """Answer a conversation in a fresh session; ``Conversation`` keeps its state between turns.

        Args:
            messages: ``{"role": "user", "content": "..."}``, oldest first.
            template: variables of the chat template, such as ``{"enable_thinking": False}``.
            **settings: as for ``stream``.

        Raises: as ``generate``, and PromptError when the checkpoint has no chat template or it fails.
        """
        return self.stream(self.chat_prompt(messages, **(template or {})), **settings).result

    def chat_prompt(self, messages: Sequence[Mapping[str, str]], **template: Any) -> list[int]:
        """The token ids of a conversation, up to where the answer begins. Raises: PromptError."""
        if not messages:
            raise PromptError("there are no messages", try_='[{"role": "user", "content": "..."}]')
        return self.tokenizer.encode(self.tokenizer.apply_chat_template(messages, **template), add_special=False)

    def _facts(self) -> list[tuple[str, str]]:
        info = self.info
        return [
            ("model", f"{self.config.target.model} ({info.family}, {info.dtype} on {info.device or info.backend})"),
            ("drafter", f"{self.drafter.spec.name}, depth policy {self.depth.spec.name}"),
            ("verifier", f"{self.config.verifier.name}, guarantee {self.verifier.guarantee.value}"),
            ("parity", info.parity.value),
            ("tokens", f"{self.capacity} in a session"),
            *(("notice", notice) for notice in self.notices),
        ]

    def __repr__(self) -> str:
        return f"<LanguageModel {', '.join(f'{label}: {value}' for label, value in self._facts()[:4])}>"

    def _repr_html_(self) -> str:
        return html_table(self._facts())


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
        notices.extend(f"{asked.model}: {notice}" for notice in second.notices if notice not in loaded.notices)
        return second.target, second.tokenizer

    env = PrepareEnv(target=target, tokenizer=loaded.tokenizer, load=load_second, notices=notices)
    drafter = drafter.prepared(env)
    _check_needs(drafter, drafter.needs, target)
    lm = LanguageModel(
        config=config,
        target=target,
        tokenizer=loaded.tokenizer,
        drafter=drafter,
        verifier=verifier,
        depth=depth,
        room=_room(target, drafter.needs, config.target.capacity, notices),
    )
    lm.session()  # fail now if a drafter or policy cannot start
    known = functools.cache(lambda file: costs_of(lm, notices, file))

    def costs(file: str | None = None) -> CostTable:  # this form makes costs() and costs(None) share one measurement
        return known(file)

    if config.depth.name == "auto" and _may_adapt(lm, costs, notices):
        depth = DepthPart.of(ADAPTIVE_DEPTH)
    if depth.spec.prepare is not None:
        depth = depth.prepared(attrs.evolve(env, costs=costs))
        asked = getattr(depth.config, "max_depth", None)  # the policy measures time
        deepest = min(asked, target.info.max_rows) if type(asked) is int else max(DEPTHS)
        warm_up(lm, range(deepest + 1))
    depth.make()
    log.info(
        "pipeline_built",
        drafter=drafter.spec.name,
        verifier=config.verifier.name,
        depth=depth.spec.name,
        guarantee=verifier.guarantee.value,
    )
    for notice in notices:
        log.info("notice", text=notice)
    return attrs.evolve(lm, depth=depth, notices=tuple(notices))


def _room(target: ForwardPass, needs: Needs, asked: int | None, notices: list[str]) -> int | None:
    """Tokens of a session that the device's memory has room for; a notice if they are fewer than the model takes.

    Raises: UnsupportedError if that is less than what ``target.capacity`` asks for, or nothing.
    """
    with calling(("target", target.info.family), "most_tokens"):
        room = target.most_tokens(needs)
    wanted = target.info.max_positions if asked is None else min(asked, target.info.max_positions)
    if room is None or room >= wanted:
        return room
    smaller = "a smaller or quantised checkpoint, or a device with more free memory"
    if asked is not None or room < 1:
        tokens = "a session of one token" if asked is None else f"a session of {wanted} tokens"
        raise UnsupportedError(
            f"{tokens} does not fit the free memory of {target.info.device}",
            fits=f"{room} tokens beside the weights",
            try_=f"target.capacity = {room}, {smaller}" if room else smaller,
        )
    notices.append(
        f"a session holds {room} of the model's {wanted} tokens: there is no more free memory on {target.info.device}"
    )
    return room


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
    depth = FIXED_DEPTH.options["depth"]
    notices.append(f'depth.name = "auto" is a fixed depth of {depth} (draft tokens per cycle, at most): {reason}')
    return False


def _check_needs(drafter: DrafterPart, needs: Needs, target: ForwardPass) -> None:
    unmet = needs.unmet(target.info)
    if unmet is not None:
        kept = f", or {OTHER_HEAD}" if needs.mtp and not target.info.mtp_layers else ""
        raise UnsupportedError(f"the drafter {drafter.spec.name!r} needs {unmet}", try_=f'drafter.name = "ngram"{kept}')
