"""Text: tokenizers, chat templates, and the two filters between tokens and what a user sees.

``IncrementalDecoder`` turns tokens into text that never changes again; ``StopMatcher`` finds stop strings in it.
"""

from __future__ import annotations

import codecs
import datetime
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdec.checkpoints import read_json, text_config
from specdec.errors import CheckpointError, PromptError

SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@attrs.frozen
class ChatTemplate:
    """A Jinja source and the file that it comes from."""

    source: str
    file: Path


class Tokenizer:
    """Text to token ids and back. Make one with ``Tokenizer.from_folder``.

    Args:
        core: the tokenizer of the ``tokenizers`` library; its truncation and padding are switched off.
        tokenizer_config, generation_config, config: the JSON files beside it, where they exist.
        chat_templates: by name; "default" is the ordinary one.
        folder: where it comes from, for messages.

    Attributes:
        vocab_size: one more than the largest token id.
        special_ids: ids of special tokens (``<|im_end|>``, ...), which ``decode`` leaves out.
        eos_ids: ids that end a generation: generation_config's (config's where that names none), and the tokenizer's.
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
        """The tokenizer of the library ``tokenizers`` underneath, to be read."""
        return self._core

    @classmethod
    def from_folder(cls, path: Path | str) -> Tokenizer:
        """Read ``tokenizer.json`` and what stands beside it. Raises: CheckpointError naming the file."""
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
        if not tokenizer_config.keys() >= {"eos_token", "bos_token"}:  # older folders keep them in a file of their own
            tokenizer_config = _optional_json(folder / "special_tokens_map.json") | tokenizer_config
        return cls(
            core,
            tokenizer_config=tokenizer_config,
            generation_config=_optional_json(folder / "generation_config.json"),
            config=_optional_json(folder / "config.json"),
            chat_templates=_read_chat_templates(folder, tokenizer_config),
            folder=folder,
        )

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text; ``add_special`` adds what the tokenizer puts around one (often a bos token, or nothing).

        Raises: PromptError for text that is no valid Unicode (lone surrogates).
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
        """The text of token ids; ids that the tokenizer does not know have none."""
        text: str = self._core.decode(list(ids), skip_special_tokens=skip_special)
        return text

    @property
    def has_chat_template(self) -> bool:
        """Whether ``apply_chat_template`` has something to apply."""
        return bool(self._chat_templates)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text of a conversation, by the checkpoint's own Jinja template; encode it without ``add_special``.

        Args:
            messages: mappings with "role" and "content".
            add_generation_prompt: end with the beginning of the assistant's answer.
            **variables: what else the template knows ("tools", "enable_thinking", ...). With "tools", a template named
                "tool_use" is taken where there is one.

        Raises: PromptError when there is no template, or it fails, with its file and line.
        """
        message: Any  # whatever a caller sent
        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message:
                raise PromptError(f"a message is a mapping with 'role' and 'content', got {message!r}")
        template = self._chosen_template(bool(variables.get("tools")))
        values = {"tools": None, "documents": None, **self._special_tokens, **variables}
        values |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        line: int | None
        try:
            return _compiled(template.source).render(values)
        except jinja2.TemplateSyntaxError as error:
            reason, line = error.message, error.lineno
        except Exception as error:  # noqa: BLE001 - a template can raise anything that its expressions can
            reason, line = _reason(error), _template_line(error)
        raise PromptError(f"the chat template failed: {reason}", file=template.file, line=line)

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
        """Whether decoding is nothing but joining the pieces' bytes (byte-level BPE)."""
        decoder = json.loads(self._core.to_str())["decoder"]
        if decoder and decoder["type"] == "Sequence" and len(decoder["decoders"]) == 1:
            decoder = decoder["decoders"][0]
        return bool(decoder) and decoder["type"] == "ByteLevel"

    @functools.cached_property
    def falls_back_to_bytes(self) -> bool:
        """Whether pieces such as ``<0xE2>`` stand for bytes, which the decoder reads by whole runs."""
        return '"ByteFallback"' in json.dumps(json.loads(self._core.to_str())["decoder"])

    def piece(self, token: int) -> str | None:
        """The vocabulary entry of a token, or None for an id that there is none for."""
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


# --- chat templates ------------------------------------------------------------------------------------------------


def _read_chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, ChatTemplate]:
    """Every chat template of a folder by name; a file of its own wins over tokenizer_config.json."""
    templates: dict[str, ChatTemplate] = {}

    def take(value: Any, file: Path) -> None:
        """A template, or a list of ``{"name": ..., "template": ...}``."""
        entries = value if isinstance(value, list) else [{"name": "default", "template": value}]
        for entry in entries:
            name, source = (entry.get("name"), entry.get("template")) if isinstance(entry, Mapping) else (None, None)
            if not isinstance(name, str) or not isinstance(source, str):
                raise CheckpointError("a chat template is text, or a list of {name, template}", file=file, got=entry)
            templates[name] = ChatTemplate(source, file)

    if tokenizer_config.get("chat_template") is not None:
        take(tokenizer_config["chat_template"], folder / "tokenizer_config.json")
    file = folder / "chat_template.json"
    if file.is_file():
        take(read_json(file).get("chat_template"), file)
    for file in [folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))]:
        if file.is_file():
            try:
                source = file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{file.name} cannot be read: {error}", file=file) from error
            templates["default" if file.name == "chat_template.jinja" else file.stem] = ChatTemplate(source, file)
    return templates


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}``, which marks an assistant's words for training: here just its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The body, as if the two tags were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    """A template in the environment that Hugging Face templates are written for, sandboxed."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, arguments in the order of Hugging Face's filter: Jinja's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _reason(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {text}"


