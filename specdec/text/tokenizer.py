"""The tokenizer: text to token ids and back, with the checkpoint's own ``tokenizer.json``."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from specdec.checkpoints import read_json, text_config
from specdec.errors import CheckpointError, PromptError
from specdec.text.chat_template import ChatTemplate, read_chat_templates

SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to token ids and back. Make one with ``Tokenizer.from_folder``.

    Args:
        core: the tokenizer of the ``tokenizers`` library; its truncation and padding are switched off.
        tokenizer_config, generation_config, config: the JSON files next to it, if they exist.
        chat_templates: by name; "default" is the usual one.
        folder: its folder, for messages.

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
    ) -> None:
        core.no_truncation()
        core.no_padding()
        self._core = core
        self._folder = folder
        self._chat_templates = dict(chat_templates or {})
        self._special_tokens = _special_tokens(tokenizer_config or {})
        vocabulary: dict[str, int] = core.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.special_ids = frozenset(i for i, token in core.get_added_tokens_decoder().items() if token.special)
        text = text_config(config or {})
        named = _ids(generation_config or {}, "eos_token_id") or _ids(text, "eos_token_id")
        own = self._id_of("eos_token")
        self.eos_ids = frozenset(named if own is None else (*named, own))
        begin = self._id_of("bos_token")
        self.bos_id = next(iter(_ids(text, "bos_token_id")), None) if begin is None else begin

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
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise _no_tokenizer(folder)
        try:
            core = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(
                f"tokenizer.json cannot be read: {error}", file=file, try_="download it again, or a newer `tokenizers`"
            ) from error
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
        )

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
        ids: list[int] = self._core.encode(text, add_special_tokens=add_special).ids
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of token ids; unknown ids are skipped."""
        text: str = self._core.decode(list(ids), skip_special_tokens=skip_special)
        return text

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return bool(self._chat_templates)

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
                raise PromptError(f"a message is a mapping with 'role' and 'content', got {message!r}")
        template = self._chosen_template(bool(variables.get("tools")))
        values = {"tools": None, "documents": None, **self._special_tokens, **variables}
        values |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        return template.render(values)

    def _chosen_template(self, with_tools: bool) -> ChatTemplate:
        templates = self._chat_templates
        for name in ("tool_use", "default") if with_tools else ("default",):
            if name in templates:
                return templates[name]
        if templates:
            raise PromptError(f"no chat template is called 'default', only {', '.join(templates)}", folder=self._folder)
        raise PromptError(
            "this checkpoint has no chat template",
            folder=self._folder,
            try_="a plain prompt (a base model takes no messages), or a chat_template.jinja in the folder",
        )

    # --- for IncrementalDecoder ------------------------------------------------------------------------------------

    @functools.cached_property
    def decodes_bytes(self) -> bool:
        """Whether decoding only joins the pieces' bytes (byte-level BPE)."""
        decoder = json.loads(self._core.to_str())["decoder"]
        if decoder and decoder["type"] == "Sequence" and len(decoder["decoders"]) == 1:
            decoder = decoder["decoders"][0]
        return bool(decoder) and decoder["type"] == "ByteLevel"

    @functools.cached_property
    def falls_back_to_bytes(self) -> bool:
        """Whether pieces such as ``<0xE2>`` are bytes, which the decoder reads in whole runs."""
        return '"ByteFallback"' in json.dumps(json.loads(self._core.to_str())["decoder"])

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
    return read_json(file) if file.is_file() else {}


def _ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Token ids under a key: an int, a list of ints, or nothing."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise CheckpointError(f"{key!r} takes a token id or a list of them, got {value!r}")
    return tuple(ids)


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
