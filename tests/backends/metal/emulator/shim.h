// The part of the Metal standard library that kernels here use, for g++. The kernel's text stands in namespace metal.
//
// Left out on purpose, so that their use does not compile: swizzles (v.xy), double, textures, matrices.
#pragma once
#include <stdint.h>

#include <limits>
#include <type_traits>

#include "runtime.h"

#define METAL_FUNC inline __attribute__((always_inline))
#define EMU_ALWAYS inline __attribute__((always_inline))
#define M_PI_F 3.14159265358979323846f
#define M_LN2_F 0.693147180559945309417f
#define M_LOG2E_F 1.44269504088896340736f
#define M_SQRT1_2_F 0.707106781186547524400f
#undef INFINITY
#undef NAN
#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define MAXFLOAT (__FLT_MAX__)
#define FLT_MAX (__FLT_MAX__)
#define FLT_MIN (__FLT_MIN__)
#define FLT_EPSILON (__FLT_EPSILON__)

namespace metal {

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned long size_t;

using std::conditional_t;
using std::enable_if_t;
using std::is_same_v;
using std::integral_constant;
using std::true_type;
using std::false_type;
using std::is_same;

template <class To, class From>
EMU_ALWAYS To as_type(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "as_type takes types of equal size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

// ------------------------------------------------------------------------------------------------ 16 bits floats

template <class T>
struct Shared;
template <class T>
struct Constant;
template <class T>
constexpr bool is_wrapped = false;
template <class T>
constexpr bool is_wrapped<Shared<T>> = true;
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
  EMU_ALWAYS bfloat(const Shared<bfloat>& x);
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
  EMU_ALWAYS half(const Shared<half>& x);
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
EMU_ALWAYS uint16_t bfloat16_to_uint16(bfloat16_t x) { return x.bits; }
EMU_ALWAYS bfloat16_t uint16_to_bfloat16(uint16_t x) { return as_type<bfloat16_t>(x); }
EMU_ALWAYS half operator""h(long double x) { return half(float(x)); }

template <class T>
struct numeric_limits : std::numeric_limits<T> {};
template <>
struct numeric_limits<bfloat> {
  static bfloat infinity() { return uint16_to_bfloat16(0x7F80); }
  static bfloat max() { return uint16_to_bfloat16(0x7F7F); }
  static bfloat min() { return uint16_to_bfloat16(0x0080); }
  static bfloat lowest() { return uint16_to_bfloat16(0xFF7F); }
};
template <>
struct numeric_limits<half> {
  static half infinity() { return as_type<half>(uint16_t(0x7C00)); }
  static half max() { return as_type<half>(uint16_t(0x7BFF)); }
  static half min() { return as_type<half>(uint16_t(0x0400)); }
  static half lowest() { return as_type<half>(uint16_t(0xFBFF)); }
};

// ------------------------------------------------------------------------------------------------------- vectors

template <class T>
constexpr bool is_scalar_type = std::is_arithmetic_v<T> || is_same_v<T, bfloat> || is_same_v<T, half>;

template <class T, int N>
struct vec;

#define EMU_VEC_COMMON(N)                                                                          \
  typedef T emu_element;                                                                           \
  vec() = default;                                                                                 \
  EMU_ALWAYS vec(T v) {                                                                            \
    for (int i = 0; i < N; ++i) (&x)[i] = v;                                                       \
  }                                                                                                \
  template <class U, class = enable_if_t<is_scalar_type<U> && !is_same_v<U, T> &&                  \
                                         std::is_convertible_v<U, T>>, class = void>               \
  EMU_ALWAYS vec(U v) : vec(T(v)) {}                                                               \
  template <class U, class = enable_if_t<!is_same_v<U, T>>>                                        \
  EMU_ALWAYS explicit vec(const vec<U, N>& v) {                                                    \
    for (int i = 0; i < N; ++i) (&x)[i] = T(v[i]);                                                 \
  }                                                                                                \
  EMU_ALWAYS T& operator[](int i) {                                                                \
    if (uint(i) >= N) emu_fail(emu::OUT_OF_BOUNDS, 0, "indexes a vector of %d with %d{at}", N, i); \
    return (&x)[i];                                                                                \
  }                                                                                                \
  EMU_ALWAYS const T& operator[](int i) const {                                                    \
    if (uint(i) >= N) emu_fail(emu::OUT_OF_BOUNDS, 0, "indexes a vector of %d with %d{at}", N, i); \
    return (&x)[i];                                                                                \
  }

template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  EMU_VEC_COMMON(2)
  EMU_ALWAYS vec(T a, T b) : x(a), y(b) {}
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  EMU_VEC_COMMON(3)
  EMU_ALWAYS vec(T a, T b, T c) : x(a), y(b), z(c) {}
  EMU_ALWAYS vec(const vec<T, 2>& a, T b) : x(a.x), y(a.y), z(b) {}
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  EMU_VEC_COMMON(4)
  EMU_ALWAYS vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  EMU_ALWAYS vec(const vec<T, 2>& a, const vec<T, 2>& b) : x(a.x), y(a.y), z(b.x), w(b.y) {}
  EMU_ALWAYS vec(const vec<T, 3>& a, T b) : x(a.x), y(a.y), z(a.z), w(b) {}
};
#undef EMU_VEC_COMMON

#define EMU_VEC_OP(op)                                                                                  \
  template <class T, int N>                                                                             \
  EMU_ALWAYS vec<T, N> operator op(const vec<T, N>& a, const vec<T, N>& b) {                            \
    vec<T, N> r;                                                                                        \
    for (int i = 0; i < N; ++i) r[i] = T(a[i] op b[i]);                                                 \
    return r;                                                                                           \
  }                                                                                                     \
  template <class T, int N, class S, class = enable_if_t<is_scalar_type<S> && std::is_convertible_v<S, T>>> \
  EMU_ALWAYS vec<T, N> operator op(const vec<T, N>& a, S b) { return a op vec<T, N>(T(b)); }            \
  template <class T, int N, class S, class = enable_if_t<is_scalar_type<S> && std::is_convertible_v<S, T>>> \
  EMU_ALWAYS vec<T, N> operator op(S a, const vec<T, N>& b) { return vec<T, N>(T(a)) op b; }            \
  template <class T, int N, class S>                                                                    \
  EMU_ALWAYS vec<T, N>& operator op##=(vec<T, N>& a, const S& b) { return a = a op b; }
EMU_VEC_OP(+)
EMU_VEC_OP(-)
EMU_VEC_OP(*)
EMU_VEC_OP(/)
EMU_VEC_OP(%)
EMU_VEC_OP(&)
EMU_VEC_OP(|)
EMU_VEC_OP(^)
EMU_VEC_OP(<<)
EMU_VEC_OP(>>)
#undef EMU_VEC_OP
#define EMU_VEC_COMPARE(op)                                                                             \
  template <class T, int N>                                                                             \
  EMU_ALWAYS vec<bool, N> operator op(const vec<T, N>& a, const vec<T, N>& b) {                         \
    vec<bool, N> r;                                                                                     \
    for (int i = 0; i < N; ++i) r[i] = a[i] op b[i];                                                    \
    return r;                                                                                           \
  }                                                                                                     \
  template <class T, int N, class S, class = enable_if_t<is_scalar_type<S> && std::is_convertible_v<S, T>>> \
  EMU_ALWAYS vec<bool, N> operator op(const vec<T, N>& a, S b) { return a op vec<T, N>(T(b)); }
EMU_VEC_COMPARE(==)
EMU_VEC_COMPARE(!=)
EMU_VEC_COMPARE(<)
EMU_VEC_COMPARE(<=)
EMU_VEC_COMPARE(>)
EMU_VEC_COMPARE(>=)
#undef EMU_VEC_COMPARE
template <class T, int N>
EMU_ALWAYS vec<T, N> operator-(const vec<T, N>& a) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = -a[i];
  return r;
}

