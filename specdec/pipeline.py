"""Builds a language model from a configuration: target, drafter, verifier and depth policy, each looked up by name."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
from collections.abc import Callable

import attrs

from specdec.config import Choice, RunConfig, TargetConfig
from specdec.contract import OTHER_HEAD, ForwardPass, Guarantee, Needs, Parity, PrepareEnv
from specdec.decoding.cycle_timing import DEPTHS, costs_of, warm_up
from specdec.decoding.parts import Parts
from specdec.decoding.session import LanguageModel as LanguageModel
from specdec.errors import UnsupportedError
from specdec.logs import get_logger
from specdec.models.loading import load_target
from specdec.records.cost_table import CostTable
from specdec.registry import calling
from specdec.registry.parts import DepthPart, DrafterPart, make_verifier
from specdec.text import Tokenizer

log = get_logger(__name__)

FIXED_DEPTH, ADAPTIVE_DEPTH = Choice("fixed", {"depth": 2}), Choice("adaptive")  # what depth.name = "auto" becomes

SHORTEST_MATCH = {"mtp": 4, "draft_model": 2}  # tokens, of the look-up in front of each


def build(config: RunConfig) -> LanguageModel:
    """Load the target and compose the pipeline. Raises: SpecdecError with the reason."""
    verifier = make_verifier(config.verifier)  # wrong names and options fail before gigabytes of weights are read
    depth = DepthPart.of(FIXED_DEPTH if config.depth.name == "auto" else config.depth)
    choice = resolved(config.drafter)
    named = None if choice.name == "auto" else DrafterPart.of(choice)
    loaded = load_target(config)
    target, notices = loaded.target, list(loaded.notices)
    config = attrs.evolve(config, drafter=resolved(choice, bool(target.info.mtp_layers)))
    drafter = named or DrafterPart.of(config.drafter)
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
    costs = functools.cache(lambda: costs_of(lm, notices))  # measured once
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
    gc.collect(1)  # loading and warming up leave cycles
    with contextlib.suppress(AttributeError, OSError):  # only glibc has it: what they have freed goes back
        ctypes.CDLL(None).malloc_trim(0)
    return attrs.evolve(lm, depth=depth, notices=tuple(notices))


def resolved(choice: Choice, head: bool | None = None) -> Choice:
    """The drafter that ``drafter.name = "auto"`` stands for; another choice as it is.

    An MTP head, or a draft model without a drafter's name, is asked where a look-up, which costs nothing, finds no long
    match. The drafts of a draft model cost more, so shorter matches come before them.

    Args:
        head: whether the target has an MTP head; None if that is not known yet, and then "auto" may stay.
    """
    if choice.drafts_with_a_model:
        model = Choice("draft_model", choice.options, sources={"": "drafter"})  # its keys are written in that table
    elif choice.name != "auto" or head is None:
        return choice
    elif not head:
        return Choice("ngram", sources={"drafter.name": "drafter = auto"})
    else:
        model = Choice("mtp", sources={"": "drafter"})
    look_up = Choice("ngram", {"min_order": SHORTEST_MATCH[model.name], "max_order": 4})
    return Choice("first_of", {"drafters": (look_up, model)}, sources=choice.sources)


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
