"""The tokenizer: text to token ids and back, with the checkpoint's own ``tokenizer.json``."""

from __future__ import annotations

import base64
import functools
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from specdec.checking import checked
from specdec.checkpoints import Checkpoint, read_json, text_config
from specdec.checkpoints.gguf.checkpoint import generation_config
from specdec.checkpoints.gguf.file import GgufFile
from specdec.checkpoints.locate import is_gguf
from specdec.errors import CheckpointError, PromptError, shown
from specdec.files.reading import parse_json, read_text, why
from specdec.text.chat_template import ChatTemplate, read_chat_templates, template_variables

T = TypeVar("T")

_FILE = "tokenizer.json"
_FILE_LIMIT = 2**28  # bytes; the largest known have 35 MB
# for a text, and for each of its characters: a real tokenizer takes a hundredth of it, on a busy machine a tenth
_SECONDS, _SECONDS_EACH = 10.0, 3e-5
MOST_GROWTH = 100  # characters that one may become; real normalizers make 18 (NFKC of U+FDFA), templates repeat once
_STEPS = ("normalizers", "pretokenizers", "processors", "decoders")
SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to token ids and back. Make one with ``Tokenizer.from_folder``.

    Args:
        core: the tokenizer of the ``tokenizers`` library; its truncation and padding are switched off.
        tokenizer_config, generation_config, config: the JSON files next to it, if they exist.
        chat_templates: by name; "default" is the usual one.
        folder: its folder, for messages.
        vocab_size: if it is known.

    Attributes:
        vocab_size: one more than the largest token id.
        special_ids: ids of special tokens (``<|im_end|>``, ...), which ``decode`` omits.
        eos_ids: ids that end a generation: those of generation_config (else of config), and the tokenizer's.
        bos_id: id of the token that begins a text, or None.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        tokenizer_config: Mapping[str, Any] | None = None,
        generation_config: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        chat_templates: Mapping[str, ChatTemplate] | None = None,
        folder: Path | None = None,
        vocab_size: int | None = None,
    ) -> None:
        core.no_truncation()
        core.no_padding()
        self._core = core
        self._folder = folder
        self._chat_templates = dict(chat_templates or {})
        self._special_tokens = _special_tokens(tokenizer_config or {})
        if vocab_size is None:
            vocab_size = max(core.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.vocab_size = vocab_size
        self.special_ids = frozenset(i for i, token in core.get_added_tokens_decoder().items() if token.special)
        text = text_config(config or {})
        named = _ids(generation_config or {}, "eos_token_id", "generation_config.json")
        named = named or _ids(text, "eos_token_id", "config.json")
        own = self._id_of("eos_token")
        self.eos_ids = frozenset(named if own is None else (*named, own))
        begin = self._id_of("bos_token")
        self.bos_id = next(iter(_ids(text, "bos_token_id", "config.json")), None) if begin is None else begin

    def _id_of(self, key: str) -> int | None:
        token = self._special_tokens.get(key)
        return None if token is None else self._core.token_to_id(token)

    @property
    def core(self) -> tokenizers.Tokenizer:
        """The underlying tokenizer of the ``tokenizers`` library; do not modify it."""
        return self._core

    @classmethod
    def from_folder(cls, path: Path | str) -> Tokenizer:
        """Read ``tokenizer.json`` and the files next to it. Raises: CheckpointError that names the file."""
        folder = Path(path)
        file = folder / _FILE
        if not os.path.lexists(file):
            raise _no_tokenizer(folder)
        try:
            text = read_text(file, _FILE_LIMIT)
            check_parts(document := parse_json(text))
            core = guarded(lambda: tokenizers.Tokenizer.from_str(text))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"tokenizer.json cannot be read: {why(error)}",
                file=file,
                try_="download it again, or a newer `tokenizers`",
            ) from error
        vocabulary = document["model"]["vocab"]  # asking the library for it takes a third of building it
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        tokenizer_config = _optional_json(folder / "tokenizer_config.json")
        if not tokenizer_config.keys() >= {"eos_token", "bos_token"}:  # older folders keep them in a separate file
            tokenizer_config = _optional_json(folder / "special_tokens_map.json") | tokenizer_config
        return cls(
            core,
            tokenizer_config=tokenizer_config,
            generation_config=_optional_json(folder / "generation_config.json"),
            config=_optional_json(folder / "config.json"),
            chat_templates=read_chat_templates(folder, tokenizer_config),
            folder=folder,
            vocab_size=max((*ids, *core.get_added_tokens_decoder()), default=-1) + 1,
        )

    @classmethod
    def from_checkpoint(cls, path: Path, gguf: GgufFile | None = None) -> Tokenizer:
        """The tokenizer of a folder or a GGUF file, which ``gguf`` is if it has been parsed.

        Raises: CheckpointError that names the file.
        """
        if not is_gguf(path):
            return cls.from_folder(path)
        from specdec.text.gguf import tokenizer_parts

        file = gguf or GgufFile.open(path)
        core, vocab_size, special, templates = tokenizer_parts(file)
        return cls(
            core,
            tokenizer_config=special,
            generation_config=generation_config(file),
            chat_templates=templates,
            folder=path,
            vocab_size=vocab_size,
        )

    @checked(PromptError)
    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text; ``add_special`` adds the tokenizer's prefix and suffix (often a bos token, or nothing).

        Raises: PromptError for text that is not valid Unicode (lone surrogates).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise PromptError(
                f"the text is not valid Unicode: a lone surrogate at character {error.start}",
                try_="decode the bytes with errors='replace'",
            ) from error
        ids: list[int] = self._run(
            len(text), lambda: self._core.encode_batch([text], add_special_tokens=add_special)[0].ids
        )
        return ids

    @checked(PromptError)
    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of token ids; unknown ids are skipped.

        Raises: PromptError if the tokenizer fails, or an id has more than 32 bits.
        """
        known = list(ids)
        if known and not 0 <= min(known) <= max(known) < 2**32:
            raise PromptError(f"token ids are 0 to {2**32 - 1}, got {shown(min(known))} to {shown(max(known))}")
        if self._decodes_by_patterns:
            return self._run(
                len(known), lambda: str(self._core.decode_batch([known], skip_special_tokens=skip_special)[0])
            )
        return self._run(None, lambda: str(self._core.decode(known, skip_special_tokens=skip_special)))

    @functools.cached_property
    def _decodes_by_patterns(self) -> bool:
        return self._core.decoder is not None and b'"Regex"' in guarded(self._core.decoder.__getstate__)

    def _run(self, length: int | None, call: Callable[[], T]) -> T:
        """``call()``, which works on ``length`` characters or tokens; None for no limit. Raises: PromptError."""
        try:
            return guarded(call) if length is None else limited(call, seconds=_SECONDS + length * _SECONDS_EACH)
        except ValueError as error:
            file = self._folder and self._folder / _FILE
            raise PromptError(f"the checkpoint's tokenizer failed: {error}", file=file) from error

    def check_fits(self, vocab_size: int) -> None:
        """Raises: CheckpointError for more tokens than a model's vocabulary."""
        if self.vocab_size > vocab_size:
            raise CheckpointError(
                f"tokenizer.json has {self.vocab_size} tokens, the model only {vocab_size}", folder=self._folder
            )

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return bool(self._chat_templates)

    @checked(PromptError)
    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text of a conversation, by the checkpoint's Jinja template; encode it without ``add_special``.

        Args:
            messages: mappings with "role" and "content".
            add_generation_prompt: end with the beginning of the assistant's answer.
            **variables: other template variables ("tools", "enable_thinking", ...). With "tools", a template named
                "tool_use" is used if there is one.

        Raises: PromptError when there is no template; with its file and line when it fails.
        """
        message: Any  # input from the caller
        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message:
                raise PromptError(f"a message is a mapping with 'role' and 'content', got {shown(message)}")
        template = self._chosen_template(bool(variables.get("tools")))
        values = {"tools": None, "documents": None, **self._special_tokens, **variables}
        values |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        return template.render(values)

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a conversation in the chat template, up to where the answer begins.

        Args: as for ``apply_chat_template``. Raises: PromptError, also for no messages.
        """
        if not messages:
            raise PromptError("there are no messages", try_='[{"role": "user", "content": "..."}]')
        text = self.apply_chat_template(messages, **template_variables(variables or {}))
        return self.encode(text, add_special=False)

    def _chosen_template(self, with_tools: bool) -> ChatTemplate:
        templates = self._chat_templates
        for name in ("tool_use", "default") if with_tools else ("default",):
            if name in templates:
                return templates[name]
        if templates:
            raise PromptError(f"no chat template is called 'default', only {', '.join(templates)}", folder=self._folder)
        raise PromptError(
            "this checkpoint has no chat template",
            checkpoint=self._folder,
            try_="a plain prompt (a base model takes no messages); a folder may hold a chat_template.jinja",
        )

    # --- for IncrementalDecoder ------------------------------------------------------------------------------------

    @functools.cached_property
    def decodes_bytes(self) -> bool:
        """Whether decoding only joins the pieces' bytes (byte-level BPE)."""
        decoder: Any = None if self._core.decoder is None else json.loads(self._core.decoder.__getstate__())
        if decoder and decoder["type"] == "Sequence" and len(decoder["decoders"]) == 1:
            decoder = decoder["decoders"][0]
        return bool(decoder) and decoder["type"] == "ByteLevel"

    @functools.cached_property
    def falls_back_to_bytes(self) -> bool:
        """Whether pieces such as ``<0xE2>`` are bytes, which the decoder reads in whole runs."""
        return self._core.decoder is not None and b'"ByteFallback"' in self._core.decoder.__getstate__()

    def piece(self, token: int) -> str | None:
        """The vocabulary entry of a token, or None for an unknown id."""
        piece: str | None = self._core.id_to_token(token)
        return piece


