"""Metal source to C++: address spaces and attributes go, threadgroup memory becomes the runtime's.

``threadgroup float s[32]`` becomes a reference to memory that the runtime poisons and watches, and ``threadgroup
float*`` a pointer to elements that report their reads and writes (``Shared`` in shim.h). Everything else stays the text
that MLX generates; what Metal's library provides is in shim.h.
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
    "grid_size": "emu_uint3(t.threads_per_grid)",
    "threadgroups_per_grid": "emu_uint3(t.threadgroups_per_grid)",
    "threads_per_threadgroup": "emu_uint3(t.threads_per_threadgroup)",
    "dispatch_threads_per_threadgroup": "emu_uint3(t.dispatched_per_threadgroup)",
    "thread_index_in_threadgroup": "t.index_in_threadgroup",
    "thread_index_in_simdgroup": "t.index_in_simdgroup",
    "thread_index_in_quadgroup": "t.index_in_simdgroup % 4",
    "quadgroup_index_in_threadgroup": "t.index_in_threadgroup / 4",
    "simdgroup_index_in_threadgroup": "t.simdgroup_index",
    "simdgroups_per_threadgroup": "t.simdgroups_per_threadgroup",
    "threads_per_simdgroup": "emu::LANES",
    "thread_execution_width": "emu::LANES",
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
        self._arrays = 0

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
                self._threadgroup()
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
        line = self._tokens[self._at].line
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
        type_ = self._type(line)
        after = self._space()
        if self._next() == "*":
            self._out.append(f"{const}{gap}Constant<{type_}>{after}")
        else:
            self._out.append(const)
            self._at = start

    def _threadgroup(self) -> None:
        line = self._tokens[self._at].line
        self._at += 1
        lead = self._space()
        while (token := self._next()) is not None and token in ("const", "volatile"):
            lead += token.text
            self._at += 1
            lead += self._space()
        type_ = self._type(line)
        gap = self._space()
        while (token := self._next()) is not None and token == "const":
            lead = "const " + lead
            self._at += 1
            gap += self._space()
        if token is not None and token in ("*", "&"):
            self._out.append(f"{lead}Shared<{type_}>{gap}")
            return
        self._variables(type_, lead + gap, line)

    def _type(self, line: int) -> str:
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
        if not words:
            raise ForbiddenError(self._kernel, f"has a threadgroup declaration without a type (line {line})")
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

    def _variables(self, type_: str, space: str, line: int) -> None:
        """``a[4], b[2][8];`` after ``threadgroup float``: a reference for each."""
        self._out.append("\n" * space.count("\n"))
        while True:
            name = self._next()
            if name is None or name.kind != "name":
                raise ForbiddenError(self._kernel, f"has a threadgroup declaration that is not clear (line {line})")
            self._at += 1
            dimensions, depth = "", 0
            while (token := self._next()) is not None and not (depth == 0 and token in (",", ";", "=", "(", "{")):
                depth += (token == "[") - (token == "]")
                dimensions += token.text
                self._at += 1
            if token is None or token not in (",", ";"):
                raise ForbiddenError(
                    self._kernel, f"initialises the threadgroup variable {name.text} where it is declared (line {line})"
                )
            array = f"{type_}{dimensions}".strip()
            self._out.append(f'auto& {name.text} = emu_shared<{array}>({self._arrays}, "{name.text}");')
            self._arrays += 1
            self._at += 1
            if token == ";":
                return
            self._out.append("\n" * self._space().count("\n"))
