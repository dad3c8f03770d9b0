"""The vLLM command that serves the same model with the same way of drafting, for many users."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs

from specdec.api import inspect_checkpoint
from specdec.checkpoints.locate import is_hub_id, locate
from specdec.config import Choice, GenerationConfig, RunConfig, TargetConfig
from specdec.errors import UnsupportedError

DEPTH = 2  # draft tokens where the configuration leaves the depth to a policy
_WITH_A_MODEL = ("draft_model", "eagle3", "dflash", "dspark")  # vLLM's methods have the same names
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


def vllm_command(config: RunConfig, *, names: Sequence[str], host: str, port: int) -> tuple[list[str], list[str]]:
    """The command's words, and notes on what differs from specdec.

    Raises: UnsupportedError for a part of the configuration that vLLM has no option for; CheckpointError.
    """
    target, generation = config.target, config.generation
    _check_options("target", target, TargetConfig(), ("model", "revision", "dtype", "capacity", "sources"))
    _check_options("generation", generation, GenerationConfig(), (*_SAMPLING, "seed"))
    if config.verifier.name not in ("strict", "rejection"):
        raise _no_option(f"verifier.name = {config.verifier.name!r}")
    model = target.model if is_hub_id(target.model) else str(locate(target.model))
    words = ["vllm", "serve", model, "--served-model-name", *names, "--host", host, "--port", str(port)]
    for option, value in (
        ("--revision", target.revision),
        ("--dtype", None if target.dtype == "auto" else target.dtype),
        ("--max-model-len", target.capacity),
        ("--seed", generation.seed),
    ):
        words += [] if value is None else [option, str(value)]
    sampling = {field: getattr(generation, field) for field in _SAMPLING}
    words += ["--override-generation-config", json.dumps(sampling)]
    notes = ["vLLM keeps the distribution of plain decoding, not its tokens: a seed gives another text than here"]
    speculative = _speculative(config, notes)
    return words + (["--speculative-config", json.dumps(speculative)] if speculative else []), notes


def _speculative(config: RunConfig, notes: list[str]) -> Mapping[str, Any] | None:
    """vLLM's ``--speculative-config``; None for plain decoding."""
    drafter, depth = config.drafter, DEPTH
    if config.depth.name == "fixed":
        depth = int(config.depth.options.get("depth", DEPTH))
    else:
        notes.append(f"vLLM drafts a fixed number of tokens, here {DEPTH}: --depth sets another")
    if drafter.drafts_with_a_model:
        drafter = Choice("draft_model", drafter.options)
    elif drafter.name == "auto":
        report = inspect_checkpoint(config.target.model, revision=config.target.revision).to_dict()
        has_head = "mtp" in report.get("parameters", {})
        drafter = Choice("mtp" if has_head else "ngram")
    options = dict(drafter.options)
    if drafter.name == "none" or depth == 0:
        return None
    made: dict[str, Any] = {"num_speculative_tokens": depth}
    if drafter.name == "mtp":
        made["method"] = "mtp"
    elif drafter.name == "ngram":
        made |= {"method": "ngram", "prompt_lookup_max": options.pop("max_order", 4)}
        made["prompt_lookup_min"] = options.pop("min_order", 2)
    elif drafter.name in _WITH_A_MODEL and "model" in options:
        made |= {"method": drafter.name, "model": os.path.expanduser(options.pop("model"))}
    else:
        raise UnsupportedError(
            f"vLLM has no method for the drafter {drafter.name!r}",
            try_=f"mtp, ngram, none, or with drafter.model {', '.join(_WITH_A_MODEL)}; the plugin specdec-vllm runs "
            f"drafters of specdec that read tokens only",
        )
    for left in options:
        raise _no_option(f"drafter.{left}")
    return made


def _check_options(table: str, given: Any, default: Any, translated: Collection[str]) -> None:
    """Raises: UnsupportedError for a key that is set and has no counterpart."""
    for item in attrs.fields(type(given)):
        if item.name not in translated and getattr(given, item.name) != getattr(default, item.name):
            raise _no_option(f"{table}.{item.name}")


def _no_option(key: str) -> UnsupportedError:
    return UnsupportedError(f"vLLM has no option for {key}", try_="leave it out for --engine vllm")
