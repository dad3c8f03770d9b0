"""Structured output: restricts tokens so that the output matches a regular expression, JSON schema or Lark grammar.

The automaton comes from llguidance (``pip install specdec-framework[grammar]``), imported when a grammar is first
built. For each row of a draft it rolls back to the tokens it shares with the row's history and reads the rest.

Grammars come with requests, and the library recurses into them: a long one is compiled in a child process first, and
the time that a grammar takes per token is bounded.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import thread_time
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import numpy as np

from specdec.contract import LogitsProcessor, ProcessorEnv, ProcessorSpec
from specdec.errors import ConfigError, UnsupportedError, cut, import_extra
from specdec.files.reading import parse_json, read_text, why
from specdec.hookspecs import hookimpl
from specdec.logs import get_logger

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specdec.contract import Float32

log = get_logger(__name__)

KEPT_GRAMMARS = 8  # compiled grammars kept per tokenizer: a server reuses the same few schemas
KEPT_LENGTH = 20_000  # characters of such a grammar; the automaton of 300,000 takes 120 MB
SHORT = 2_000  # characters of a grammar that is compiled without a trial; its chains of rules have at most 300 links
TRIAL_SECONDS = 20.0
CALL_SECONDS, CALL_SECONDS_EACH = 5.0, 0.02  # of processor time, for a generation and for each call; a mask takes 1e-4
_TRIAL = """
import contextlib, sys
sys.path[:] = sys.argv[1:]
with contextlib.suppress(ImportError):
    import resource
    limits = {"RLIMIT_STACK": 2**22, "RLIMIT_AS": 2**31, "RLIMIT_CPU": 10, "RLIMIT_CORE": 0}
    for name, most in limits.items():
        with contextlib.suppress(ValueError, OSError):  # a system without it, or with a lower one
            resource.setrlimit(getattr(resource, name), (most, most))
