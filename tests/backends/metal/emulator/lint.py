"""What Metal forbids and g++ takes, found in the tokens; and multiply-adds that are not written ``fma``.

Metal shading language specification, sections 1.5.4 (what of C++ it leaves out) and 4 (address spaces). A lint sees
tokens, not types: what it finds is wrong, what it does not find need not be right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import attrs

from tests.backends.metal.emulator.tokens import Token, code, tokens


@attrs.frozen
class Finding:
    """One place in a text.

    Attributes:
        line: its number.
        text: the line.
        what: what is wrong, in the form "uses goto, which Metal does not have".
    """

    line: int
    text: str
    what: str


_WORDS = {
    "double",
    "virtual",
    "new",
    "delete",
    "goto",
    "try",
    "catch",
    "throw",
    "dynamic_cast",
    "typeid",
    "thread_local",
    "register",
    "asm",
    "wchar_t",
    "printf",
    "std",
}
_SPACES = ("device", "constant", "threadgroup", "thread", "ray_data", "object_data")
_INTEGERS = {
    "bool",
    "char",
    "uchar",
    "short",
    "ushort",
    "int",
    "uint",
    "long",
    "ulong",
    "size_t",
    "ptrdiff_t",
    "unsigned",
    "signed",
    "int8_t",
    "uint8_t",
    "int16_t",
    "uint16_t",
    "int32_t",
    "uint32_t",
    "int64_t",
    "uint64_t",
}
_FLOATS = {"float", "half", "bfloat", "bfloat16_t", "float16_t"}
_VECTORS = {f"{name}{n}" for name in (*_INTEGERS, *_FLOATS) for n in (2, 3, 4)}
_INTEGER_VECTORS = {f"{name}{n}" for name in _INTEGERS for n in (2, 3, 4)}
_NOT_VALUES = {"return", "case", "else", "do", "const", "in", "and", "or", "not"}


def forbidden(text: str) -> list[Finding]:
    """What Apple's compiler would refuse in ``text``, a whole generated kernel or a part of one, by line."""
    lines = text.splitlines()
    found = code(text)
    places = [
        *_words(found),
        *_includes(text),
        *_scopes(found),
        *_recursion(found),
        *_pointers(found),
        *_lambdas(found),
    ]
    return sorted((Finding(line, lines[line - 1].strip(), what) for line, what in places), key=lambda f: f.line)


def plain_multiply_adds(text: str) -> list[Finding]:
    """Places where a float product is added to something without ``fma``: whether they fuse is the compiler's choice.

    Seen is what stands in one expression. Left out are everything in ``[...]`` and products of integers alone: names
    declared with integer types, names in capitals (template arguments here), literals, and what is cast to an integer.
    """
    lines = text.splitlines()
    found = [t for t in code(text)]
    integers = _integer_names(found)
    types = _types(found)
    places = []
    for at, token in enumerate(found):
        if token == "*" and _is_value_end(found, at - 1, types) and not _in_subscript(found, at):
            start, end = _term(found, at, types)
            if not _all_integers(found[start:end], integers) and _is_added(found, start, end, types):
                places.append(token.line)
    return [Finding(line, lines[line - 1].strip(), "adds a product without fma") for line in sorted(set(places))]


# ------------------------------------------------------------------------------------------------------- what is not


def _words(found: list[Token]) -> Iterator[tuple[int, str]]:
    for at, token in enumerate(found):
        after = found[at + 1] if at + 1 < len(found) else None
        if token.kind == "name" and token.text in _WORDS and (token != "std" or after == "::"):
            yield token.line, f"uses {token.text}, which Metal does not have"
        if token == "long" and after == "long":
            yield token.line, "uses long long, which Metal does not have"
        if token.kind == "number" and re.fullmatch(r"[\d.eE+-]*[.eE][\d.eE+-]*[lL]", token.text):
            yield token.line, f"uses the double literal {token.text}"


