// The noise of sampling, and vector helpers for rows of logits. Reference: specdec.sampling (philox, uniforms, gumbel) in
// float64; here float32 after the counters.
//
// Bits contract: the noise of a token is a function of seed, position, purpose and token id.
//
// Philox4x32-10: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.2. The counter
// (id / 4, position, purpose, 0) gives the words of four token ids. With w = (word + 1/2) / 2^32 the noise is
// -log(-log(1 - w)).
#pragma once

#include "vectors.h"

namespace specdec {

constexpr int LANES = 4 * W;  // token ids of one step: W counters of four words

struct Key {
    uint32_t low, high;
};

// High and low halves of 32 x 32 bit products, lane by lane.
INLINE void multiply(vu a, uint32_t b, vu& high, vu& low) {
#ifdef X86
    typedef uint64_t vl __attribute__((vector_size(4 * W)));
    const Lanes factor = X86(set1_epi32)((int)b);
    const vl even = (vl)X86(mul_epu32)((Lanes)a, factor), odd = (vl)X86(mul_epu32)((Lanes)((vl)a >> 32), factor);
    const vl low_words = vl{} + 0xffffffffu;
    high = (vu)(even >> 32 | (odd & ~low_words));
    low = (vu)((even & low_words) | odd << 32);
#else
    for (int i = 0; i < W; ++i) {
        const uint64_t product = (uint64_t)a[i] * b;
        high[i] = (uint32_t)(product >> 32);
        low[i] = (uint32_t)product;
    }
#endif
}

// W counters at once; c0..c3 are counters on entry and words on return.
INLINE void philox(vu& c0, vu& c1, vu& c2, vu& c3, Key key) {
    for (int round = 0; round < 10; ++round) {
        vu left_high, left_low, right_high, right_low;
        multiply(c0, 0xD2511F53u, left_high, left_low);
        multiply(c2, 0xCD9E8D57u, right_high, right_low);
        c0 = right_high ^ c1 ^ key.low;
        c2 = left_high ^ c3 ^ key.high;
        c1 = right_low;
        c3 = left_low;
        key.low += 0x9E3779B9u;
        key.high += 0xBB67AE85u;
    }
}

// The words of W consecutive counters, in the order of their token ids: four of each counter, words[0] first.
INLINE void philox(uint32_t block, uint32_t position, uint32_t purpose, Key key, vu* words) {
    // counter of a lane: transposing the four words within groups of four lanes then gives the order of the ids
    vu c0, c1 = vu{} + position, c2 = vu{} + purpose, c3 = {};
    for (int i = 0; i < W; ++i) c0[i] = i % 4 * (W / 4) + i / 4;
    c0 += block;
    philox(c0, c1, c2, c3, key);
#ifdef X86
#define LANES_OF(NAME, A, B) (vu) X86(NAME)((Lanes)(A), (Lanes)(B))
    const vu low01 = LANES_OF(unpacklo_epi32, c0, c1), high01 = LANES_OF(unpackhi_epi32, c0, c1);
    const vu low23 = LANES_OF(unpacklo_epi32, c2, c3), high23 = LANES_OF(unpackhi_epi32, c2, c3);
    words[0] = LANES_OF(unpacklo_epi64, low01, low23);
    words[1] = LANES_OF(unpackhi_epi64, low01, low23);
    words[2] = LANES_OF(unpacklo_epi64, high01, high23);
    words[3] = LANES_OF(unpackhi_epi64, high01, high23);
#undef LANES_OF
#else
    for (int j = 0; j < 4; ++j)
        for (int q = 0; q < W; q += 4) {
            const int from = q + j;
            words[j][q] = c0[from], words[j][q + 1] = c1[from], words[j][q + 2] = c2[from], words[j][q + 3] = c3[from];
        }
#endif
}

// The noise word of each token id, wherever they are.
INLINE vu philox(vi ids, uint32_t position, uint32_t purpose, Key key) {
    vu c0 = (vu)ids >> 2, c1 = vu{} + position, c2 = vu{} + purpose, c3 = {};
    philox(c0, c1, c2, c3, key);
    const vi place = ids & 3;
    const vf last = select(place == 2, (vf)c2, (vf)c3);
    return (vu)select(place == 0, (vf)c0, select(place == 1, (vf)c1, last));
}

// log x of positive normal numbers: x = 2^e m, m in [2^-1/2, 2^1/2), log m = 2 artanh((m - 1) / (m + 1)), five terms.
INLINE vf logarithm(vf x) {
    const vi bits = (vi)x;
    const vi exponent = (bits - 0x3f3504f3) >> 23;  // the bits of 2^-1/2
    const vf m = (vf)(bits - (exponent << 23));
    const vf s = (m - 1.0f) / (m + 1.0f), square = s * s;
    vf p = splat(2.0f / 9);
    p = fma(p, square, splat(2.0f / 7));
    p = fma(p, square, splat(2.0f / 5));
    p = fma(p, square, splat(2.0f / 3));
    p = fma(p, square, splat(2.0f));
    return fma(__builtin_convertvector(exponent, vf), splat(0.69314718f), p * s);
}

// Standard Gumbel noise of W words.
INLINE vf gumbel(vu words) {
    // converting the integer keeps the relative precision of small w; + 1/2 matters only for small words
    const vf w = (__builtin_convertvector(words, vf) + 0.5f) * 2.3283064365386963e-10f;
    const vf rest = (__builtin_convertvector(~words, vf) + 0.5f) * 2.3283064365386963e-10f;  // 1 - w, as precise
    // log1p(-w) = log(rounded) * w / (1 - rounded) undoes the rounding of 1 - w; where that is 1 it is -w itself
    const vf rounded = 1.0f - w, lost = 1.0f - rounded;
    const vi tiny = lost == vf{}, small = w < splat(0.5f);
    const vf near = -logarithm(select(small, rounded, rest));
    const vf spent = select(tiny, w, select(small, near * (w / select(tiny, splat(1.0f), lost)), near));
    return -logarithm(spent);
}

// An upper bound on the noise of the same words: -log1p(-w) >= w >= 2^e with e the binary exponent of w. The slack
// covers the rounding of both sides.
INLINE vf gumbel_bound(vu words) {
    const vf w = (__builtin_convertvector(words, vf) + 0.5f) * 2.3283064365386963e-10f;
    const vi exponent = ((vi)w >> 23) - 127;
    return fma(__builtin_convertvector(exponent, vf), splat(-0.69314718f), splat(0.01f));
}

// Loads the first n < W elements and fills the other lanes with `rest`.
INLINE vf load_some(const float* p, int n, float rest) {
    vf part = splat(rest);
    std::memcpy(&part, p, n * sizeof(float));
    return part;
}
INLINE vi load_some(const int32_t* p, int n, int32_t rest) {
    vi part = vi{} + rest;
    std::memcpy(&part, p, n * sizeof(int32_t));
    return part;
}

// The logits of a row of n from element `at` on; -infinity in lanes behind its end.
INLINE vf logits_at(const float* x, int64_t at, int64_t n) {
    return at + W <= n ? load(x + at) : load_some(x + at, (int)(at < n ? n - at : 0), -INFINITY);
}

// One bit per lane of a mask of zeros and ones.
INLINE uint32_t lanes(vi mask) {
#ifdef SPECDEC_AVX512
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(X86)
    return (uint32_t)_mm256_movemask_ps((__m256)mask);
#else
    uint32_t bits = 0;
    for (int i = 0; i < W; ++i) bits |= (mask[i] ? 1u : 0u) << i;
    return bits;
#endif
}

INLINE bool any(vi mask) {
#ifdef X86
    return lanes(mask) != 0;
#else
    uint64_t parts[sizeof(vi) / 8];
    std::memcpy(parts, &mask, sizeof mask);
    uint64_t all = 0;
    for (uint64_t part : parts) all |= part;
    return all != 0;
#endif
}

}  // namespace specdec
