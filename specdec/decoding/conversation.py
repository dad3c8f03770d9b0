"""A chat conversation over one session; only text that is new since the last turn runs through the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specdec.contract import Stats
from specdec.decoding.parts import Parts
from specdec.decoding.result import Result
from specdec.decoding.session import Session
from specdec.decoding.stream import Stream
from specdec.errors import PromptError, SessionFileError, StateError
from specdec.text import common_prefix

_SAVED = "conversation"  # key of Session.extra
_ROLES = ("system", "user", "assistant")


class Conversation:
    """Messages, and the session that holds their tokens.

    The checkpoint's chat template renders the conversation as the next prompt. If that continues the session's text,
    only the rest is encoded and runs through the model. If the template renders earlier turns differently (it may drop
    the thinking of old answers), the longest common prefix of tokens is kept.

    Args:
        lm: the model; its checkpoint must have a chat template.
        system: a system message.
        template: further variables of the template, such as ``{"enable_thinking": False}``.

    An answer's message keeps its special tokens (a template may look for them) but not the token that ended it;
    ``Answer`` gives the text without special tokens.

    Attributes:
        kept: tokens of the session that the last prompt reused.

    Raises: PromptError when there is no chat template, or it fails on a first message.
    """

    def __init__(self, lm: Parts, *, system: str | None = None, template: Mapping[str, Any] | None = None):
        self._lm = lm
        self._template = dict(template or {})
        self._messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self._session = Session(lm)
        # where each turn ends in the session; None once a later prompt has rendered that turn differently
        self._ends: list[int | None] = []
        self._answer: Answer | None = None
        self.kept = 0
        self._render([*self._messages, {"role": "user", "content": "?"}])

    @property
    def messages(self) -> list[dict[str, str]]:
        """Copies of all messages, oldest first."""
        return [dict(message) for message in self._messages]

    @property
    def turns(self) -> int:
        """The number of answered questions."""
        return len(self._ends)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens of the session."""
        return self._session.tokens

    @property
    def stats(self) -> Stats:
        """Acceptance over the whole conversation."""
        return self._session.stats

    def ask(self, text: str, **settings: Any) -> Answer:
        """Add a user message and answer it; iterate over the result for text.

        The turn joins the conversation when the answer ends or is stopped, unless it has no tokens yet.

        Args:
            text: the message.
            **settings: as for ``Session.stream``.

        Raises: PromptError for an empty message, or a conversation too long for the model; it is then unchanged.
        """
        self._must_be_idle()
        if not text.strip():
            raise PromptError("the message is empty", try_="at least one character")
        prompt = self._prompt([*self._messages, {"role": "user", "content": text}])
        self.kept = self._session.set_prompt(prompt)
        self._ends = [end if end is not None and end <= self.kept else None for end in self._ends]
        try:
            stream = self._session.stream(**settings)
        except BaseException:
            self._return_to(self.turns)
            raise
        self._answer = Answer(self, text, stream)
        return self._answer

    def rewind(self, turns: int = 1) -> None:
        """Forget the last questions and their answers.

        Raises: StateError when there are fewer turns.
        """
        self._must_be_idle()
        if not 1 <= turns <= self.turns:
            there = f"1 to {self.turns}" if self.turns else "nothing: there is no turn yet"
            raise StateError(f"rewind takes {there}, got {turns}")
        del self._messages[len(self._messages) - 2 * turns :]
        del self._ends[self.turns - turns :]
        self._return_to(self.turns)

    def save(self, path: str | Path) -> None:
        """Write messages, tokens and states to one file. Raises: SessionFileError when it cannot be written."""
        self._must_be_idle()
        self._session.extra[_SAVED] = {"messages": self._messages, "ends": self._ends, "template": self._template}
        self._session.save(path)

    def load(self, path: str | Path) -> None:
        """Replace this conversation with a saved one. Raises: SessionFileError; this conversation is then unchanged."""
        self._must_be_idle()
        session = Session(self._lm)
        session.load(path)
        saved = session.extra.get(_SAVED)
        if saved is None:
            raise SessionFileError("this session file holds no conversation", file=path, try_="a file that /save wrote")
        messages, ends, template = _checked(saved, len(session.tokens), path)
        self._session, self._messages, self._ends, self._template = session, messages, ends, template
        self._answer = None

    # --- inside ----------------------------------------------------------------------------------------------------

    def _must_be_idle(self) -> None:
        if self._answer is not None and not self._answer.finished:
            if not self._answer.stopping:
                raise StateError("an answer is still being generated", try_="stop() it, or read its result first")
            self._answer.drain()

    def _render(self, messages: list[dict[str, str]], *, prompt: bool = True) -> str:
        return self._lm.tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, **self._template)

    def _prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation; reuses the session's tokens if the rendered text continues them."""
        tokenizer = self._lm.tokenizer
        rendered = self._render(messages)
        held = self._session.tokens
        if held and self._ends and self._ends[-1] == len(held):
            text = tokenizer.decode(held, skip_special=False)
            if rendered.startswith(text):
                return [*held, *tokenizer.encode(rendered[len(text) :], add_special=False)]
        return tokenizer.encode(rendered, add_special=False)

    def _return_to(self, turns: int) -> None:
        """Cut the session back to the end of a turn, or to the prefix it shares with that turn as rendered now."""
        end = self._ends[turns - 1] if turns else 0
        if end is not None:
            self._session.rewind(min(end, len(self._session.tokens)))
            return
        rendered = self._lm.tokenizer.encode(self._render(self._messages, prompt=False), add_special=False)
        self._session.rewind(common_prefix(self._session.tokens, rendered))

    def _written(self, result: Result) -> str:
        """The answer as the template should see it, special tokens such as those around its thinking included."""
        if result.finish_reason == "stop_string":
            return result.text
        tokenizer, tokens = self._lm.tokenizer, result.tokens
        body = tokens[:-1] if tokens and tokens[-1] in tokenizer.eos_ids else tokens
        return tokenizer.decode(body, skip_special=False)

    def _finish(self, question: str, answer: str, *, answered: bool) -> None:
        """End the answer: keep the turn, or drop it if nothing was generated."""
        if answered:
            self._messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            self._ends.append(len(self._session.tokens))
        else:
            self._return_to(self.turns)


