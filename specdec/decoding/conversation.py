"""A chat conversation over one session; only text that is new since the last turn runs through the model."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import attrs

from specdec.checking import checked
from specdec.config import structure_options
from specdec.contract import Stats
from specdec.decoding.parts import CallSettings, Parts
from specdec.decoding.session import Session
from specdec.decoding.stream import Stream
from specdec.errors import PromptError, SessionFileError, SpecdecError, StateError, shown
from specdec.text import common_prefix
from specdec.text.chat_template import template_variables

_SAVED = "conversation"  # key of Session.extra


@attrs.frozen
class _Turn:
    question: str
    answer: str
    end: int | None  # where it ends in the session; None once a later prompt has rendered it differently


class Conversation:
    """Messages, and the session that holds their tokens.

    The checkpoint's chat template renders the conversation as the next prompt. If that continues the session's text,
    only the rest is encoded and runs through the model. If the template renders earlier turns differently (it may drop
    the thinking of old answers), the longest common prefix of tokens is kept.

    Args:
        lm: the model; its checkpoint must have a chat template.
        system: a system message.
        template: further variables of the template, such as ``{"enable_thinking": False}``.

    An answer's message keeps its special tokens (a template may look for them) but not the token that ended it; the
    stream gives the text without special tokens.

    An interrupted answer is kept up to its last cycle, and the next call ends one that was not read to its end. The
    turns are the only truth: whatever else the session holds is forgotten by the next call.

    Attributes:
        kept: tokens of the session that the last prompt reused.

    Raises: PromptError when there is no chat template, or it fails on a first message.
    """

    @checked(PromptError)
    def __init__(self, lm: Parts, *, system: str | None = None, template: Mapping[str, Any] | None = None):
        self._lm = lm
        self._template = template_variables(template or {})
        self._system = system
        self._turns: list[_Turn] = []
        self._session = Session(lm)
        self._asked: tuple[str, Stream] | None = None  # the last question, until its answer is a turn
        self.kept = 0
        self._render([*self.messages, {"role": "user", "content": "?"}])

    @property
    def messages(self) -> list[dict[str, str]]:
        """Copies of all messages, oldest first."""
        self._notice_end()
        made = [] if self._system is None else [{"role": "system", "content": self._system}]
        for turn in self._turns:
            made += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
        return made

    @property
    def system(self) -> str | None:
        """The system message; setting it keeps the turns, which the next prompt renders anew."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        self._settle()
        self._system = text

    @property
    def turns(self) -> int:
        """The number of answered questions."""
        self._notice_end()
        return len(self._turns)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens of the session."""
        self._notice_end()
        return self._session.tokens

    @property
    def stats(self) -> Stats:
        """Acceptance over the whole conversation."""
        self._notice_end()
        return self._session.stats

    @checked(PromptError)
    def ask(self, text: str, **settings: Unpack[CallSettings]) -> Stream:
        """Add a user message and answer it; iterate over the result for text.

        The turn joins the conversation when the answer ends or is stopped, unless it has no tokens yet or an error
        ended it.

        Args:
            text: the message.
            **settings: as for ``Session.stream``.

        Raises: PromptError for an empty message, or a conversation too long for the model; it is then unchanged.
        """
        self._settle()
        if not text.strip():
            raise PromptError("the message is empty", try_="at least one character")
        prompt = self._prompt([*self.messages, {"role": "user", "content": text}])
        turns = self._turns
        self.kept = self._session.set_prompt(prompt)
        self._turns = [
            turn if turn.end is not None and turn.end <= self.kept else attrs.evolve(turn, end=None) for turn in turns
        ]
        try:
            stream = self._session.stream(**settings)
        except BaseException:
            self._settle()
            raise
        self._asked = text, stream
        return stream

    @checked(StateError)
    def rewind(self, turns: int = 1) -> None:
        """Forget the last questions and their answers.

        Raises: StateError when there are fewer turns.
        """
        self._settle()
        if not 1 <= turns <= self.turns:
            raise StateError(
                f"rewind takes 1 to {self.turns}, got {shown(turns)}" if self.turns else "there is no turn yet"
            )
        del self._turns[self.turns - turns :]
        self._settle()

    @checked(SessionFileError)
    def save(self, path: str | Path) -> None:
        """Write messages, tokens and states to one file. Raises: SessionFileError when it cannot be written."""
        self._settle()
        ends = [turn.end for turn in self._turns]
        self._session.extra[_SAVED] = {"messages": self.messages, "ends": ends, "template": self._template}
        self._session.save(path)

    @checked(SessionFileError)
    def load(self, path: str | Path) -> None:
        """Replace this conversation with a saved one. Raises: SessionFileError; this conversation is then unchanged."""
        self._settle()
        session = Session(self._lm)
        session.load(path)
        saved = session.extra.get(_SAVED)
        if not isinstance(saved, dict):
            raise SessionFileError("this session file holds no conversation", file=path, try_="a file that /save wrote")
        system, turns, template = _checked(saved, len(session.tokens), path)
        self.__dict__.update(_session=session, _system=system, _turns=turns, _template=template)  # one step

    # --- inside ----------------------------------------------------------------------------------------------------

    def _notice_end(self) -> None:
        if self._asked is not None and self._asked[1].finished:
            self._settle()

    def _settle(self) -> None:
        """What every call begins with: the last answer has become a turn, and the session ends where that turn ends."""
        if self._asked is not None:
            question, stream = self._asked
            stream.close()
            held = self._session.tokens
            generated = [] if stream.failed else list(held[len(stream.prompt) :])
            added = [_Turn(question, self._written(generated, stream), len(held))] if generated else []
            self.__dict__.update(_turns=[*self._turns, *added], _asked=None)  # one step
        end = self._turns[-1].end if self._turns else 0
        held = self._session.tokens
        if end is None:  # the prefix that the session shares with that turn as rendered now
            rendered = self._render(self.messages, prompt=False)
            end = common_prefix(held, self._lm.tokenizer.encode(rendered, add_special=False))
        if len(held) > end:
            self._session.rewind(end)

    def _render(self, messages: list[dict[str, str]], *, prompt: bool = True) -> str:
        return self._lm.tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, **self._template)

    def _prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation; reuses the session's tokens if the rendered text continues them."""
        tokenizer = self._lm.tokenizer
        rendered = self._render(messages)
        held = self._session.tokens
        if held and self._turns and self._turns[-1].end == len(held):
            text = tokenizer.decode(held, skip_special=False)
            if rendered.startswith(text):
                return [*held, *tokenizer.encode(rendered[len(text) :], add_special=False)]
        return tokenizer.encode(rendered, add_special=False)

    def _written(self, tokens: list[int], stream: Stream) -> str:
        """An answer as the template should see it, special tokens such as those around its thinking included."""
        with contextlib.suppress(StateError):  # an interruption of a pass leaves no result
            if stream.result.finish_reason == "stop_string":
                return stream.result.text
        tokenizer = self._lm.tokenizer
        body = tokens[:-1] if tokens[-1] in tokenizer.eos_ids else tokens
        return tokenizer.decode(body, skip_special=False)


@attrs.frozen(kw_only=True)
class _Message:
    role: str
    content: str


@attrs.frozen(kw_only=True)
class _Saved:
    """What ``Session.extra`` holds of a conversation."""

    messages: tuple[_Message, ...]
    ends: tuple[int | None, ...]  # of the turns
    template: dict[str, Any]


def _checked(saved: Any, held: int, path: str | Path) -> tuple[str | None, list[_Turn], dict[str, Any]]:
    """System message, turns and template of a saved conversation. Raises: SessionFileError when they are malformed."""
    try:
        talk = structure_options(saved, _Saved, _SAVED)
        template = template_variables(talk.template)
    except SpecdecError as error:
        raise SessionFileError(f"the saved conversation is broken: {error.message}", file=path) from error
    messages = list(talk.messages)
    system = messages.pop(0).content if messages and messages[0].role == "system" else None
    alternate = [message.role for message in messages] == ["user", "assistant"] * len(talk.ends)
    if not alternate or any(end is not None and not 0 <= end <= held for end in talk.ends):
        raise SessionFileError("the saved conversation does not fit its session", file=path)
    texts = [message.content for message in messages]
    return system, [_Turn(*turn) for turn in zip(texts[::2], texts[1::2], talk.ends, strict=True)], template