def _template_line(error: BaseException) -> int | None:
    """The last line of a template in a traceback; Jinja compiles templates with their own line numbers."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


# --- tokens to text ------------------------------------------------------------------------------------------------


class IncrementalDecoder:
    """Text of a growing sequence of tokens, each character once, as soon as it is final.

    Whatever the chunks, all that ``push`` and then ``flush`` return, joined, is ``tokenizer.decode`` of all the ids.
    A character whose bytes are not complete is held back, so ``push`` never returns half of one.
    The cost of a push depends on its tokens, not on those before.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        make = _ByteDecoder if tokenizer.decodes_bytes else _WindowDecoder
        self._decoder: _ByteDecoder | _WindowDecoder = make(tokenizer)
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()

    def push(self, ids: Iterable[int]) -> str:
        """Take more tokens and return the text that became final."""
        return self._decoder.push([token for token in ids if token not in self._skipped])

    def flush(self) -> str:
        """Return what was held back, incomplete characters as U+FFFD, and start anew."""
        return self._decoder.flush()


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable bytes are themselves, the others are shifted behind U+0100.

    Source: GPT-2, openai/gpt-2 ``src/encoder.py``, ``bytes_to_unicode``.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class _ByteDecoder:
    """For byte-level BPE: joins bytes and decodes UTF-8 as it comes, which is exactly what the tokenizer does at once.

    Both put one U+FFFD for each maximal invalid part (Unicode 16.0, section 3.9, "substitution of maximal subparts").
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._piece = tokenizer.piece
        self._bytes: dict[int, bytes] = {}
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(self._bytes_of(token) for token in ids))

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text

    def _bytes_of(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            piece = self._piece(token) or ""
            try:
                known = bytes(_BYTE_OF[character] for character in piece)
            except KeyError:  # an added token with a space, say: it is not spelt in the byte alphabet
                known = piece.encode("utf-8")
            self._bytes[token] = known
        return known


class _WindowDecoder:
    """For every other tokenizer: decodes the last final tokens together with the new ones and returns the difference.

    The tokens before give the new ones their context (a leading space that is stripped only at the very beginning).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode: Callable[[list[int]], str] = lambda ids: tokenizer.decode(ids, skip_special=False)
        self._piece = tokenizer.piece
        self._byte_runs = tokenizer.falls_back_to_bytes
        self._context: list[int] = []  # the tokens of the last text returned
        self._new: list[int] = []  # tokens held back

    def push(self, ids: Sequence[int]) -> str:
        self._new += [token for token in ids if self._piece(token) is not None]
        return self._take() if self._new and not self._may_change() else ""

    def flush(self) -> str:
        text = self._take() if self._new else ""
        self._context = []
        return text

    def _may_change(self) -> bool:
        """Whether later tokens could change the text of the last one."""
        last = self._piece(self._new[-1]) or ""
        # a run of byte pieces is decoded as a whole: one invalid byte at its end makes all of it U+FFFD
        if self._byte_runs and len(last) == 6 and last.startswith("<0x") and last.endswith(">"):
            return True
        return self._decode(self._new[-4:]).endswith("�")  # a character has four bytes, a piece at least one

    def _take(self) -> str:
        text = self._decode(self._context + self._new)[len(self._decode(self._context)) :]
        self._context, self._new = self._new[-8:], []
        return text


# --- stop strings --------------------------------------------------------------------------------------------------


class StopMatcher:
    """Finds stop strings in text that comes in pieces, whatever the pieces.

    The match is the one that is complete first, so that generation can stop as early as possible; of several that end
    at the same character it is the longest. Text before the match is emitted, the match and what follows it never.
    Raises: PromptError for an empty stop string.
    """

    def __init__(self, stop_strings: Iterable[str]) -> None:
        # longest first: of two that end at the same character, the one that starts earlier is found first
        self._stops = sorted(dict.fromkeys(stop_strings), key=len, reverse=True)
        if any(not stop for stop in self._stops):
            raise PromptError("a stop string is empty", try_="at least one character")
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take text; return what is certainly before any match, and the stop string when one was found.

        Text that could be the beginning of a stop string is held back. After a match, nothing is emitted any more.
        """
        if self._matched is not None or not self._stops:
            return ("" if self._matched is not None else text), self._matched
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self._matched = min(found)
            self._held = ""
            return text[:at], self._matched
        keep = self._open_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """The text held back, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _open_length(self, text: str) -> int:
        """Length of the longest end of ``text`` that a stop string begins with."""
        for length in range(min(len(self._stops[0]) - 1, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