def _includes(text: str) -> Iterator[tuple[int, str]]:
    for token in tokens(text):
        if token.kind == "directive" and (match := re.match(r"\s*#\s*include\s*(\S+)", token.text)):
            if not re.match(r"<(metal|simd)", match.group(1)):
                yield token.line, f"includes {match.group(1)}, which is not Metal's"


def _braces(found: list[Token]) -> Iterator[tuple[int, list[tuple[str, int]]]]:
    """Every token's index with the scopes around it: (kind, index where its head begins), outermost first."""
    scopes: list[tuple[str, int]] = []
    head = 0
    for at, token in enumerate(found):
        yield at, scopes
        if token == "{":
            scopes.append((_scope(found[head:at], bool(scopes) and scopes[-1][0] in ("function", "block")), head))
            head = at + 1
        elif token == "}":
            if scopes:
                scopes.pop()
            head = at + 1
        elif token == ";":
            head = at + 1


def _scope(head: list[Token], in_function: bool) -> str:
    words = {t.text for t in head if t.kind == "name"}
    if head and head[-1] in ("=", ",", "(", "return"):
        return "list"
    if words & {"struct", "class", "union", "enum"} and not any(t == "(" for t in head):
        return "type"
    if "namespace" in words:
        return "namespace"
    if in_function:
        return "block"
    return "function" if any(t == "(" for t in head) else "list"


def _scopes(found: list[Token]) -> Iterator[tuple[int, str]]:
    """Static locals, threadgroup variables outside kernels, variables of the program that are not constant."""
    start = 0
    for at, scopes in _braces(found):
        token = found[at]
        inside = any(kind == "function" for kind, _ in scopes)
        if token == "static" and inside:
            yield token.line, "has a static local variable, which Metal does not have"
        if token == "threadgroup" and inside and _declares_variable(found, at):
            head = next(head for kind, head in scopes if kind == "function")
            if not any(t == "kernel" for t in found[head:at]):
                yield token.line, "declares threadgroup memory in a function that is not the kernel"
        if any(kind != "namespace" for kind, _ in scopes):
            if token == "}" and scopes[-1][0] != "list":
                start = at + 1
        elif token == "}" or (token == "{" and found[at - 1] != "="):
            start = at + 1
        elif token == ";":
            statement = found[start:at]
            start = at + 1
            names = [t for t in statement if t.kind == "name"]
            if len(names) < 2 or any(t == "(" for t in statement) or any(t == "constant" for t in statement):
                continue
            if names[0] in ("using", "typedef", "struct", "class", "enum", "namespace", "template", "static_assert"):
                continue
            yield names[0].line, "has a variable outside functions that is not in the constant address space"


def _declares_variable(found: list[Token], at: int) -> bool:
    at += 1
    while at < len(found) and found[at] in ("const", "volatile"):
        at += 1
    while at < len(found) and (found[at].kind == "name" or found[at] == "::"):
        at += 1
        if at < len(found) and found[at] == "<":
            at = _close(found, at, "<", ">") + 1
    return at < len(found) and found[at] in ("[", ";", ",", "=") and found[at - 1].kind == "name"


def _close(found: list[Token], at: int, opening: str, closing: str) -> int:
    """Index of the bracket that closes the one at ``at``; the last index when there is none."""
    depth = 0
    for i in range(at, len(found)):
        depth += (found[i] == opening) - (found[i] == closing)
        if depth == 0:
            return i
    return len(found) - 1


def _open(found: list[Token], at: int, opening: str, closing: str) -> int:
    depth = 0
    for i in range(at, -1, -1):
        depth += (found[i] == closing) - (found[i] == opening)
        if depth == 0:
            return i
    return 0