import llguidance
llguidance.LLMatcher.validate_grammar(sys.stdin.buffer.read().decode())
"""
"""Half of the stack that a thread has is enough there, so all of it is enough here."""
_trials = threading.Lock()  # one at a time: each may take 2 GiB


def _schema_text(schema: str | Mapping[str, Any] | None) -> str | None:
    return json.dumps(schema) if isinstance(schema, Mapping) else schema


@attrs.frozen(kw_only=True)
class GrammarConfig:
    """Exactly one of ``regex``, ``json_schema`` and ``lark``."""

    example: ClassVar[Mapping[str, Any]] = {"regex": "([a-z]+ [0-9]+[,.] )*"}

    regex: str | None = None  # the whole output matches it; syntax of Rust's regex crate (no look-around)
    json_schema: str | None = attrs.field(default=None, converter=_schema_text)  # JSON ("{...}"), or the path of a file
    lark: str | None = None  # a grammar ("start: ..."), or the path of a .lark file
    whitespace: bool = True  # json_schema: allow any whitespace between tokens of JSON; False: none at all

    def __attrs_post_init__(self) -> None:
        given = [name for name in ("regex", "json_schema", "lark") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"a grammar takes exactly one of regex, json_schema and lark, got {' and '.join(given) or 'none'}",
                try_=r'regex = "[0-9]{4}-[0-9]{2}-[0-9]{2}"',
            )
        if not self.whitespace and self.json_schema is None:
            raise ConfigError("whitespace = false is for json_schema; write it into the grammar otherwise")


class GrammarProcessor(LogitsProcessor):
    """Forbids every token after which the output could no longer match the grammar.

    End tokens are allowed only after a complete match; if it cannot be extended, nothing else is allowed. Only end
    tokens may follow an end token, or an output that the grammar rejects (a draft row that will be rejected).

    The matcher and the tokens it has read are only a cache: results depend on the arguments alone.
    """

    def __init__(self, config: GrammarConfig, env: ProcessorEnv) -> None:
        if not env.end_tokens:
            raise ConfigError(
                "a grammar needs an end token to end the output, and this tokenizer has none",
                try_="eos_token_id in generation_config.json",
            )
        self._end_tokens = frozenset(env.end_tokens)
        self._start = env.generated_from
        self._only_end = np.zeros(env.vocab_size, dtype=bool)
        self._only_end[list(env.end_tokens)] = True
        self._matcher = _vocabulary(env).matcher(config)
        self._read: list[int] = []  # tokens the matcher has consumed; never an end token
        self._calls, self._seconds = 0, 0.0

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """One call of the engine. Raises: UnsupportedError if calls take too long."""
        began = thread_time()
        yield
        self._calls += 1
        self._seconds += thread_time() - began
        if self._seconds > CALL_SECONDS + self._calls * CALL_SECONDS_EACH:
            raise UnsupportedError(
                f"the grammar takes too long: {self._seconds:.1f} seconds for {len(self._read)} tokens",
                try_="a shorter grammar, with shorter constants and fewer alternatives",
            )

    def process(self, logits: Float32, history: Sequence[int]) -> Float32:
        with self._timed():
            allowed = self._allowed() if self._go_to(history[self._start :]) else self._only_end
        masked: Float32 = np.where(allowed, logits, np.float32(-np.inf))
        return masked

    def legal(self, draft: Sequence[int], history: Sequence[int]) -> int:
        generated, count = history[self._start :], 0
        with self._timed():
            if self._go_to(generated):
                words = self._before_end(draft)
                count = self._matcher.validate_tokens(words) if words else 0
                self._check()
                if count < len(words) or count == len(draft):
                    return count
                if not self._go_to([*generated, *words]) or not self._matcher.is_accepting():
                    return count
        while count < len(draft) and draft[count] in self._end_tokens:
            count += 1
        return count

    def forced(self, history: Sequence[int]) -> Sequence[int]:
        with self._timed():
            if not self._go_to(history[self._start :]) or self._matcher.is_stopped():
                return ()
            tokens: list[int] = self._matcher.compute_ff_tokens()
            self._check()
        return self._before_end(tokens)

    def _go_to(self, generated: Sequence[int]) -> bool:
        """Move the matcher to this output; False if it contains an end token or an illegal one."""
        generated = list(generated)
        kept = len(self._read)
        if generated[:kept] != self._read:
            pairs = enumerate(zip(self._read, generated, strict=False))
            kept = next((i for i, (old, new) in pairs if old != new), min(kept, len(generated)))
            self._matcher.rollback(len(self._read) - kept)
            del self._read[kept:]
        ahead = self._before_end(generated[kept:])
        consumed = self._matcher.try_consume_tokens(ahead) if ahead else 0
        self._read += ahead[:consumed]
        self._check()
        return len(self._read) == len(generated)

    def _before_end(self, tokens: Sequence[int]) -> list[int]:
        ends = (i for i, token in enumerate(tokens) if token in self._end_tokens)
        return list(tokens[: next(ends, len(tokens))])

    def _allowed(self) -> NDArray[np.bool_]:
        """``[V]`` bool: the tokens that may come next."""
        complete = self._matcher.is_accepting()
        if self._matcher.is_stopped():
            allowed = np.zeros_like(self._only_end)
        else:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.unpackbits(bits, count=len(self._only_end), bitorder="little").view(np.bool_)
        allowed[self._only_end] = complete
        if self._matcher.is_error() or not allowed.any():
            raise UnsupportedError(
                f"the grammar cannot continue after {len(self._read)} tokens: no token spells what must follow",
                reason=_first_line(self._matcher.get_error()) or None,
                try_="a grammar over characters that the tokenizer has",
            )
        return allowed

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UnsupportedError(f"the grammar cannot be followed further: {_first_line(self._matcher.get_error())}")


class _Vocabulary:
    """A tokenizer in llguidance's form, and the grammars compiled for it."""

    def __init__(self, env: ProcessorEnv) -> None:
        self._library = import_extra("llguidance", "grammar")
        core = env.tokenizer.core
        size = max(env.vocab_size, env.tokenizer.vocab_size)  # models pad their vocabulary
        try:
            # llguidance needs just one end token: is_accepting() above decides where all of them are allowed
            self._words = self._library.LLTokenizer(core.to_str(), n_vocab=size, eos_token=env.end_tokens[0])
        except ValueError as error:
            raise UnsupportedError(
                f"grammars cannot work with this tokenizer: {error}", try_="a byte-level or byte-fallback BPE tokenizer"
            ) from error
        special, used = env.tokenizer.special_ids, env.tokenizer.vocab_size
        if any(self._words.is_special_token(token) and token not in special for token in range(used)):
            pieces = [self._words.decode_bytes([token]) for token in range(used)] + [b""] * (size - used)
            spelled = self._library.TokenizerWrapper(_Spelled(self._words, pieces, special, env.end_tokens[0]))
            self._words = self._library.LLTokenizer(spelled, n_vocab=size, eos_token=env.end_tokens[0])
        self._matchers: dict[str, Any] = {}

    def matcher(self, config: GrammarConfig) -> Any:
        """A matcher at the start of the grammar. Raises: ConfigError when the grammar is invalid."""
        source = self._source(config)
        matcher = self._matchers.get(source)
        if matcher is None:
            if len(source) > SHORT:
                _try_out(config, source)
            matcher = self._library.LLMatcher(self._words, source, log_level=0)
            if matcher.is_error():
                raise _unusable(config, matcher.get_error())
            for warning in matcher.get_grammar_warnings():
                log.warning("grammar_warning", warning=warning)
            if len(source) > KEPT_LENGTH:
                return matcher
            while len(self._matchers) >= KEPT_GRAMMARS:
                del self._matchers[next(iter(self._matchers))]
            self._matchers[source] = matcher
        return matcher.deep_copy()

    def _source(self, config: GrammarConfig) -> str:
        library = self._library.LLMatcher
        source: str
        if config.regex is not None:
            source = library.grammar_from_regex(config.regex)
        elif config.lark is not None:
            inline = ":" in config.lark or "\n" in config.lark
            source = library.grammar_from_lark(config.lark if inline else _file("lark", config.lark))
        else:
            given = config.json_schema or ""
            try:
                schema = parse_json(given if given.lstrip().startswith("{") else _file("json_schema", given))
            except ValueError as error:
                raise _unusable(config, f"not JSON: {error}") from error
            try:
                source = library.grammar_from_json_schema(schema, overrides={"whitespace_flexible": config.whitespace})
            except ValueError as error:  # such as an integer of more than 64 bits
                raise _unusable(config, str(error)) from error
        return source


