"""A drafter: guess that the last few tokens are about to repeat."""

import sys

import attrs

import specdec.registry
from specdec import Context, Draft, Drafter, DrafterEnv, DrafterSpec, between, hookimpl


@attrs.frozen(kw_only=True)
class EchoConfig:
    """How many tokens repeat; a wrong value fails when the configuration is read."""

    period: int = attrs.field(default=2, validator=between(1, 64))  # tokens


class EchoDrafter(Drafter):
    """After ``... a b`` it drafts ``a b a b ...``."""

    def __init__(self, config: EchoConfig, env: DrafterEnv) -> None:
        self._period = config.period

    def propose(self, context: Context, depth: int) -> Draft:
        pattern = context[-self._period :]
        return Draft(tuple(pattern[i % len(pattern)] for i in range(depth)))


@hookimpl
def specdec_drafters() -> list[DrafterSpec]:
    return [DrafterSpec(name="echo", factory=EchoDrafter, config=EchoConfig, help="the last tokens, once more")]


if __name__ == "__main__":  # without packaging: register this module, then ask for the drafter by its name
    specdec.registry.registry().register(sys.modules[__name__])
    lm = specdec.load("demo", drafter={"name": "echo", "period": 1}, depth=4)
    result = lm.generate("0, 0, 0, 0,", max_new_tokens=40)
    print(result.text, result.stats.accepted, sep="\n")
