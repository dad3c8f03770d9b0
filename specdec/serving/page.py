"""The page that shows how each token came to be: of a running server, or of one recorded generation in a file."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import attrs

from specdec.contract import CycleRecord
from specdec.decoding.origins import Origins
from specdec.decoding.parts import Parts
from specdec.decoding.result import TokenLogprobs
from specdec.text import token_bytes

ALTERNATIVES = 4  # tokens listed beside the chosen one
_EMPTY = '<script type="application/json" id="data">{}</script>'


def page(data: Mapping[str, Any]) -> str:
    """The page with its data: no further file is needed.

    ``data`` may hold text of a model: inside the page it cannot end its element, and the page never reads it as HTML.
    """
    return _source().replace(_EMPTY, embedded(data), 1)


def embedded(data: Mapping[str, Any]) -> str:
    """The element that holds the data of a page."""
    return _EMPTY.replace("{}", json.dumps(data).replace("<", "\\u003c"), 1)


def style() -> str:
    """The page's style sheet, which reports share."""
    return _inside("style")


def policy() -> str:
    """The Content-Security-Policy of the page: its own script and style, and requests to its own server."""
    script, sheet = (
        base64.b64encode(hashlib.sha256(_inside(tag).encode()).digest()).decode() for tag in ("script", "style")
    )
    return (
        f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{sheet}'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _inside(tag: str) -> str:
    """The text of the element without attributes."""
    return _source().partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]


def _source() -> str:
    return (resources.files("specdec.serving") / "page.html").read_text(encoding="utf-8")


def described(lm: Parts, name: str) -> dict[str, str]:
    """What the page says about the model, and what is promised."""
    info, guarantee = lm.info, lm.verifier.guarantee.value
    promise = f"Guarantee {guarantee}, with {info.parity.value} parity"
    if (guarantee, info.parity.value) == ("exact", "bitwise"):
        promise += ": the tokens are those of plain decoding, bit for bit"
    return {
        "about": f"{name}: drafter {lm.drafter.title}, verifier {lm.config.verifier.name}, on "
        f"{info.device or info.backend}",
        "promise": f"{promise}.",
    }


class PageCycles:
    """Turns the cycles of one generation into the page's data."""

    def __init__(self, lm: Parts) -> None:
        self._tokenizer = lm.tokenizer
        self._origins = Origins(lm.tokenizer)

    def add(self, record: CycleRecord, logprobs: Sequence[TokenLogprobs] = ()) -> dict[str, Any]:
        """A cycle; ``logprobs`` are those of its tokens, or none."""
        tokens = []
        for place, one in enumerate(self._origins.add(record)):
            shown: dict[str, Any] = {**attrs.asdict(one), "piece": self._piece(one.token)}
            if one.token in self._tokenizer.special_ids:
                shown["special"] = True  # the page names it, because it has no text
            if place < len(logprobs):
                entry = logprobs[place]
                shown["logprob"] = _finite(entry.logprob)
                shown["top"] = [(self._piece(token), _finite(logprob)) for token, logprob in entry.top]
            tokens.append(shown)
        return {
            "offered": record.offered,
            "accepted": record.accepted,
            "draft_ms": 1e3 * record.draft_seconds,
            "verify_ms": 1e3 * record.verify_seconds,
            "commit_ms": 1e3 * record.commit_seconds,
            "tokens": tokens,
        }

    def _piece(self, token: int) -> str:
        return token_bytes(self._tokenizer, token).decode(errors="replace")


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else -1e9
