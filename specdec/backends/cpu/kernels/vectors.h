// Vectors of the machine's native width, the two activation types, and functions that the kernels share.
//
// Bits contract: every result depends only on the operands. Contraction is disabled on the command line
// (-ffp-contract=off), so a multiply-add is fused exactly where `fma` is written, and two instantiations of one
// template cannot round differently.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))
// All other symbols are hidden (-fvisibility=hidden): two builds in one process must not share template instances,
// which the loader would otherwise unify by name.
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace specdec {

// X86 names an intrinsic of the native width.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define SPECDEC_AVX512 1
#define X86(NAME) _mm512_##NAME
constexpr int W = 16;
typedef __m512 FloatLanes;
typedef __m512i Lanes;
#elif defined(__AVX2__)
#define X86(NAME) _mm256_##NAME
constexpr int W = 8;
typedef __m256 FloatLanes;
typedef __m256i Lanes;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

struct bf16 {
    uint16_t bits;
};

// Weights in a memory-mapped file start at any even address, so loads may be unaligned; memcpy handles that portably.
template <class V> INLINE V load_as(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof(V));
    return v;
}

INLINE vf splat(float a) { return a - vf{}; }

INLINE vf fma(vf a, vf b, vf c) {
#ifdef X86
    return (vf)X86(fmadd_ps)((FloatLanes)a, (FloatLanes)b, (FloatLanes)c);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE float fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;  // the same operations as for vectors: a scalar tail must round like the vector body
#endif
}

INLINE vf select(vi mask, vf a, vf b) { return mask ? a : b; }

INLINE vf maximum(vf a, vf b) { return select(a > b, a, b); }

// --- activation types ----------------------------------------------------------------------------------------------

INLINE float widen(float a) { return a; }
INLINE float widen(bf16 a) {
    uint32_t u = (uint32_t)a.bits << 16;
    return load_as<float>(&u);
}

INLINE void narrow(float a, float* p) { *p = a; }
INLINE void narrow(float a, bf16* p) {  // round to nearest even; a NaN stays a NaN
    uint32_t u = load_as<uint32_t>(&a);
    p->bits = a != a ? 0x7fc0 : (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

INLINE vf load(const float* p) { return load_as<vf>(p); }
INLINE vf load(const bf16* p) {
#if defined(X86) && !defined(SPECDEC_AVX512)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);  // GCC makes six of two
#else
    return (vf)(__builtin_convertvector(load_as<vh>(p), vu) << 16);
#endif
}

INLINE void store(vf a, float* p) { std::memcpy(p, &a, sizeof a); }

// Stores past the caches, to vector-aligned memory; call `past_stores_done` before other threads read it.
INLINE void store_past(vf a, float* p) {
#ifdef X86
    X86(stream_ps)(p, (FloatLanes)a);
#else
    store(a, p);
#endif
}
INLINE void past_stores_done() {
#ifdef X86
    _mm_sfence();
#endif
}

INLINE void store(vf a, bf16* p) {
    vu u = (vu)a;
    vu r = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    vu nan = (vu)(a != a);
    u = (nan & 0x7fc0) | (~nan & r);
#if defined(X86) && !defined(SPECDEC_AVX512)
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)u, (__m256i)u), 0x08);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(both));
#else
    vh h = __builtin_convertvector(u, vh);
    std::memcpy(p, &h, sizeof h);
#endif
}

// Loads the first n < W elements and fills the other lanes with zeros. Never reads memory past the n elements.
template <class T> INLINE vf load(const T* p, int n) {
    T part[W] = {};
    std::memcpy(part, p, n * sizeof(T));
    return load(part);
}
template <class T> INLINE void store(vf a, T* p, int n) {
    T part[W];
    store(a, part);
    std::memcpy(p, part, n * sizeof(T));
}

// Likewise, for n <= W.
template <class T> INLINE vf load_some(const T* p, int n) { return n == W ? load(p) : load(p, n); }

// Sets to[i] = value(i, lanes) for i in steps of a vector, with fewer lanes for the tail.
template <class T, class Value> INLINE void fill(T* to, int64_t n, Value&& value) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(value(i, W), to + i);
    if (i < n) store(value(i, (int)(n - i)), to + i, (int)(n - i));
}

// --- tables ---------------------------------------------------------------------------------------------------------

#ifdef X86
typedef Lanes Octets;
INLINE Octets find_octets(Octets table, Octets at) { return X86(shuffle_epi8)(table, at); }
#elif defined(__ARM_NEON) && defined(__aarch64__)
typedef uint8x16_t Octets;
INLINE Octets find_octets(Octets table, Octets at) { return vqtbl1q_u8(table, at); }
#else
typedef uint8_t Octets __attribute__((vector_size(16)));
INLINE Octets find_octets(Octets table, Octets at) {
    Octets found;
    for (int i = 0; i < 16; ++i) found[i] = table[at[i]];
    return found;
}
#endif