def _recursion(found: list[Token]) -> Iterator[tuple[int, str]]:
    calls: dict[str, set[str]] = {}
    lines: dict[str, int] = {}
    for at, scopes in list(_with_copies(found)):
        if found[at] != "{" or any(kind == "function" for kind, _ in scopes):
            continue
        if at == 0 or found[at - 1] not in (")", "const"):
            continue
        close = at - 1 if found[at - 1] == ")" else at - 2
        name = found[_open(found, close, "(", ")") - 1]
        if name.kind != "name":
            continue
        body = found[at : _close(found, at, "{", "}") + 1]
        called = {a.text for a, b in zip(body, body[1:], strict=False) if a.kind == "name" and b == "("}
        calls.setdefault(name.text, set()).update(called)
        lines[name.text] = name.line
    for function in calls:
        seen: set[str] = set()
        waiting = list(calls[function])
        while waiting:
            other = waiting.pop()
            if other == function:
                yield lines[function], f"calls {function} from itself, and Metal has no recursion"
                break
            if other in calls and other not in seen:
                seen.add(other)
                waiting.extend(calls[other])


def _with_copies(found: list[Token]) -> Iterator[tuple[int, list[tuple[str, int]]]]:
    for at, scopes in _braces(found):
        yield at, list(scopes)


def _types(found: list[Token]) -> set[str]:
    """Names of types: Metal's, template parameters, structs and typedefs of the text."""
    known = {*_INTEGERS, *_FLOATS, *_VECTORS, "void"}
    for before, token in zip(found, found[1:], strict=False):
        if before in ("typename", "class", "struct", "enum", "using") and token.kind == "name":
            known.add(token.text)
    return known


def _pointers(found: list[Token]) -> Iterator[tuple[int, str]]:
    """``float* p`` and ``float& r`` without an address space."""
    types = _types(found) | {"vec"}
    for at in range(1, len(found)):
        if found[at] not in ("*", "&"):
            continue
        before = found[at - 1]
        if before == "const" and at >= 2:
            before = found[at - 2]
        if before == ">":
            before = found[max(0, _open(found, at - 1, "<", ">") - 1)]
        if before.text not in types:
            continue
        back = at - 1
        while back >= 0 and found[back] not in ("(", ",", ";", "{", "}", "<", "=", "return"):
            if found[back] == ">":
                back = _open(found, back, "<", ">")
            back -= 1
        if not any(t.text in _SPACES for t in found[back + 1 : at]):
            what = "pointer" if found[at] == "*" else "reference"
            yield found[at].line, f"has a {what} to {before.text} without an address space"


def _lambdas(found: list[Token]) -> Iterator[tuple[int, str]]:
    for at, token in enumerate(found):
        if token != "[" or (at and (found[at - 1].kind in ("name", "number") or found[at - 1] in ("]", ")", "["))):
            if not (at and token == "[" and found[at - 1] == "return"):
                continue
        if at + 1 < len(found) and found[at + 1] == "[":
            continue
        close = _close(found, at, "[", "]")
        if close + 1 < len(found) and found[close + 1] in ("(", "{"):
            yield token.line, "has a lambda, which Metal does not have"


# -------------------------------------------------------------------------------------------------- multiply and add


def _integer_names(found: list[Token]) -> set[str]:
    """Names declared with an integer type, or with an integer vector type, in this text, and never with another."""
    names: set[str] = set()
    others: set[str] = set()
    types = _types(found)
    for at, token in enumerate(found[:-1]):
        after = at + 1
        while after < len(found) and found[after] in ("*", "&", "const"):
            after += 1
        if token.kind == "name" and token.text in types and after < len(found) and found[after].kind == "name":
            integer = token.text in _INTEGERS or token.text in _INTEGER_VECTORS
            (names if integer else others).add(found[after].text)
            while integer and after + 1 < len(found) and found[after + 1] == ",":  # int a, b;
                after += 2
                if after < len(found) and found[after].kind == "name" and found[after].text not in types:
                    names.add(found[after].text)
    return names - others


def _is_value_end(found: list[Token], at: int, types: set[str]) -> bool:
    """Whether a binary operator can stand after this token."""
    if at < 0:
        return False
    token = found[at]
    if token.kind == "name":
        return token.text not in types and token.text not in _NOT_VALUES
    if token == ")":  # a cast, (float)x, ends no value
        opening = _open(found, at, "(", ")")
        inner = found[opening + 1 : at]
        return not (inner and all(t.text in types or t.text in (*_SPACES, "const", "*", "&") for t in inner))
    return token.kind == "number" or token == "]"


