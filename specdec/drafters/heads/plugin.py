"""The drafters that run trained heads: one name per kind, and "head", which reads the kind from the checkpoint."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from specdec.backends.ops import Array
from specdec.backends.passes import Passes
from specdec.contract import Drafter, DrafterEnv, DrafterSpec, PrepareEnv
from specdec.drafters.heads.describe import builder
from specdec.drafters.heads.drafter import (
    BlockDrafter,
    EagleDrafter,
    HeadConfig,
    ParallelDrafter,
    PreparedHead,
    prepared_vocabulary,
)
from specdec.drafters.heads.files import DFLASH, DSPARK, EAGLE, P_EAGLE, HeadFiles
from specdec.drafters.heads.layout import Layout, read_layout
from specdec.drafters.heads.network import Surroundings, load
from specdec.drafters.heads.refiner import MarkovRefiner, Refiner
from specdec.drafters.heads.untrained import untrained
from specdec.errors import ConfigError, SpecdecError
from specdec.hookspecs import hookimpl

ANY, RANDOM = "head", "random"
_HELP = {
    EAGLE: "an EAGLE-3 head: a chain of steps over hidden states of three layers",
    P_EAGLE: "a P-EAGLE head: all draft tokens in one pass",
    DFLASH: "a DFlash head: a block of draft tokens in one pass",
    DSPARK: "a DSpark head: DFlash with a sequential bias and a confidence",
    ANY: "a trained draft head of any kind that is read; its checkpoint says which",
}
_DRAFTERS: dict[str, Callable[[HeadConfig, DrafterEnv], Drafter]] = {
    EAGLE: EagleDrafter,
    P_EAGLE: ParallelDrafter,
    DFLASH: BlockDrafter,
    DSPARK: BlockDrafter,
}


def prepare(name: str, refiner: type[Refiner] | None, config: HeadConfig, env: PrepareEnv) -> PreparedHead:
    """Load the head, once for all sequences.

    Raises: CheckpointError for a head that cannot be read; UnsupportedError for one of another target; ConfigError for
        one of another kind than the drafter's name says.
    """
    kind = EAGLE if name == ANY else name
    with contextlib.ExitStack() as stack:
        try:
            if config.model == RANDOM:  # what is mapped stays readable
                if config.revision is not None:
                    raise ConfigError(f"the revision {config.revision!r} is not used: the head is made here")
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                files, layout = untrained(folder, kind, env.target.info, config.layer_ids, config.fed_back)
            else:
                files = HeadFiles.open(config.model, config.revision, kind=kind)
                layout = read_layout(files, layer_ids=config.layer_ids, fed_back=config.fed_back)
            if name not in (ANY, layout.kind):
                raise ConfigError(
                    f"drafter.name is {name!r}, and {config.model} is of the kind {layout.kind!r}",
                    try_=f'drafter.name = "{layout.kind}", or "{ANY}" for any kind',
                )
            layout.check_target(env.target.info)
            (network, head_refiner), around, fingerprint = load(files, layout, env.target, builder(layout, refiner))
        except SpecdecError as error:
            error.facts.setdefault("asked for by", f"drafter.model = {config.model!r}")
            raise
    if isinstance(head_refiner, MarkovRefiner) and head_refiner.proj is not None:
        head_refiner = attrs.evolve(head_refiner, least=config.min_acceptance)
    elif config.min_acceptance > 0:
        raise ConfigError(f"drafter.min_acceptance is for heads with a confidence head, and {config.model} has none")
    masked = network.masked
    return PreparedHead(
        layout=layout,
        network=network,
        around=around,
        fingerprint=fingerprint,
        name=config.model,
        vocabulary=prepared_vocabulary(config, layout, around, env, network, head_refiner),
        passes=_passes(network, layout, around),
        masked=None if masked is None else around.ops.hidden(network.fused(around.ops.embed(masked, [0]))),
        refiner=head_refiner,
    )


def _passes(network: Any, layout: Layout, around: Surroundings) -> Passes | None:
    """The head's passes, recorded where the backend can; None for what runs op by op."""

    def run(caches: Sequence[Any], tokens: Sequence[int], hidden: Array | None) -> Array:
        long = len(tokens) > around.ops.capabilities.max_rows  # fed for the caches alone; nobody drafts from it
        return network(caches, around.ops.embed(around.embed_tokens, tokens), hidden, fill=long)

    if layout.block_size or any(layout.geometry.windows):
        return None
    return around.ops.record_passes(run, network.new_caches(1), layout.geometry.hidden)


def _spec(name: str, asked: str, refiner: type[Refiner] | None, help: str) -> DrafterSpec:
    return DrafterSpec(
        name=name,
        factory=lambda config, env: _DRAFTERS[env.shared.layout.kind](config, env),
        config=HeadConfig,
        needs=lambda config, head: head.around.needs,
        prepare=functools.partial(prepare, asked, refiner),
        help=help,
    )


@hookimpl
def specdec_drafters() -> list[DrafterSpec]:
    return [_spec(name, name, None, text) for name, text in _HELP.items()]


def block_drafter(name: str, refiner: type[Refiner], help: str = "") -> DrafterSpec:
    """A drafter of DFlash heads whose tokens ``refiner`` makes: what a plugin registers in ``specdec_drafters``."""
    return _spec(name, DFLASH, refiner, help)