#define EMU_VEC_NAMES(T, name)  \
  typedef vec<T, 2> name##2; \
  typedef vec<T, 3> name##3; \
  typedef vec<T, 4> name##4;
EMU_VEC_NAMES(float, float)
EMU_VEC_NAMES(half, half)
EMU_VEC_NAMES(bfloat, bfloat)
EMU_VEC_NAMES(bool, bool)
EMU_VEC_NAMES(char, char)
EMU_VEC_NAMES(uchar, uchar)
EMU_VEC_NAMES(short, short)
EMU_VEC_NAMES(ushort, ushort)
EMU_VEC_NAMES(int, int)
EMU_VEC_NAMES(uint, uint)
EMU_VEC_NAMES(long, long)
EMU_VEC_NAMES(ulong, ulong)
#undef EMU_VEC_NAMES

template <int N>
EMU_ALWAYS bool all(const vec<bool, N>& v) {
  bool r = true;
  for (int i = 0; i < N; ++i) r = r && v[i];
  return r;
}
template <int N>
EMU_ALWAYS bool any(const vec<bool, N>& v) {
  bool r = false;
  for (int i = 0; i < N; ++i) r = r || v[i];
  return r;
}

// ------------------------------------------------------------------------------------------------ threadgroup memory

// An element of threadgroup memory. Every read and write goes through the runtime, which finds races, reads of what
// nobody wrote, and indices outside the array. A vector is read and written as a whole.
template <class T>
struct Shared {
  static_assert(std::is_trivially_copyable_v<T>);
  T raw;
  EMU_ALWAYS T get() const {
    emu_load(&raw, sizeof(T));
    return raw;
  }
  EMU_ALWAYS void set(T v) {
    emu_store(&raw, sizeof(T));
    raw = v;
  }
  Shared() = default;
  EMU_ALWAYS Shared(const Shared& other) : raw(other.get()) {}
  EMU_ALWAYS operator T() const { return get(); }
  template <class U, class = enable_if_t<!is_same_v<U, T> && !std::is_arithmetic_v<T> && is_scalar_type<U> &&
                                         std::is_convertible_v<T, U>>>
  EMU_ALWAYS operator U() const { return U(get()); }
  EMU_ALWAYS Shared& operator=(const Shared& other) { return set(other.get()), *this; }
  EMU_ALWAYS Shared& operator=(T v) { return set(v), *this; }
#define EMU_COMPOUND(op) \
  template <class U>     \
  EMU_ALWAYS Shared& operator op##=(const U& v) { return *this = T(get() op v); }
  EMU_COMPOUND(+)
  EMU_COMPOUND(-)
  EMU_COMPOUND(*)
  EMU_COMPOUND(/)
  EMU_COMPOUND(&)
  EMU_COMPOUND(|)
  EMU_COMPOUND(^)
#undef EMU_COMPOUND
  EMU_ALWAYS Shared& operator++() { return *this += 1; }
  EMU_ALWAYS Shared& operator--() { return *this -= 1; }
};
EMU_ALWAYS bfloat::bfloat(const Shared<bfloat>& x) : bits(x.get().bits) {}
EMU_ALWAYS half::half(const Shared<half>& x) : bits(x.get().bits) {}

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

