// The choice of a token at temperature above 0: argmax_v(scale * logit[v] + G(seed, position, v)).
// Reference: specdec.sampling (philox, uniforms, gumbel), float64; here float32 after the counters.
//
// Bits contract: the noise of a token is a function of seed, position, purpose and token id; the lowest id wins ties.
//
// Philox4x32-10: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.2. The counter
// (id / 4, position, purpose, 0) gives the words of four token ids. With w = (word + 1/2) / 2^32 the noise is
// -log(-log(1 - w)), so the race is won by small values of -log1p(-w), which float32 holds to full relative precision.

#include "vectors.h"

namespace specdec {

constexpr int LANES = 4 * W;  // token ids of one step: W counters of four words

struct Key {
    uint32_t low, high;
};

// The halves of 32 x 32 bit products, lane by lane.
INLINE void multiply(vu a, uint32_t b, vu& high, vu& low) {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
    const __m512i factor = _mm512_set1_epi32((int)b);
    const __m512i even = _mm512_mul_epu32((__m512i)a, factor);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), factor);
    high = (vu)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
    low = (vu)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
#else
    for (int i = 0; i < W; ++i) {
        const uint64_t product = (uint64_t)a[i] * b;
        high[i] = (uint32_t)(product >> 32);
        low[i] = (uint32_t)product;
    }
#endif
}

// W counters at once: words[4 * i + j] is word j of counter i.
INLINE void philox(uint32_t block, uint32_t position, uint32_t purpose, Key key, uint32_t* words) {
    vu c0 = vu{} + block, c1 = vu{} + position, c2 = vu{} + purpose, c3 = {};
    for (int i = 0; i < W; ++i) c0[i] += i;
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
    for (int i = 0; i < W; ++i) {
        words[4 * i] = c0[i];
        words[4 * i + 1] = c1[i];
        words[4 * i + 2] = c2[i];
        words[4 * i + 3] = c3[i];
    }
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
    // float32 of the integer keeps the relative precision of small w; + 1/2 matters where the word is small
    const vf w = (__builtin_convertvector(words, vf) + 0.5f) * 2.3283064365386963e-10f;
    const vf rest = 1.0f - w;
    // log1p(-w) = log(rest) * w / (1 - rest) undoes the rounding of rest; where rest is 1 it is -w itself
    const vf lost = 1.0f - rest;
    const vi tiny = lost == vf{};
    const vf safe = select(rest < splat(2.98e-8f), splat(2.98e-8f), rest);  // w rounds to 1: one of 2^26 words
    const vf spent = select(tiny, w, -logarithm(safe) * (w / select(tiny, splat(1.0f), lost)));
    return -logarithm(spent);
}

// Never below the noise of the same words: -log1p(-w) >= w >= 2^e with e the binary exponent of w. The slack covers the
// rounding of either side.
INLINE vf gumbel_bound(vu words) {
    const vf w = (__builtin_convertvector(words, vf) + 0.5f) * 2.3283064365386963e-10f;
    const vi exponent = ((vi)w >> 23) - 127;
    return fma(__builtin_convertvector(exponent, vf), splat(-0.69314718f), splat(0.01f));
}

INLINE bool any(vi mask) {
    uint64_t parts[sizeof(vi) / 8];
    std::memcpy(parts, &mask, sizeof mask);
    uint64_t all = 0;
    for (uint64_t part : parts) all |= part;
    return all != 0;
}

int64_t noisy_argmax(const float* logits, int64_t n, float scale, Key key, uint32_t position, uint32_t purpose) {
    vf best = splat(-INFINITY);
    vi where = {}, wrong = {};
    vi lane;
    for (int i = 0; i < W; ++i) lane[i] = i;
    alignas(64) uint32_t words[LANES];
    for (int64_t id = 0; id < n; id += LANES) {
        philox((uint32_t)(id / 4), position, purpose, key, words);
        for (int j = 0; j < 4 && id + j * W < n; ++j) {
            const int64_t at = id + j * W;
            const int some = (int)(n - at < W ? n - at : W);
            const vf logit = some == W ? load(logits + at) : load(logits + at, some);
            const vu drawn = load_as<vu>(words + j * W);
            wrong |= logit != logit;
            // most tokens cannot win whatever their exact noise is: their logarithms are never taken
            if (!any(fma(logit, splat(scale), gumbel_bound(drawn)) >= best)) continue;
            vf score = fma(logit, splat(scale), gumbel(drawn));
            if (some < W) score = select(lane < some, score, splat(-INFINITY));
            const vi better = score > best;
            best = select(better, score, best);
            where = (better & ((int32_t)at + lane)) | (~better & where);
        }
    }
    for (int i = 0; i < W; ++i)
        if (wrong[i]) return -1;
    int64_t winner = -1;
    float top = -INFINITY;
    for (int i = 0; i < W; ++i)
        if (best[i] > top || (best[i] == top && where[i] < winner)) {
            top = best[i];
            winner = where[i];
        }
    return winner;  // -1: a NaN, or nothing but -infinity
}

}  // namespace specdec

EXPORT int64_t noisy_argmax(
    const float* logits, int64_t n, float scale, int64_t seed, int64_t position, int64_t purpose) {
    const uint64_t bits = (uint64_t)seed;
    return specdec::noisy_argmax(
        logits, n, scale, {(uint32_t)bits, (uint32_t)(bits >> 32)}, (uint32_t)position, (uint32_t)purpose);
}
