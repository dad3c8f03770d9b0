"""Metal source to C++: address spaces and attributes go; everything else stays the text that MLX generates.

What Metal's library provides is in shim.h.
"""

from __future__ import annotations

from tests.backends.metal.emulator.errors import ForbiddenError
from tests.backends.metal.emulator.export import Exported, Parameter
from tests.backends.metal.emulator.tokens import Token, tokens

_THREAD = {  # attribute: expression over the thread t
    "thread_position_in_grid": "emu_uint3(t.position_in_grid)",
    "thread_position_in_threadgroup": "emu_uint3(t.position_in_threadgroup)",
    "threadgroup_position_in_grid": "emu_uint3(t.threadgroup_position)",
    "threads_per_grid": "emu_uint3(t.threads_per_grid)",
    "threadgroups_per_grid": "emu_uint3(t.threadgroups_per_grid)",
    "threads_per_threadgroup": "emu_uint3(t.threads_per_threadgroup)",
    "dispatch_threads_per_threadgroup": "emu_uint3(t.dispatched_per_threadgroup)",
    "thread_index_in_threadgroup": "t.index_in_threadgroup",
    "thread_index_in_simdgroup": "t.index_in_simdgroup",
    "simdgroup_index_in_threadgroup": "t.simdgroup_index",
    "simdgroups_per_threadgroup": "t.simdgroups_per_threadgroup",
    "threads_per_simdgroup": "emu::LANES",
}


def translate(kernel: str, exported: Exported) -> str:
    """A C++ translation unit with the function ``emu_kernel``; lines of ``kernel.metal`` are those of the text.

    Raises: ForbiddenError for what has no translation.
    """
    body = exported.text
    if exported.arguments:  # the instantiation, which names an attribute where C++ has none
        body = body[: body.rindex("template [[host_name(")]
    arguments = ", ".join(_argument(kernel, i, p) for i, p in enumerate(exported.parameters))
    instance = exported.function + (f"<{exported.arguments}>" if exported.arguments else "")
    return (
        '#include "shim.h"\n'
        "namespace metal { namespace text {\n"
        f'#line 1 "{kernel}.metal"\n{_rewrite(kernel, body)}\n'
        '#line 1 "entry"\n'
        'extern "C" void emu_kernel(void* const* buffers, const emu::Thread& t) {\n'
        f"  (void)t; (void)buffers;\n  {instance}({arguments});\n}}\n}}}}\n"
    )


def _argument(kernel: str, index: int, parameter: Parameter) -> str:
    if parameter.space is not None:
        type_ = f"Constant<{parameter.type}>" if parameter.space == "constant" and parameter.pointer else parameter.type
        pointer = f"static_cast<{type_}*>(buffers[{index}])"
        return pointer if parameter.pointer else "*" + pointer
    if parameter.name not in _THREAD:
        raise ForbiddenError(kernel, f"uses the attribute {parameter.name}, which the emulator does not have")
    return _THREAD[parameter.name]


def _rewrite(kernel: str, text: str) -> str:
    return "".join(_Rewriter(kernel, tokens(text)).run())


class _Rewriter:
    """One walk over the tokens. ``at`` is the next one; everything before is in ``out``."""

    def __init__(self, kernel: str, found: list[Token]) -> None:
        self._kernel = kernel
        self._tokens = found
        self._at = 0
        self._out: list[str] = []

    def run(self) -> list[str]:
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            if token == "[" and self._next(1) == "[":
                self._attribute()
            elif token.kind == "directive" and "#include" in token.text.replace(" ", ""):
                self._at += 1
            elif token in ("device", "thread", "kernel") and token.kind == "name":
                self._at += 1
            elif token == "constant":
                self._constant()
            elif token == "threadgroup":
                raise ForbiddenError(self._kernel, f"uses threadgroup memory (line {token.line})")
            else:
                self._out.append(token.text)
                self._at += 1
        return self._out

    def _next(self, ahead: int = 0) -> Token | None:
        return self._tokens[self._at + ahead] if self._at + ahead < len(self._tokens) else None

    def _space(self) -> str:
        """Skip space; what was skipped, for its newlines."""
        skipped = ""
        while (token := self._next()) is not None and token.kind == "space":
            skipped += token.text
            self._at += 1
        return skipped

    def _attribute(self) -> None:
        depth = 0
        while (token := self._next()) is not None:
            depth += (token == "[") - (token == "]")
            self._out.append("\n" * token.text.count("\n"))
            self._at += 1
            if depth == 0:
                return

    def _constant(self) -> None:
        """``constant`` is const; a pointer to it is one to a type of its own."""
        before = [t for t in self._tokens[max(0, self._at - 4) : self._at] if t.kind != "space"]
        const = "" if before and before[-1] in ("const", "constexpr") else "const "
        self._at += 1
        start = self._at
        gap = self._space()
        if (token := self._next()) is not None and token in ("const", "constexpr"):
            const = ""
            gap += token.text
            self._at += 1
            gap += self._space()
        type_ = self._type()
        after = self._space()
        if self._next() == "*":
            self._out.append(f"{const}{gap}Constant<{type_}>{after}")
        else:
            self._out.append(const)
            self._at = start

    def _type(self) -> str:
        words = ""
        while (token := self._next()) is not None:
            if token.kind == "name" and (not words or words.endswith("::") or words in ("unsigned", "signed")):
                words += (" " if words and not words.endswith("::") else "") + token.text
                self._at += 1
                self._space_if_more(words)
            elif token == "::":
                words += "::"
                self._at += 1
            elif token == "<" and words:
                words += self._angles()
            else:
                break
        return words

    def _space_if_more(self, words: str) -> None:
        if words in ("unsigned", "signed"):
            self._space()

    def _angles(self) -> str:
        depth, text = 0, ""
        while (token := self._next()) is not None:
            depth += (token == "<") - (token == ">") - 2 * (token == ">>")
            text += token.text
            self._at += 1
            if depth <= 0:
                break
        return text