template <class A>
struct emu_array;  // float[4][8] -> Shared<float>[4][8]
template <class T>
struct emu_array {
  typedef Shared<T> type;
  typedef T item;
};
template <class T, ::size_t N>
struct emu_array<T[N]> {
  typedef typename emu_array<T>::type type[N];
  typedef typename emu_array<T>::item item;
};
template <class A>
EMU_ALWAYS typename emu_array<A>::type& emu_shared(unsigned id, const char* name) {
  typedef typename emu_array<A>::type type;
  typedef typename emu_array<A>::item item;
  return *static_cast<type*>(emu_threadgroup_memory(id, sizeof(type), alignof(type), sizeof(item), name));
}

// ------------------------------------------------------------------------------------------------------ functions

#define EMU_FLOAT1(name, expression)                                                    \
  EMU_ALWAYS float name(float x) { return expression; }                                 \
  EMU_ALWAYS half name(half h) { float x = h; return half(float(expression)); }         \
  EMU_ALWAYS bfloat name(bfloat h) { float x = h; return bfloat(float(expression)); }   \
  template <class T, int N>                                                             \
  EMU_ALWAYS vec<T, N> name(const vec<T, N>& v) {                                       \
    vec<T, N> r;                                                                        \
    for (int i = 0; i < N; ++i) r[i] = name(v[i]);                                      \
    return r;                                                                           \
  }