class _Spelled:
    """llguidance's form of a tokenizer, in which only ``special`` tokens have no text.

    llguidance takes every added token ``<...>`` for special, and then no grammar can spell a ``<tool_call>``.
    """

    bos_token_id = None

    def __init__(self, words: Any, tokens: Sequence[bytes], special: Iterable[int], end: int) -> None:
        self._words, self.tokens = words, tokens
        self.special_token_ids = sorted(special)
        self.eos_token_id = end

    def __call__(self, text: bytes) -> list[int]:
        ids: list[int] = self._words.tokenize_bytes(text)
        return ids


def _try_out(config: GrammarConfig, source: str) -> None:
    """Compile a grammar where a crash ends nothing. Raises: ConfigError if it does, or takes too much."""
    command = [sys.executable, "-I", "-c", _TRIAL, *sys.path]
    try:
        with _trials:
            done = subprocess.run(command, input=source.encode(), capture_output=True, timeout=TRIAL_SECONDS)
        ended = "" if done.returncode == 0 else f"ends the compiler with status {done.returncode}"
    except subprocess.TimeoutExpired:
        ended = f"takes the compiler more than {TRIAL_SECONDS:.0f} seconds"
    if ended:
        raise _unusable(config, f"it is too large or too deep, and {ended}")


_vocabularies: weakref.WeakKeyDictionary[Any, dict[tuple[object, ...], _Vocabulary]] = weakref.WeakKeyDictionary()


def _vocabulary(env: ProcessorEnv) -> _Vocabulary:
    """Cached per tokenizer, because building it takes seconds for a large vocabulary."""
    kept = _vocabularies.setdefault(env.tokenizer, {})
    key = (env.vocab_size, env.end_tokens)
    if key not in kept:
        kept[key] = _Vocabulary(env)
    return kept[key]


def _file(field: str, path: str) -> str:
    try:
        return read_text(os.path.expanduser(path))
    except (OSError, ValueError) as error:
        instead = f"a UTF-8 file that you may read, or the {field} itself"
        raise ConfigError(f"cannot read the {field} file {path!r}: {why(error)}", try_=instead) from error


def _unusable(config: GrammarConfig, reason: str) -> ConfigError:
    kind = next(name for name in ("regex", "json_schema", "lark") if getattr(config, name) is not None)
    return ConfigError(f"the {kind} cannot be used as a grammar: {cut(' '.join(reason.split()), 300)}")


def _first_line(text: str) -> str:
    return next(iter(text.splitlines()), "")


@hookimpl
def specdec_logits_processors() -> list[ProcessorSpec]:
    return [
        ProcessorSpec(
            name="grammar",
            factory=GrammarProcessor,
            config=GrammarConfig,
            help="structured output: a regular expression, a JSON schema or a Lark grammar",
        )
    ]
