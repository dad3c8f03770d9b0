"""Call the ``tokenizers`` library with an untrusted tokenizer: bounded in time and growth, and without panics."""

from __future__ import annotations

import base64
import math
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
MOST_GROWTH = 100  # characters that one may become; real normalizers make 18 (NFKC of U+FDFA), templates repeat once
_STEPS = ("normalizers", "pretokenizers", "processors", "decoders")


def guarded(call: Callable[[], T]) -> T:
    """``call()``. Raises: ValueError for any error of the library, and for a panic, which is no ``Exception``."""
    try:
        return call()
    except Exception as error:  # the library raises bare Exception
        raise ValueError(str(error) or type(error).__name__) from error
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":  # Ctrl-C stays Ctrl-C
            raise
        raise ValueError(f"the library `tokenizers` panicked: {error}") from error


def limited(call: Callable[[], T], seconds: float) -> T:
    """``guarded(call)`` in a thread, for at most ``seconds``.

    A pattern of a tokenizer can take hours for a line of text and nothing interrupts it: after that time the thread is
    abandoned. ``call`` must release the interpreter's lock, as ``encode_batch`` does and ``encode`` does not.
    Raises: ValueError, also when the time is over.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(guarded(call))
        except BaseException as error:  # noqa: BLE001 - raised where the result is taken
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise ValueError(f"it takes more than {seconds:.0f} seconds")
    return results[0]


def check_parts(document: Any) -> None:
    """Refuse a tokenizer.json whose parts multiply a text, as thirty replacements of a by aa do, or lie about a size.

    Raises: ValueError.
    """
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        growth = _growth(document.get(name) if isinstance(document, dict) else None)
        if growth > MOST_GROWTH:
            raise ValueError(f"its {name} makes {growth:.3g} characters of one, and at most {MOST_GROWTH} are taken")


def _growth(part: Any) -> float:
    """Bound of the length of a part's output over that of its input; by its keys, because the type may be left out."""
    if not isinstance(part, dict):
        return 1.0
    growth = 1.0
    for steps in (part[key] for key in _STEPS if isinstance(part.get(key), list)):
        growth = min(growth * math.prod(map(_growth, steps)), 1e300)
    if isinstance(part.get("pattern"), dict) and isinstance(part.get("content"), str):
        replaced, content = part["pattern"].get("String", ""), part["content"]
        # an expression may match the empty text, between any two characters
        growth *= max(1.0, len(content) / len(replaced)) if replaced else 1.0 + len(content)
    if isinstance(part.get("single"), list):
        growth *= max(1.0, float(sum("Sequence" in piece for piece in part["single"])))
    if isinstance(part.get("precompiled_charsmap"), str):
        growth *= max(1, *map(len, _map_texts(base64.b64decode(part["precompiled_charsmap"])).split(b"\0")))
    return growth


def _map_texts(stored: bytes) -> bytes:
    """The replacements in a character map, behind its trie. Source: SentencePiece, ``normalizer.cc``.

    Raises: ValueError for a map that is shorter than it says: the library would reserve up to 4 GB for it.
    """
    size = int.from_bytes(stored[:4], "little")
    if len(stored) < 4 or size > len(stored) - 4 or size % 4:
        raise ValueError(f"its precompiled_charsmap has {len(stored)} bytes, which cannot hold a trie of {size}")
    return stored[4 + size :]