#define EMU_FLOAT2(name, expression)                                                                   \
  EMU_ALWAYS float name(float x, float y) { return expression; }                                       \
  EMU_ALWAYS half name(half g, half h) { float x = g, y = h; return half(float(expression)); }         \
  EMU_ALWAYS bfloat name(bfloat g, bfloat h) { float x = g, y = h; return bfloat(float(expression)); } \
  template <class T, int N>                                                                            \
  EMU_ALWAYS vec<T, N> name(const vec<T, N>& a, const vec<T, N>& b) {                                  \
    vec<T, N> r;                                                                                       \
    for (int i = 0; i < N; ++i) r[i] = name(a[i], b[i]);                                               \
    return r;                                                                                          \
  }
#define EMU_FLOAT3(name, expression)                                                                             \
  EMU_ALWAYS float name(float x, float y, float z) { return expression; }                                        \
  EMU_ALWAYS half name(half f, half g, half h) { float x = f, y = g, z = h; return half(float(expression)); }    \
  EMU_ALWAYS bfloat name(bfloat f, bfloat g, bfloat h) { float x = f, y = g, z = h; return bfloat(float(expression)); } \
  template <class T, int N>                                                                                      \
  EMU_ALWAYS vec<T, N> name(const vec<T, N>& a, const vec<T, N>& b, const vec<T, N>& c) {                        \
    vec<T, N> r;                                                                                                 \
    for (int i = 0; i < N; ++i) r[i] = name(a[i], b[i], c[i]);                                                   \
    return r;                                                                                                    \
  }

#define EMU_TRANSCENDENTAL                         \
  EMU_FLOAT1(exp, __builtin_expf(x))               \
  EMU_FLOAT1(exp2, __builtin_exp2f(x))             \
  EMU_FLOAT1(exp10, __builtin_powf(10.0f, x))      \
  EMU_FLOAT1(log, __builtin_logf(x))               \
  EMU_FLOAT1(log2, __builtin_log2f(x))             \
  EMU_FLOAT1(log10, __builtin_log10f(x))           \
  EMU_FLOAT1(sqrt, __builtin_sqrtf(x))             \
  EMU_FLOAT1(rsqrt, 1.0f / __builtin_sqrtf(x))     \
  EMU_FLOAT1(sin, __builtin_sinf(x))               \
  EMU_FLOAT1(cos, __builtin_cosf(x))               \
  EMU_FLOAT1(tan, __builtin_tanf(x))               \
  EMU_FLOAT1(asin, __builtin_asinf(x))             \
  EMU_FLOAT1(acos, __builtin_acosf(x))             \
  EMU_FLOAT1(atan, __builtin_atanf(x))             \
  EMU_FLOAT1(sinh, __builtin_sinhf(x))             \
  EMU_FLOAT1(cosh, __builtin_coshf(x))             \
  EMU_FLOAT1(tanh, __builtin_tanhf(x))             \
  EMU_FLOAT2(pow, __builtin_powf(x, y))            \
  EMU_FLOAT2(powr, __builtin_powf(x, y))           \
  EMU_FLOAT2(atan2, __builtin_atan2f(x, y))        \
  EMU_FLOAT2(fmod, __builtin_fmodf(x, y))          \
  EMU_FLOAT2(divide, x / y)