class Answer:
    """A running answer: iterate for text, then read ``result`` (which generates whatever is left)."""

    def __init__(self, conversation: Conversation, question: str, stream: Stream) -> None:
        self._conversation = conversation
        self._question = question
        self._stream = stream
        self._text = ""
        self.finished = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            piece = next(self._stream)
        except StopIteration:
            result = self._stream.result
            self._close(self._conversation._written(result), answered=bool(result.tokens))
            raise
        except KeyboardInterrupt:  # in the middle of a pass: the text so far stays
            self._close(self._text, answered=bool(self._text))
            raise
        except BaseException:
            self._close("", answered=False)
            raise
        self._text += piece
        return piece

    def _close(self, text: str, *, answered: bool) -> None:
        if not self.finished:
            self.finished = True
            self._conversation._finish(self._question, text, answered=answered)

    def stop(self) -> None:
        """Ask the answer to end after the current cycle; safe from a signal handler or another thread."""
        self._stream.stop()

    @property
    def stopping(self) -> bool:
        """Whether ``stop`` was called."""
        return self._stream.stopping

    def drain(self) -> None:
        """Run to the end."""
        for _ in self:
            pass

    @property
    def result(self) -> Result:
        """The result of the generation; generates what is left first."""
        self.drain()
        return self._stream.result


def _checked(saved: Any, held: int, path: str | Path) -> tuple[list[dict[str, str]], list[int | None], dict[str, Any]]:
    """The parts of a saved conversation. Raises: SessionFileError when they are malformed."""
    try:
        messages = [{"role": str(message["role"]), "content": str(message["content"])} for message in saved["messages"]]
        ends = [None if end is None else int(end) for end in saved["ends"]]
        template = dict(saved["template"])
    except (KeyError, TypeError, ValueError) as error:
        raise SessionFileError(f"the saved conversation is broken: {type(error).__name__}", file=path) from error
    turns = [message for message in messages if message["role"] != "system"]
    alternate = [message["role"] for message in turns] == ["user", "assistant"] * len(ends)
    if not alternate or len(messages) - len(turns) > 1 or any(end is not None and not 0 <= end <= held for end in ends):
        raise SessionFileError("the saved conversation does not fit its session", file=path)
    return messages, ends, template