// A table of 16 bytes; `at` has four bits in every byte.
struct ByteTable {
    Octets table;
    template <class Value> explicit ByteTable(Value&& value) {  // value(i) for i < 16
        uint8_t octets[sizeof(Octets)];
        for (size_t i = 0; i < sizeof(Octets); ++i) octets[i] = value(i % 16);
        table = load_as<Octets>(octets);
    }
    INLINE vu operator[](vu at) const {
        Octets parts[sizeof(vu) / sizeof(Octets)];
        std::memcpy(parts, &at, sizeof at);
        for (Octets& part : parts) part = find_octets(table, part);
        return load_as<vu>(parts);
    }
};

// --- sums ----------------------------------------------------------------------------------------------------------

// Lanes I of a, followed by b.
template <int... I, class V> INLINE V shuffled(V a, V b) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, I...);
#else
    return __builtin_shuffle(a, b, vi{I...});
#endif
}

template <int G, bool UPPER, size_t... I> INLINE vf pick(vf a, vf b, std::index_sequence<I...>) {
    // For groups of G lanes: the lower (or upper) halves of a's groups, then of b's.
    return shuffled<(int)((I / (G / 2)) * G + I % (G / 2) + (UPPER ? G / 2 : 0))...>(a, b);
}
template <int G> INLINE vf fold(vf a, vf b) {
    return pick<G, false>(a, b, std::make_index_sequence<W>{}) + pick<G, true>(a, b, std::make_index_sequence<W>{});
}

// Sums the lanes of N <= W vectors: lane i of the result is the sum of v[i]. Every vector is folded by the same tree
// (lane i with i + W/2, then W/4, ...) for any index and any N, so a blocked product has the bits of an unblocked one.
template <int N, int G = W> INLINE vf lane_sums(const vf* v) {
#if defined(X86) && !defined(SPECDEC_AVX512)
    if constexpr (N == W && G == W) {  // within halves of 128 bits, which is cheaper
        __m256 half[4], quarter[2];
        for (int i = 0; i < 4; ++i) {
            const __m256 a = (__m256)v[i], b = (__m256)v[i + 4];
            half[i] = _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
        }
        for (int i = 0; i < 2; ++i) {
            const __m256 a = half[2 * i], b = half[2 * i + 1];
            quarter[i] = _mm256_shuffle_ps(a, b, 0x44) + _mm256_shuffle_ps(a, b, 0xee);
        }
        return (vf)(_mm256_shuffle_ps(quarter[0], quarter[1], 0x88) + _mm256_shuffle_ps(quarter[0], quarter[1], 0xdd));
    }
#endif
    vf half[(N + 1) / 2];
#pragma GCC unroll 16
    for (int i = 0; i < N / 2; ++i) half[i] = fold<G>(v[2 * i], v[2 * i + 1]);
    if constexpr (N % 2) half[N / 2] = fold<G>(v[N - 1], v[N - 1]);
    if constexpr (G == 2)
        return half[0];
    else
        return lane_sums<(N + 1) / 2, (G == 2 ? 2 : G / 2)>(half);
}

INLINE float lane_sum(vf v) { return lane_sums<1>(&v)[0]; }

// --- exponentials --------------------------------------------------------------------------------------------------

// e^x. Method: x = n ln 2 + r with |r| <= ln 2 / 2 (ln 2 in two parts), Taylor polynomial of degree 7 in r, exponent n
// added in two steps. The tests require 1.5 ulp on samples of [-87.3, 88.7]. Below -87.33 the result is 0 (it would be
// subnormal), above 88.72 infinity; a NaN stays a NaN. Scalar callers broadcast, so that all use the same rounding.
INLINE vf exponential(vf x) {
    const vf top = splat(88.722839f), bottom = splat(-87.336544f);
    vi over = x > top, under = x < bottom;
    vf y = select(over, top, select(under, bottom, x));
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    vf shifted = fma(y, splat(1.44269504088896341f), magic);
    vf n = shifted - magic;
    vf r = fma(n, splat(-0.693359375f), y);  // 0.693359375 has 9 bits: n times it is exact
    r = fma(n, splat(2.12194440e-4f), r);
    vf p = splat(1.0f / 5040);
    p = fma(p, r, splat(1.0f / 720));
    p = fma(p, r, splat(1.0f / 120));
    p = fma(p, r, splat(1.0f / 24));
    p = fma(p, r, splat(1.0f / 6));
    p = fma(p, r, splat(0.5f));
    p = fma(p, r * r, r) + 1.0f;
    vi exponent = (vi)shifted - (vi)magic;
    vi first = exponent >> 1;
    vf a = (vf)((first + 127) << 23), b = (vf)((exponent - first + 127) << 23);
    vf result = p * a * b;
    result = select(under, vf{}, result);
    return select(over, splat(INFINITY), result);
}

INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + exponential(-x)); }
INLINE vf silu(vf x) { return x / (1.0f + exponential(-x)); }
// x * sigmoid(2 y) = 0.5 x (1 + tanh(y)), with y = sqrt(2 / pi) (x + 0.044715 x^3)
INLINE vf gelu(vf x) { return x * sigmoid(x * fma(x * x, splat(0.0713548162726f), splat(1.5957691216057f))); }

INLINE float exponential(float x) { return exponential(splat(x))[0]; }
INLINE float sigmoid(float x) { return sigmoid(splat(x))[0]; }

}  // namespace specdec