EMU_TRANSCENDENTAL
namespace precise {
EMU_TRANSCENDENTAL
}
namespace fast {  // as accurate as precise:: here; on the GPU it is not
EMU_TRANSCENDENTAL
}

EMU_FLOAT1(fabs, __builtin_fabsf(x))
EMU_FLOAT1(floor, __builtin_floorf(x))
EMU_FLOAT1(ceil, __builtin_ceilf(x))
EMU_FLOAT1(trunc, __builtin_truncf(x))
EMU_FLOAT1(rint, __builtin_rintf(x))
EMU_FLOAT1(round, __builtin_roundf(x))
EMU_FLOAT1(fract, __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f))
EMU_FLOAT1(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))
EMU_FLOAT1(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? x : 0.0f)
EMU_FLOAT2(fmin, __builtin_fminf(x, y))
EMU_FLOAT2(fmax, __builtin_fmaxf(x, y))
EMU_FLOAT2(copysign, __builtin_copysignf(x, y))
EMU_FLOAT2(step, y < x ? 0.0f : 1.0f)
EMU_FLOAT3(fma, __builtin_fmaf(x, y, z))
EMU_FLOAT3(mix, x + (y - x) * z)

template <class T>
constexpr bool is_int_type = std::is_integral_v<T> && !is_same_v<T, bool>;
#define EMU_NUMBER(T, less)                                                   \
  EMU_ALWAYS T min(T x, T y) { return less(y, x) ? y : x; }                   \
  EMU_ALWAYS T max(T x, T y) { return less(x, y) ? y : x; }                   \
  EMU_ALWAYS T clamp(T x, T low, T high) { return min(max(x, low), high); }
#define EMU_LESS(x, y) ((x) < (y))
#define EMU_LESS_OR_NAN(x, y) (float(x) < float(y) || float(x) != float(x))
EMU_NUMBER(float, EMU_LESS_OR_NAN)
EMU_NUMBER(half, EMU_LESS_OR_NAN)
EMU_NUMBER(bfloat, EMU_LESS_OR_NAN)
EMU_NUMBER(char, EMU_LESS)
EMU_NUMBER(signed char, EMU_LESS)
EMU_NUMBER(uchar, EMU_LESS)
EMU_NUMBER(short, EMU_LESS)
EMU_NUMBER(ushort, EMU_LESS)
EMU_NUMBER(int, EMU_LESS)
EMU_NUMBER(uint, EMU_LESS)
EMU_NUMBER(long, EMU_LESS)
EMU_NUMBER(ulong, EMU_LESS)
#undef EMU_NUMBER
#undef EMU_LESS
#undef EMU_LESS_OR_NAN
#define EMU_VEC2(name)                                                  \
  template <class T, int N>                                             \
  EMU_ALWAYS vec<T, N> name(const vec<T, N>& a, const vec<T, N>& b) {   \
    vec<T, N> r;                                                        \
    for (int i = 0; i < N; ++i) r[i] = name(a[i], b[i]);                \
    return r;                                                           \
  }
EMU_VEC2(min)
EMU_VEC2(max)
#undef EMU_VEC2
template <class T, int N>
EMU_ALWAYS vec<T, N> clamp(const vec<T, N>& x, T low, T high) { return min(max(x, vec<T, N>(low)), vec<T, N>(high)); }

EMU_FLOAT1(abs, __builtin_fabsf(x))
#define EMU_ABS(T) EMU_ALWAYS T abs(T x) { return x < 0 ? T(-x) : x; }
EMU_ABS(char)
EMU_ABS(short)
EMU_ABS(int)
EMU_ABS(long)
#undef EMU_ABS
#undef EMU_FLOAT1
#undef EMU_FLOAT2
#undef EMU_FLOAT3
#undef EMU_TRANSCENDENTAL

