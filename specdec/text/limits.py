"""Call the ``tokenizers`` library with an untrusted tokenizer: bounded in time and growth, and without panics."""

from __future__ import annotations

import _thread
import base64
import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import tokenizers

T = TypeVar("T")
MOST_GROWTH = 100  # characters that one may become; real normalizers make 18 (NFKC of U+FDFA), templates repeat once
_POLL_S = 0.5


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
    """``guarded(call)`` in a thread, at most for ``seconds`` of the thread's processor time.

    A pattern of a tokenizer can take hours for a line of text and nothing interrupts it: after that time the thread is
    abandoned. ``call`` must release the interpreter's lock, as ``encode_batch`` does and ``encode`` does not.
    Raises: ValueError, also when the time is over.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    clocks: list[int] = []
    started = time.monotonic()
    running = _thread.allocate_lock()  # a Condition, as in Thread and Future, does not survive an interruption

    def run() -> None:
        try:
            if hasattr(time, "pthread_getcpuclockid"):
                clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
            results.append(guarded(call))
        except BaseException as error:  # noqa: BLE001 - raised where the result is taken
            errors.append(error)
        finally:
            running.release()

    running.acquire()
    _thread.start_new_thread(run, ())
    while not running.acquire(timeout=_POLL_S):
        if _used(clocks, started) > seconds:
            raise ValueError(f"it takes more than {seconds:.0f} seconds")
    if errors:
        raise errors[0]
    return results[0]


def _used(clocks: list[int], started: float) -> float:
    """Seconds of the thread's processor time, or of wall-clock time where threads have no clock of their own."""
    try:
        return time.clock_gettime(clocks[0])
    except (IndexError, OSError):  # not started, or just ended
        return 0.0 if hasattr(time, "pthread_getcpuclockid") else time.monotonic() - started


def check_maps(document: Any) -> None:
    """Refuse a tokenizer.json with a character map that is shorter than it says. Raises: ValueError.

    The library would reserve up to 4 GB for it, and end the program where it cannot.
    """
    waiting = [document.get("normalizer") if isinstance(document, dict) else None]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            waiting += part.values()
            stored = part.get("precompiled_charsmap")
            if isinstance(stored, str):
                _map_texts(base64.b64decode(stored))
        elif isinstance(part, list):
            waiting += part


def _map_texts(stored: bytes) -> bytes:
    """The replacements in a character map, behind its trie. Source: SentencePiece, ``normalizer.cc``."""
    size = int.from_bytes(stored[:4], "little")
    if len(stored) < 4 or size > len(stored) - 4 or size % 4:
        raise ValueError(f"its precompiled_charsmap has {len(stored)} bytes, which cannot hold a trie of {size}")
    return stored[4 + size :]


def check_growth(core: tokenizers.Tokenizer) -> None:
    """Refuse a tokenizer whose parts multiply a text, as thirty replacements of a by aa do. Raises: ValueError."""
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        part = getattr(core, name)
        if part is not None:
            growth = _growth(json.loads(guarded(part.__getstate__)))
            if growth > MOST_GROWTH:
                raise ValueError(
                    f"its {name} makes {growth:.3g} characters of one, and at most {MOST_GROWTH} are taken"
                )


def uses_patterns(part: Any) -> bool:
    """Whether a part of a tokenizer has regular expressions."""
    return part is not None and b'"Regex"' in guarded(part.__getstate__)


def _growth(part: Mapping[str, Any]) -> float:
    """Bound of the length of a part's output over the length of its input."""
    kind = part.get("type")
    if kind == "Sequence":
        steps: Any = next(
            (part[key] for key in ("normalizers", "pretokenizers", "processors", "decoders") if key in part), []
        )
        return min(math.prod(_growth(step) for step in steps), 1e300)
    if kind == "Replace":
        found, content = part["pattern"].get("String", ""), part["content"]
        # an expression may match the empty text, between any two characters
        return max(1.0, len(content) / len(found)) if found else 1.0 + len(content)
    if kind == "TemplateProcessing":
        return max(1.0, float(sum("Sequence" in piece for piece in part["single"])))
    if kind == "Precompiled":
        texts = _map_texts(base64.b64decode(part["precompiled_charsmap"]))
        return float(max(1, *(len(text) for text in texts.split(b"\0"))))
    return 1.0