def _no_tokenizer(folder: Path) -> CheckpointError:
    others = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt", "tekken.json")
    found = [name for name in others if (folder / name).exists()]
    found += sorted(path.name for path in folder.glob("*.tiktoken"))
    convert = ", or transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...), which writes one"
    return CheckpointError(
        "the checkpoint has no tokenizer.json",
        folder=folder,
        found=f"{', '.join(found)}, which is not read" if found else None,
        try_="tokenizer.json from the original checkpoint" + (convert if found else ""),
    )


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if os.path.lexists(file) else {}


def _ids(config: Mapping[str, Any], key: str, file: str) -> tuple[int, ...]:
    """Token ids under a key: an int, a list of ints, or nothing."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise CheckpointError(f"{file}: {key!r} takes a token id or a list of them, got {shown(value)}")
    return tuple(ids)


def check_named_tokens(checkpoint: Checkpoint, vocab_size: int) -> None:
    """Raises: CheckpointError for an eos or bos token outside a model's vocabulary."""
    generation, config = ("generation_config.json", checkpoint.generation_config), text_config(checkpoint.config)
    ended = generation if _ids(generation[1], "eos_token_id", generation[0]) else ("config.json", config)
    for key, (file, given) in {"eos_token_id": ended, "bos_token_id": ("config.json", config)}.items():
        outside = [token for token in _ids(given, key, file) if token >= vocab_size]
        if outside:
            raise CheckpointError(
                f"{file}: {key!r} names the token {shown(outside[0])}, and the vocabulary has the tokens 0 to "
                f"{vocab_size - 1}",
                folder=checkpoint.path,
            )


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens that a template may use: ``{"bos_token": "<s>", ...}``."""
    given = ((key, tokenizer_config.get(key)) for key in SPECIAL_TOKEN_KEYS)
    plain = ((key, value.get("content") if isinstance(value, Mapping) else value) for key, value in given)
    return {key: value for key, value in plain if isinstance(value, str)}


def common_prefix(one: Iterable[int], other: Iterable[int]) -> int:
    """The number of leading tokens that two sequences share."""
    shared = 0
    for ours, theirs in zip(one, other, strict=False):
        if ours != theirs:
            break
        shared += 1
    return shared


# --- the library, with an untrusted tokenizer: bounded in time and growth, and without panics -------------------------


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
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(guarded(call))
        except BaseException as error:  # noqa: BLE001 - raised where the result is taken
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return done.result(seconds)
    except TimeoutError:
        raise ValueError(f"it takes more than {seconds:.0f} seconds") from None


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