EMU_ALWAYS float ldexp(float x, int n) { return __builtin_ldexpf(x, n); }
EMU_ALWAYS bool isnan(float x) { return x != x; }
EMU_ALWAYS bool isinf(float x) { return __builtin_isinf(x); }
EMU_ALWAYS bool isfinite(float x) { return __builtin_isfinite(x); }
EMU_ALWAYS bool signbit(float x) { return as_type<uint32_t>(x) >> 31; }
namespace precise {
EMU_ALWAYS float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
EMU_ALWAYS float max(float x, float y) { return metal::max(x, y); }
EMU_ALWAYS float min(float x, float y) { return metal::min(x, y); }
}  // namespace precise
namespace fast {
EMU_ALWAYS float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
EMU_ALWAYS float max(float x, float y) { return metal::max(x, y); }
EMU_ALWAYS float min(float x, float y) { return metal::min(x, y); }
}  // namespace fast

template <class T, class = enable_if_t<is_scalar_type<T>>>
EMU_ALWAYS T select(T otherwise, T chosen, bool choose) { return choose ? chosen : otherwise; }
template <class T, int N>
EMU_ALWAYS vec<T, N> select(const vec<T, N>& otherwise, const vec<T, N>& chosen, const vec<bool, N>& choose) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = choose[i] ? chosen[i] : otherwise[i];
  return r;
}
template <class T, int N>
EMU_ALWAYS T dot(const vec<T, N>& a, const vec<T, N>& b) {  // its order on the GPU is not known either
  T r = a[0] * b[0];
  for (int i = 1; i < N; ++i) r = r + a[i] * b[i];
  return r;
}

template <class T, class = enable_if_t<is_int_type<T>>>
EMU_ALWAYS T popcount(T x) { return T(__builtin_popcountll(std::make_unsigned_t<T>(x))); }
template <class T, class = enable_if_t<is_int_type<T>>>
EMU_ALWAYS T clz(T x) {
  return T(x == 0 ? 8 * sizeof(T) : __builtin_clzll(std::make_unsigned_t<T>(x)) - (64 - 8 * sizeof(T)));
}
template <class T, class = enable_if_t<is_int_type<T>>>
EMU_ALWAYS T ctz(T x) { return T(x == 0 ? 8 * sizeof(T) : __builtin_ctzll(std::make_unsigned_t<T>(x))); }
template <class T, class = enable_if_t<is_int_type<T>>>
EMU_ALWAYS T extract_bits(T x, uint offset, uint bits) {
  constexpr uint width = 8 * sizeof(T);
  if (!bits) return 0;
  return T(T(std::make_unsigned_t<T>(x) << (width - offset - bits)) >> (width - bits));
}
EMU_ALWAYS uint rotate(uint x, uint n) { return x << (n & 31) | x >> ((32 - n) & 31); }
EMU_ALWAYS uint mulhi(uint x, uint y) { return uint(uint64_t(x) * y >> 32); }
EMU_ALWAYS int mulhi(int x, int y) { return int(int64_t(x) * y >> 32); }

// -------------------------------------------------------------------------------------------- barriers, collectives

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
EMU_ALWAYS mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

inline void threadgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  emu_threadgroup_barrier(uint(flags) & 2, line);
}
inline void simdgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  emu_simdgroup_barrier(uint(flags) & 2, line);
}

template <class T>
struct emu_plain {
  typedef T type;
};
template <class T>
struct emu_plain<Shared<T>> {
  typedef T type;
};
template <class T>
struct emu_plain<Constant<T>> {
  typedef T type;
};
template <class T>
using emu_plain_t = typename emu_plain<T>::type;

// All lanes meet; the last one fills results[lane] for each of `lanes` lanes. Lanes that do not exist have poison.
template <class T, class Resolve>
inline T emu_collective(const char* kind, int line, T value, uint argument, Resolve resolve) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= emu::VALUE_BYTES);
  emu::Simdgroup& group = *emu_thread->simdgroup;
  uint lane = emu_thread->index_in_simdgroup;
  __builtin_memcpy(group.value[lane], &value, sizeof(T));
  group.argument[lane] = argument;
  if (emu_arrive(kind, line)) {
    T values[emu::LANES], results[emu::LANES];
    for (uint i = 0; i < emu::LANES; ++i) {
      if (i < group.lanes)
        __builtin_memcpy(&values[i], group.value[i], sizeof(T));
      else
        __builtin_memset(static_cast<void*>(&values[i]), 0xFF, sizeof(T));
    }
    resolve(values, results, group);
    for (uint i = 0; i < group.lanes; ++i) __builtin_memcpy(group.result[i], &results[i], sizeof(T));
    emu_release();
  }
  T result;
  __builtin_memcpy(&result, group.result[lane], sizeof(T));
  return result;
}