def _in_subscript(found: list[Token], at: int) -> bool:
    depth = 0
    for i in range(at, -1, -1):
        if found[i] in (";", "{", "}"):
            return False
        depth += (found[i] == "]") - (found[i] == "[")
        if depth < 0:
            return True
    return False


def _term(found: list[Token], at: int, types: set[str]) -> tuple[int, int]:
    """The product around the ``*`` at ``at``: all that is joined by * / and %."""
    start = at
    while True:
        start = _operand_before(found, start - 1, types)
        if start > 1 and found[start - 1] in ("*", "/", "%") and _is_value_end(found, start - 2, types):
            start -= 1
            continue
        break
    end = at + 1
    while True:
        end = _operand_after(found, end)
        if end < len(found) and found[end] in ("*", "/", "%"):
            end += 1
            continue
        return start, end


def _operand_before(found: list[Token], at: int, types: set[str]) -> int:
    """First index of the operand that ends at ``at``, without its signs."""
    while at >= 0:
        token = found[at]
        if token == ")":
            at = _open(found, at, "(", ")")
        elif token == "]":
            at = _open(found, at, "[", "]")
        elif token == ">":
            at = _open(found, at, "<", ">")
        before = found[at - 1] if at else None
        if token in (")", "]", ">"):
            called = before is not None and before.kind == "name" and before.text not in _NOT_VALUES
            if called or before in ("]", ")"):
                at -= 1
                continue
            if token == ")" and before == ">":
                at -= 1
                continue
            return at
        if before is not None and before in (".", "->", "::"):
            at -= 2
            continue
        return at
    return 0


def _operand_after(found: list[Token], at: int) -> int:
    """Index behind the operand that begins at ``at``."""
    while at < len(found) and found[at] in ("-", "+", "!", "~", "*", "&", "++", "--"):
        at += 1
    while at < len(found):
        token = found[at]
        if token == "(":
            at = _close(found, at, "(", ")") + 1
        elif token == "[":
            at = _close(found, at, "[", "]") + 1
        elif token.kind in ("name", "number") or token in (".", "->", "::"):
            at += 1
        else:
            return at
        if at < len(found) and found[at].kind in ("name", "number") and found[at - 1].kind in ("name", "number"):
            return at
    return at


def _all_integers(term: list[Token], integers: set[str]) -> bool:
    at = 0
    while at < len(term):
        token = term[at]
        if token.kind == "number":
            if not re.fullmatch(r"(0[xX][0-9a-fA-F]+|\d+)[uUlL]*", token.text):
                return False
        elif token.kind == "name":
            if token.text in _INTEGERS and at + 1 < len(term) and term[at + 1] == "(":
                at = _close(term, at + 1, "(", ")")  # a cast: whatever is inside is an integer now
            elif token.text in ("sizeof", "min", "max"):
                pass
            elif not (
                token.text in integers
                or token.text in _INTEGERS
                or token.text.isupper()
                or token.text.endswith(("_shape", "_strides", "_ndim"))
                or (at and term[at - 1] == ".")
            ):
                return False
        elif token == "[":
            at = _close(term, at, "[", "]")  # the index says nothing about the element
        at += 1
    return True


def _is_added(found: list[Token], start: int, end: int, types: set[str]) -> bool:
    while True:
        before = found[start - 1] if start else None
        after = found[end] if end < len(found) else None
        if after is not None and after in ("+", "-"):
            return True
        if before is not None and before in ("+=", "-="):
            return True
        if before is not None and before in ("+", "-"):
            if _is_value_end(found, start - 2, types):
                return True
            start -= 1  # a sign
            continue
        if before == "(" and after == ")":
            caller = found[start - 2] if start > 1 else None
            if caller is None or caller.kind != "name" or caller.text in _NOT_VALUES or caller == "float":
                start, end = start - (2 if caller == "float" else 1), end + 1
                continue
        return False
