"""Language models over one tiny target with any drafter table, and draft models for it. Nothing here is a test."""

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from safetensors.torch import load_file, save_file

import specdec
from specdec.config import Choice, RunConfig, TargetConfig
from specdec.contract import CycleRecord, DepthPolicy, DepthPolicySpec, PrepareEnv, Stats
from specdec.models.loading import load_target
from specdec.registry.parts import DepthPart, DrafterPart, make_verifier
from tests import tiny, tiny_families
from tests.drafters.two_tokenizers import byte_level

LLAMA: dict[str, Any] = {"hidden": 36, "heads": 3, "kv_heads": 1, "intermediate": 44}


@attrs.frozen
class Folders:
    """A Qwen3.5 target with recurrent layers and an MTP head, and what may draft for it."""

    target: str
    blurred: str  # the target with noise on its weights: often right, never for long
    llama: str  # attention only, weights of its own
    other: str  # another tokenizer


def write_folders(at: pathlib.Path) -> Folders:
    target = tiny.write_qwen3_5(at / "target", **tiny.HYBRID)
    blurred = tiny.write_qwen3_5(at / "blurred", **tiny.HYBRID)
    blur(blurred, 0.05)
    other = tiny_families.write_llama(at / "other", **LLAMA)
    byte_level(("the", "then", "inn", " a"), (tiny.EOS, tiny.IM_END)).core.save(str(other / "tokenizer.json"))
    llama = tiny_families.write_llama(at / "llama", **LLAMA)
    return Folders(str(target), str(blurred), str(llama), str(other))


def blur(folder: pathlib.Path, share: float) -> None:
    """Add noise of this share of a matrix's own spread."""
    file = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            tensors[name] = tensor + share * tensor.std() * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, file, metadata={"format": "pt"})


@functools.cache
def _loaded(asked: TargetConfig) -> Any:
    return load_target(RunConfig(target=attrs.evolve(asked, dtype="float32")))


def load_second(asked: TargetConfig) -> tuple[Any, Any]:
    """``PrepareEnv.load`` that reads each draft model once."""
    made = _loaded(asked)
    return made.target, made.tokenizer


class Scripted(DepthPolicy):
    """These depths in turn; keeps the records that it is told of."""

    def __init__(self, depths: Sequence[int]) -> None:
        self._depths, self._cycle = depths, -1
        self.records: list[CycleRecord] = []

    def next_depth(self, stats: Stats) -> int:
        self._cycle += 1
        return self._depths[self._cycle % len(self._depths)]

    def record(self, cycle: CycleRecord) -> None:
        self.records.append(cycle)


def composed(base: Any, drafter: dict[str, Any], depths: Sequence[int] = (3,), verifier: str = "strict") -> Any:
    """``base`` with another drafter, as ``build`` would compose it; weights are shared."""
    table = dict(drafter)
    env = PrepareEnv(target=base.target, tokenizer=base.tokenizer, load=load_second)
    return attrs.evolve(
        base,
        drafter=DrafterPart.of(Choice(table.pop("name"), table)).prepared(env),
        depth=scripted(depths),
        verifier=make_verifier(Choice(verifier)),
        notices=tuple(env.notices),
    )


def scripted(depths: Sequence[int]) -> DepthPart:
    return DepthPart(spec=DepthPolicySpec(name="scripted", factory=lambda config: Scripted(depths)))


def load_base(folders: Folders) -> Any:
    return specdec.load(folders.target, drafter="none", depth=0, dtype="float32")
