// The part of the Metal standard library that kernels here use, for g++. The kernel's text stands in namespace metal.
//
// What they do not use is left out, so that it does not compile: vectors, threadgroup memory, barriers, reductions.
#pragma once
#include <stdint.h>

#include <limits>
#include <type_traits>

// the value of the lane whose number differs by the bits of the mask; waits until all lanes are here
extern "C" uint64_t emu_shuffle(uint64_t value, uint32_t mask, int line);

#define METAL_FUNC inline __attribute__((always_inline))
#define EMU_ALWAYS inline __attribute__((always_inline))
#undef INFINITY
#undef NAN
#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))

namespace metal {

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned long size_t;

using std::enable_if_t;
using std::is_same_v;

template <class To, class From>
EMU_ALWAYS To as_type(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "as_type takes types of equal size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

// ------------------------------------------------------------------------------------------------ 16 bits floats

template <class T>
struct Constant;
template <class T>
constexpr bool is_wrapped = false;
template <class T>
constexpr bool is_wrapped<Constant<T>> = true;

EMU_ALWAYS uint16_t emu_to_bfloat(float x) {  // to nearest, ties to even
  uint32_t bits = as_type<uint32_t>(x);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
EMU_ALWAYS float emu_from_bfloat(uint16_t bits) { return as_type<float>(uint32_t(bits) << 16); }

inline uint16_t emu_to_half(float x) {
  uint32_t bits = as_type<uint32_t>(x), sign = bits >> 16 & 0x8000;
  bits &= 0x7FFFFFFF;
  if (bits > 0x7F800000) return uint16_t(sign | 0x7E00 | (bits >> 13 & 0x3FF));
  if (bits >= 0x47800000) return uint16_t(sign | 0x7C00);
  if (bits < 0x38800000) {  // subnormal: the addition rounds at the right digit
    float scaled = as_type<float>(bits) + 0.5f;
    return uint16_t(sign | (as_type<uint32_t>(scaled) - 0x3F000000));
  }
  uint32_t rounded = bits + 0xFFF + (bits >> 13 & 1) - 0x38000000;
  return uint16_t(sign | rounded >> 13);
}
inline float emu_from_half(uint16_t half) {
  uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, digits = half & 0x3FF;
  if (exponent == 31) return as_type<float>(sign | 0x7F800000 | digits << 13);
  if (exponent) return as_type<float>(sign | (exponent + 112) << 23 | digits << 13);
  float tiny = float(digits) * 0x1p-24f;
  return as_type<float>(as_type<uint32_t>(tiny) | sign);
}

struct half;

// Metal converts bfloat to float by itself and nothing to bfloat: y[i] = sum needs bfloat(sum).
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  template <class U, class = enable_if_t<std::is_arithmetic_v<U>>>
  EMU_ALWAYS constexpr explicit bfloat(U x) : bits(emu_bits(float(x))) {}
  EMU_ALWAYS explicit bfloat(half x);
  EMU_ALWAYS bfloat(const Constant<bfloat>& x);
  EMU_ALWAYS operator float() const { return emu_from_bfloat(bits); }
  template <class U>
  EMU_ALWAYS bfloat& operator+=(U x) { return *this = *this + x; }
  template <class U>
  EMU_ALWAYS bfloat& operator-=(U x) { return *this = *this - x; }
  template <class U>
  EMU_ALWAYS bfloat& operator*=(U x) { return *this = *this * x; }
  template <class U>
  EMU_ALWAYS bfloat& operator/=(U x) { return *this = *this / x; }

 private:
  static constexpr uint16_t emu_bits(float x) {
    uint32_t bits = __builtin_bit_cast(uint32_t, x);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
};

struct half {
  uint16_t bits;
  half() = default;
  template <class U, class = enable_if_t<std::is_arithmetic_v<U>>>
  EMU_ALWAYS half(U x) : bits(emu_to_half(float(x))) {}
  EMU_ALWAYS explicit half(bfloat x) : bits(emu_to_half(float(x))) {}
  EMU_ALWAYS half(const Constant<half>& x);
  EMU_ALWAYS operator float() const { return emu_from_half(bits); }
  template <class U>
  EMU_ALWAYS half& operator+=(U x) { return *this = *this + x; }
  template <class U>
  EMU_ALWAYS half& operator-=(U x) { return *this = *this - x; }
  template <class U>
  EMU_ALWAYS half& operator*=(U x) { return *this = *this * x; }
  template <class U>
  EMU_ALWAYS half& operator/=(U x) { return *this = *this / x; }
};
EMU_ALWAYS bfloat::bfloat(half x) : bits(emu_to_bfloat(float(x))) {}

// Two of a kind stay of the kind, each operation rounded; with float they are float; integers join the float type.
#define EMU_OP(op)                                                                             \
  EMU_ALWAYS bfloat operator op(bfloat a, bfloat b) { return bfloat(float(a) op float(b)); }   \
  EMU_ALWAYS half operator op(half a, half b) { return half(float(a) op float(b)); }           \
  EMU_ALWAYS float operator op(half a, float b) { return float(a) op b; }                      \
  EMU_ALWAYS float operator op(float a, half b) { return a op float(b); }                      \
  template <class I, class = enable_if_t<std::is_integral_v<I>>>                               \
  EMU_ALWAYS half operator op(half a, I b) { return a op half(float(b)); }                     \
  template <class I, class = enable_if_t<std::is_integral_v<I>>>                               \
  EMU_ALWAYS half operator op(I a, half b) { return half(float(a)) op b; }                     \
  template <class I, class = enable_if_t<std::is_integral_v<I>>>                               \
  EMU_ALWAYS bfloat operator op(bfloat a, I b) { return a op bfloat(float(b)); }               \
  template <class I, class = enable_if_t<std::is_integral_v<I>>>                               \
  EMU_ALWAYS bfloat operator op(I a, bfloat b) { return bfloat(float(a)) op b; }
EMU_OP(+)
EMU_OP(-)
EMU_OP(*)
EMU_OP(/)
#undef EMU_OP
EMU_ALWAYS bfloat operator-(bfloat a) { return as_type<bfloat>(uint16_t(a.bits ^ 0x8000)); }
EMU_ALWAYS half operator-(half a) { return as_type<half>(uint16_t(a.bits ^ 0x8000)); }

typedef bfloat bfloat16_t;
typedef half float16_t;

// ---------------------------------------------------------------------------------------------------- scalar types

template <class T>
constexpr bool is_scalar_type = std::is_arithmetic_v<T> || is_same_v<T, bfloat> || is_same_v<T, half>;

struct uint3 {  // a position
  uint x, y, z;
  EMU_ALWAYS uint operator[](int i) const { return i == 0 ? x : i == 1 ? y : z; }
};

// ------------------------------------------------------------------------------------------------ constant memory

// An element behind a pointer to the constant address space. Only a type of its own, so that g++ refuses what Metal
// refuses: a `device` pointer to it. MLX puts inputs of fewer than 8 elements there.
template <class T>
struct Constant {
  T raw;
  EMU_ALWAYS T get() const { return raw; }
  EMU_ALWAYS operator T() const { return raw; }
  template <class U, class = enable_if_t<!is_same_v<U, T> && !std::is_arithmetic_v<T> && is_scalar_type<U> &&
                                         std::is_convertible_v<T, U>>>
  EMU_ALWAYS operator U() const { return U(raw); }
};
EMU_ALWAYS bfloat::bfloat(const Constant<bfloat>& x) : bits(x.raw.bits) {}
EMU_ALWAYS half::half(const Constant<half>& x) : bits(x.raw.bits) {}

#define EMU_WRAPPED_OP(op)                                                                                         \
  template <class A, class B, class = enable_if_t<is_wrapped<A> || is_wrapped<B>>>                                 \
  EMU_ALWAYS auto operator op(const A& a, const B& b)->decltype(emu_get(a) op emu_get(b)) {                        \
    return emu_get(a) op emu_get(b);                                                                               \
  }
template <class T>
EMU_ALWAYS auto emu_get(const T& x) {
  if constexpr (is_wrapped<T>)
    return x.get();
  else
    return x;
}
EMU_WRAPPED_OP(+)
EMU_WRAPPED_OP(-)
EMU_WRAPPED_OP(*)
EMU_WRAPPED_OP(/)
EMU_WRAPPED_OP(%)
EMU_WRAPPED_OP(&)
EMU_WRAPPED_OP(|)
EMU_WRAPPED_OP(^)
EMU_WRAPPED_OP(<)
EMU_WRAPPED_OP(<=)
EMU_WRAPPED_OP(>)
EMU_WRAPPED_OP(>=)
EMU_WRAPPED_OP(==)
EMU_WRAPPED_OP(!=)
#undef EMU_WRAPPED_OP

// ------------------------------------------------------------------------------------------------------ functions

#define EMU_FLOAT1(name, expression)                                            \
  EMU_ALWAYS float name(float x) { return expression; }                         \
  EMU_ALWAYS half name(half h) { float x = h; return half(float(expression)); } \
  EMU_ALWAYS bfloat name(bfloat h) { float x = h; return bfloat(float(expression)); }
EMU_FLOAT1(exp, __builtin_expf(x))
EMU_FLOAT1(log, __builtin_logf(x))
EMU_FLOAT1(sqrt, __builtin_sqrtf(x))
EMU_FLOAT1(rsqrt, 1.0f / __builtin_sqrtf(x))
EMU_FLOAT1(abs, __builtin_fabsf(x))
#undef EMU_FLOAT1
EMU_ALWAYS float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }

#define EMU_NUMBER(T, less)                                 \
  EMU_ALWAYS T min(T x, T y) { return less(y, x) ? y : x; } \
  EMU_ALWAYS T max(T x, T y) { return less(x, y) ? y : x; }
#define EMU_LESS(x, y) ((x) < (y))
#define EMU_LESS_OR_NAN(x, y) ((x) < (y) || (x) != (x))
EMU_NUMBER(float, EMU_LESS_OR_NAN)
EMU_NUMBER(int, EMU_LESS)
EMU_NUMBER(uint, EMU_LESS)
#undef EMU_NUMBER
#undef EMU_LESS
#undef EMU_LESS_OR_NAN

// ---------------------------------------------------------------------------------------------- meetings of lanes

template <class A>
inline auto simd_shuffle_xor(const A& value, ushort mask, int line = __builtin_LINE()) {
  const auto mine = emu_get(value);
  auto theirs = mine;
  uint64_t bits = 0;
  static_assert(std::is_trivially_copyable_v<decltype(theirs)> && sizeof mine <= sizeof bits);
  __builtin_memcpy(&bits, &mine, sizeof mine);
  bits = emu_shuffle(bits, mask, line);
  __builtin_memcpy(&theirs, &bits, sizeof theirs);
  return theirs;
}

}  // namespace metal

#define device  // an address space: one memory here
// what Metal leaves out of C++ (specification, section 1.5.4), and what is not emulated
#pragma GCC poison double virtual new delete goto try catch throw dynamic_cast typeid thread_local asm std threadgroup