template <class T, class Combine>
inline T emu_reduce(T* values, uint lanes, Combine combine) {
  bool present[emu::LANES];
  for (uint i = 0; i < emu::LANES; ++i) present[i] = i < lanes;
  const emu::Tree& tree = emu_knobs.tree;
  for (uint i = 0; i < emu::LANES - 1; ++i) {
    uint into = tree.into[i], from = tree.from[i];
    if (!present[from]) continue;
    values[into] = present[into] ? T(combine(values[into], values[from])) : values[from];
    present[into] = true;
  }
  return values[tree.root];
}

#define EMU_REDUCTION(name, expression)                                                        \
  template <class A>                                                                           \
  inline emu_plain_t<A> simd_##name(const A& value, int line = __builtin_LINE()) {             \
    typedef emu_plain_t<A> T;                                                                  \
    return emu_collective<T>("simd_" #name, line, T(value), 0, [](T* v, T* r, emu::Simdgroup& g) { \
      T result = emu_reduce(v, g.lanes, [](T a, T b) { return expression; });                  \
      for (uint i = 0; i < g.lanes; ++i) r[i] = result;                                        \
    });                                                                                        \
  }                                                                                            \
  template <class A>                                                                           \
  inline emu_plain_t<A> quad_##name(const A& value, int line = __builtin_LINE()) {             \
    typedef emu_plain_t<A> T;                                                                  \
    return emu_collective<T>("quad_" #name, line, T(value), 0, [](T* v, T* r, emu::Simdgroup& g) { \
      for (uint q = 0; q < g.lanes; q += 4) {                                                  \
        T result = v[q];                                                                       \
        for (uint i = q + 1; i < q + 4 && i < g.lanes; ++i) {                                  \
          T a = result, b = v[i];                                                              \
          result = T(expression);                                                              \
        }                                                                                      \
        for (uint i = q; i < q + 4 && i < g.lanes; ++i) r[i] = result;                         \
      }                                                                                        \
    });                                                                                        \
  }
EMU_REDUCTION(sum, a + b)
EMU_REDUCTION(product, a* b)
EMU_REDUCTION(max, max(a, b))
EMU_REDUCTION(min, min(a, b))
EMU_REDUCTION(and, a& b)
EMU_REDUCTION(or, a | b)
EMU_REDUCTION(xor, a ^ b)
#undef EMU_REDUCTION

// `lane` is the reader and `n` its argument; a source that is not there gives poison.
#define EMU_SHUFFLE(name, source)                                                                       \
  template <class A>                                                                                    \
  inline emu_plain_t<A> simd_##name(const A& value, ushort argument, int line = __builtin_LINE()) {     \
    typedef emu_plain_t<A> T;                                                                           \
    return emu_collective<T>("simd_" #name, line, T(value), argument, [](T* v, T* r, emu::Simdgroup& g) { \
      for (int lane = 0; lane < int(g.lanes); ++lane) {                                                 \
        int n = int(g.argument[lane]), at = source;                                                     \
        (void)n;                                                                                        \
        if (at >= 0 && at < int(g.lanes))                                                               \
          r[lane] = v[at];                                                                              \
        else                                                                                            \
          __builtin_memset(static_cast<void*>(&r[lane]), 0xFF, sizeof(T));                              \
      }                                                                                                 \
    });                                                                                                 \
  }
