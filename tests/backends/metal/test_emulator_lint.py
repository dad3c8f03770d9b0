"""The lints of Metal source: each finds what it is for, at its line, and leaves alone what looks like it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("mlx.core", exc_type=ImportError)

from tests.backends.metal.emulator.lint import forbidden, plain_multiply_adds
from tests.backends.metal.emulator.tokens import tokens

FORBIDDEN = {
    "float f() { double x = 1; return x; }": "uses double",
    "float f() { return 1.0L; }": "uses the double literal 1.0L",
    "float f(float x) { return std::exp(x); }": "uses std",
    "#include <cmath>\n": "includes <cmath>",
    "struct S { virtual float f(); };": "uses virtual",
    "void f() { device int* p = new int; }": "uses new",
    "void f() { delete p; }": "uses delete",
    "void f() { goto end; end: return; }": "uses goto",
    "void f() { try { g(); } catch (int) {} }": "uses try",
    "void f() { throw 1; }": "uses throw",
    "void f() { long long x = 1; }": "uses long long",
    "int f(int n) { return n ? f(n - 1) : 0; }": "calls f from itself",
    "int g(int n); int f(int n) { return g(n); } int g(int n) { return f(n); }": "calls f from itself",
    "int f() { static int n = 0; return ++n; }": "static local",
    "void f() { if (true) { static int n = 0; } }": "static local",
    "float table[3] = {1, 2, 3};": "not in the constant address space",
    "float f() { return 1; }\nint counter = 0;": "not in the constant address space",
    "float f(float* p) { return p[0]; }": "pointer to float without an address space",
    "float f(const float& x) { return x; }": "reference to float without an address space",
    "template <typename T> float f(const T* p) { return p[0]; }": "pointer to T without an address space",
    "struct S { int n; }; void f(S& s) { s.n = 1; }": "reference to S without an address space",
    "float f(device float* p) { return ((float*)p)[0]; }": "pointer to float without an address space",
    "void f(vec<float, 4>* p) {}": "pointer to vec without an address space",
    "void f() { threadgroup float s[32]; }": "declares threadgroup memory in a function that is not the kernel",
    "void f() { auto g = [](int n) { return n; }; }": "has a lambda",
    "void f() { auto g = [&] { return 1; }; }": "has a lambda",
}
ALLOWED = [
    "constant float table[3] = {1, 2, 3};",
    "static constant constexpr float PI = 3;",
    "struct S { static constexpr constant int n = 3; float v[2]; };",
    "using namespace metal; typedef float number; using other = int;",
    "float f(const device float* p, constant int& n, thread float& x, const threadgroup vec<float, 4>* q);",
    "template <int N> int f() { return f<N - 1>() * N; }",
    "int g() { return 1; } int f() { return g() + g(); }",
    "// double, goto and std::exp in a comment\n/* new */ float f() { return 1; }",
    "[[kernel]] void k(device float* y [[buffer(0)]]) { threadgroup float s[32]; s[0] = y[y[1] > 0 ? 1 : 2]; }",
    "#include <metal_stdlib>\n",
    "float f(float a, float b) { return a * b & 3; }",
    "int f(int n) { int a[3] = {1, 2, 3}; for (int i = 0; i < n; ++i) { a[i % 3] += a[(i + 1) % 3]; } return a[0]; }",
]


@pytest.mark.parametrize("text", FORBIDDEN)
def test_what_metal_forbids_is_found(text: str) -> None:
    found = forbidden("\n\n" + text)
    assert found, "nothing was found"
    assert FORBIDDEN[text] in found[0].what
    assert found[0].line in (3, 4)
    assert found[0].text in text


@pytest.mark.parametrize("text", ALLOWED)
def test_what_metal_takes_is_left_alone(text: str) -> None:
    assert forbidden(text) == []


PLAIN = [
    "y[i] = a * b + c;",
    "y[i] = c + a * b;",
    "y[i] = c - a[i * 3 + 1] * b[j];",
    "sum += a * b;",
    "sum -= w[i] * v[i];",
    "y[i] = (a * b) + c;",
    "y[i] = float(a * b) + c;",
    "y[i] = -(a * b) + c;",
    "y[i] = -a * b + c;",
    "y[i] = c + f(a) * g(b);",
    "y[i] = c + v.x * 2.0f;",
    "y[i] = x[at + 1] * 2 + c;",
    "return s * g + k * d;",
    "int n = 3;\nfloat x = n * 0.5f + c;",
    "y[i] = a / b * c + d;",
]
NOT_PLAIN = [
    "y[i] = fma(a, b, c);",
    "y[i] = fma(a * g, b, c * d);",
    "y[i] = f(a * b) + c;",
    "y[i] = a * b;",
    "y[i] = (a + b) * c;",
    "y[i] = x[row * width + column];",
    "int n = 3;\nint m = n * 4 + 1;",
    "size_t at = size_t(row) * 5 + 1;",
    "template <int N> void f(int row) { int at = row * N + N * 2; }",
    "uint3 p = thread_position_in_grid;\nuint at = p.y * 32 + p.x;",
    "int at = ROWS * COLUMNS + 3;",
    "const float* p = a + 3;",
    "y[i] = *p + *q;",
    "for (int i = 0; i < n * 4 + 1; ++i) {}\nint n;",
]


@pytest.mark.parametrize("text", PLAIN)
def test_plain_multiply_adds_are_found(text: str) -> None:
    found = plain_multiply_adds("\n" + text)
    assert [finding.text for finding in found] == [text.splitlines()[-1]]


@pytest.mark.parametrize("text", NOT_PLAIN)
def test_what_needs_no_fma_is_left_alone(text: str) -> None:
    assert plain_multiply_adds(text) == []


@given(st.text(alphabet=st.sampled_from("ab1.0+-*/(){}[]<>:;,= \n\"'\\/*#x"), max_size=60))
def test_tokens_are_the_text_again(text: str) -> None:
    """No character is lost and lines are counted, whatever the text."""
    found = tokens(text)
    assert "".join(token.text for token in found) == text
    at = 0
    for token in found:
        assert token.line == 1 + text[:at].count("\n")
        at += len(token.text)


PIECES = [*FORBIDDEN, *ALLOWED, *PLAIN, *"{}()[]<>*&"]


@given(st.lists(st.sampled_from(PIECES), max_size=6))
def test_lints_take_any_text(parts: list[str]) -> None:
    """Also what does not compile: the compiler's message is the one to read then."""
    text = "\n".join(parts)
    forbidden(text)
    plain_multiply_adds(text)
