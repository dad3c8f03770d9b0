"""Drafters with one fault each, registered by name."""

import importlib.metadata
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from specdec.contract import Context, Draft, Drafter, DrafterEnv, DrafterSpec, Needs
from specdec.drafters.ngram import NgramConfig, NgramDrafter
from specdec.hookspecs import hookimpl
from specdec.registry import BUILT_INS, Registry, use_registry

VERSION = importlib.metadata.version


class Faulty(NgramDrafter):
    """An n-gram drafter that now and then does something wrong."""

    fault = ""
    leaked: list[int] = []  # what requests leave behind for each other

    def __init__(self, config: NgramConfig, env: DrafterEnv) -> None:
        super().__init__(config, env)
        self._target: Any = env.target
        self._rng = random.Random(5)

    def propose(self, context: Context, depth: int) -> Draft:
        draft = super().propose(context, depth)
        return draft if self._rng.random() < 0.5 else self.wrong(context, depth, draft)

    def wrong(self, context: Context, depth: int, draft: Draft) -> Any:
        match self.fault:
            case "raises":
                raise RuntimeError("the table is empty")
            case "too long":
                return Draft((1,) * (depth + 3))
            case "out of range":
                return Draft((*draft.tokens[:1], self._target.info.vocab_size))
            case "negative":
                return Draft((-1,))
            case "no draft":
                return [1, 2]
            case "slow":
                time.sleep(0.0005)
            case "leak":
                self.leaked.extend(context)
                return Draft(tuple(self.leaked[-depth:]))
            case "target":
                self._target.decode(None, [1])
        return draft

    def rewind(self, length: int) -> None:
        if self.fault == "no rewind":
            raise RuntimeError("cannot go back")
        super().rewind(length)


class NeverStarts(Drafter):
    def __init__(self, config: NgramConfig, env: DrafterEnv) -> None:
        raise RuntimeError("no such file")

    def propose(self, context: Context, depth: int) -> Draft:
        return Draft()


FAULTS = ("raises", "too long", "out of range", "negative", "no draft", "slow", "leak", "target", "no rewind")


def faulty(fault: str) -> DrafterSpec:
    """The spec of a drafter with this fault; its name is the fault's."""
    made = type("Faulty", (Faulty,), {"fault": fault, "leaked": []})
    return DrafterSpec(name=fault, factory=made, config=NgramConfig)


class Plugin:
    """All of them."""

    @hookimpl
    def specdec_drafters(self) -> list[DrafterSpec]:
        return [
            *map(faulty, FAULTS),
            DrafterSpec(name="never starts", factory=NeverStarts, config=NgramConfig),
            DrafterSpec(name="reads layers", factory=Faulty, config=NgramConfig, needs=Needs(boundaries=(1,))),
            DrafterSpec(name="reads states", factory=Faulty, config=NgramConfig, needs=Needs(final_hidden=True)),
        ]


def registered(*plugins: object) -> Iterator[None]:
    """The body of a fixture: the built-in plugins, drafters with faults and these are registered."""
    made = Registry(BUILT_INS, ())
    for plugin in (Plugin(), *plugins):
        made.register(plugin)
    former = use_registry(made)
    yield
    use_registry(former)


def versions(**known: str | None) -> Callable[[str], str]:
    """``importlib.metadata.version`` with these distributions; None is one that is not installed."""

    def version(name: str) -> str:
        found = known[name] if name in known else VERSION(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    return version
