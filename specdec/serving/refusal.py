"""Answers to requests that cannot be served."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from specdec.errors import SpecdecError, cut, one_line

_LONGEST = 500  # characters of a message
_SETTING = re.compile(r"\bgeneration\.(\w+)")
_FIELDS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "processors": "response_format"}


class Refusal(Exception):
    """A request that is not served, with its HTTP status and one sentence.

    Args:
        status: of HTTP, 400 to 599.
        message: one sentence; it must not quote a path or a key of this machine.
        param: the field of the request that is wrong.
        code: a word for programs.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    @classmethod
    def of(cls, error: SpecdecError) -> Refusal:
        """The refusal of a request that the model cannot take. Facts other than the hint may name files; they stay."""
        hint = error.facts.get("try")
        message = f"{error.message} (try {hint})" if hint else error.message
        fields = [_FIELDS.get(name, name) for name in _SETTING.findall(message)]
        message = _SETTING.sub(lambda match: _FIELDS.get(match[1], match[1]), message)
        return cls(400, message, param=fields[0] if fields else None)

    def body(self) -> dict[str, Any]:
        """The JSON body, as OpenAI's API words it."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        message = cut(one_line(" ".join(str(self).split())), _LONGEST)
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}