EMU_SHUFFLE(shuffle, n)
EMU_SHUFFLE(broadcast, n)
EMU_SHUFFLE(shuffle_xor, lane ^ n)
EMU_SHUFFLE(shuffle_down, lane + n)
EMU_SHUFFLE(shuffle_up, lane - n)
EMU_SHUFFLE(shuffle_rotate_down, (lane + n) % int(emu::LANES))
EMU_SHUFFLE(shuffle_rotate_up, (lane + 32 - n % 32) % int(emu::LANES))
#undef EMU_SHUFFLE
template <class A>
inline emu_plain_t<A> simd_broadcast_first(const A& value, int line = __builtin_LINE()) {
  return simd_broadcast(value, 0, line);
}
template <class A>
inline emu_plain_t<A> quad_shuffle_xor(const A& value, ushort mask, int line = __builtin_LINE()) {
  return simd_shuffle_xor(value, mask & 3, line);
}
template <class A>
inline emu_plain_t<A> quad_broadcast(const A& value, ushort lane, int line = __builtin_LINE()) {
  return simd_shuffle(value, ushort((emu_thread->index_in_simdgroup & ~3u) + lane), line);
}
// In lane order, whatever the knob: a scan has no tree of its own here.
template <class A>
inline emu_plain_t<A> simd_prefix_inclusive_sum(const A& value, int line = __builtin_LINE()) {
  typedef emu_plain_t<A> T;
  return emu_collective<T>("simd_prefix_inclusive_sum", line, T(value), 0, [](T* v, T* r, emu::Simdgroup& g) {
    r[0] = v[0];
    for (uint i = 1; i < g.lanes; ++i) r[i] = T(r[i - 1] + v[i]);
  });
}
template <class A>
inline emu_plain_t<A> simd_prefix_exclusive_sum(const A& value, int line = __builtin_LINE()) {
  typedef emu_plain_t<A> T;
  return emu_collective<T>("simd_prefix_exclusive_sum", line, T(value), 0, [](T* v, T* r, emu::Simdgroup& g) {
    r[0] = T(0);
    for (uint i = 1; i < g.lanes; ++i) r[i] = T(r[i - 1] + v[i - 1]);
  });
}
inline bool simd_all(bool value, int line = __builtin_LINE()) {
  return emu_collective<bool>("simd_all", line, value, 0, [](bool* v, bool* r, emu::Simdgroup& g) {
    bool result = true;
    for (uint i = 0; i < g.lanes; ++i) result = result && v[i];
    for (uint i = 0; i < g.lanes; ++i) r[i] = result;
  });
}
inline bool simd_any(bool value, int line = __builtin_LINE()) {
  return emu_collective<bool>("simd_any", line, value, 0, [](bool* v, bool* r, emu::Simdgroup& g) {
    bool result = false;
    for (uint i = 0; i < g.lanes; ++i) result = result || v[i];
    for (uint i = 0; i < g.lanes; ++i) r[i] = result;
  });
}
EMU_ALWAYS bool simd_is_first() { return emu_thread->index_in_simdgroup == 0; }

// ------------------------------------------------------------------------------------------------------- MLX's own

template <class U>
struct Limits {
  static constexpr U max = std::numeric_limits<U>::max(), min = std::numeric_limits<U>::min();
  static constexpr U finite_max = std::numeric_limits<U>::max(), finite_min = std::numeric_limits<U>::min();
};
template <>
struct Limits<float> {
  static constexpr float max = __builtin_inff(), min = -__builtin_inff();
  static constexpr float finite_max = __FLT_MAX__, finite_min = -__FLT_MAX__;
};
template <class I = int64_t>
EMU_ALWAYS I elem_to_loc(I elem, const Constant<int>* shape, const Constant<int64_t>* strides, int ndim) {
  I location = 0;
  for (int i = ndim - 1; i >= 0 && elem > 0; --i) {
    location += (elem % shape[i]) * I(strides[i]);
    elem /= shape[i];
  }
  return location;
}
EMU_ALWAYS uint3 emu_uint3(const emu::Size& size) { return uint3(size.x, size.y, size.z); }

}  // namespace metal
