// Token choice: sampling at temperature above 0, argmax_v(scale * logit[v] + G(seed, position, v)); argmax; and, for
// drafters, the two best tokens and the log-sum-exp of a row.
// Reference: specdec.sampling (philox, uniforms, gumbel), float64; here float32 after the counters.
//
// A pruned row has logits for some ids only, in any order: element i belongs to token ids[i], and every other token
// counts as -infinity. Each function gives it the same bits as the full row.
//
// Bits contract: the noise of a token is a function of seed, position, purpose and token id; the lowest id wins ties.
//
// Philox4x32-10: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.2. The counter
// (id / 4, position, purpose, 0) gives the words of four token ids. With w = (word + 1/2) / 2^32 the noise is
// -log(-log(1 - w)), so small values of -log1p(-w) win, which float32 represents to full relative precision.

#include "threads.h"
#include "vectors.h"

namespace specdec {

constexpr int LANES = 4 * W;  // token ids of one step: W counters of four words

struct Key {
    uint32_t low, high;
};

// High and low halves of 32 x 32 bit products, lane by lane.
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

// W consecutive counters: words[4 * i + j] is word j of counter i.
INLINE void philox(uint32_t block, uint32_t position, uint32_t purpose, Key key, uint32_t* words) {
    vu c0 = vu{} + block, c1 = vu{} + position, c2 = vu{} + purpose, c3 = {};
    for (int i = 0; i < W; ++i) c0[i] += i;
    philox(c0, c1, c2, c3, key);
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
    // converting the integer keeps the relative precision of small w; + 1/2 matters only for small words
    const vf w = (__builtin_convertvector(words, vf) + 0.5f) * 2.3283064365386963e-10f;
    const vf rest = 1.0f - w;
    // log1p(-w) = log(rest) * w / (1 - rest) undoes the rounding of rest; where rest is 1 it is -w itself
    const vf lost = 1.0f - rest;
    const vi tiny = lost == vf{};
    const vf safe = select(rest < splat(2.98e-8f), splat(2.98e-8f), rest);  // w rounds to 1 for one of 2^26 words
    const vf spent = select(tiny, w, -logarithm(safe) * (w / select(tiny, splat(1.0f), lost)));
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
            // most tokens cannot win with any noise within the bound, so their logarithms are never computed
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

// The same for a pruned row. A counter gives the words of four consecutive ids, of which one is used.
int64_t noisy_argmax_of(const float* logits, const int32_t* ids, int64_t n, float scale, Key key, uint32_t position,
                        uint32_t purpose) {
    vf best = splat(-INFINITY);
    vi where = vi{} + INT32_MAX, wrong = {};
    for (int64_t at = 0; at < n; at += W) {
        const int some = (int)(n - at < W ? n - at : W);
        const vf logit = some == W ? load(logits + at) : load_some(logits + at, some, -INFINITY);
        const vi id = some == W ? load_as<vi>(ids + at) : load_some(ids + at, some, INT32_MAX);
        vu c0 = (vu)id >> 2, c1 = vu{} + position, c2 = vu{} + purpose, c3 = {};
        philox(c0, c1, c2, c3, key);
        const vi place = id & 3;
        const vf last = select(place == 2, (vf)c2, (vf)c3);
        const vu drawn = (vu)select(place == 0, (vf)c0, select(place == 1, (vf)c1, last));
        wrong |= logit != logit;
        if (!any(fma(logit, splat(scale), gumbel_bound(drawn)) >= best)) continue;
        const vf score = fma(logit, splat(scale), gumbel(drawn));
        const vi better = (score > best) | ((score == best) & (id < where));
        best = select(better, score, best);
        where = (better & id) | (~better & where);
    }
    int64_t winner = -1;
    float top = -INFINITY;
    for (int i = 0; i < W; ++i) {
        if (wrong[i]) return -1;
        if (best[i] > top || (best[i] == top && where[i] < winner)) {
            top = best[i];
            winner = where[i];
        }
    }
    return winner;
}

// Finds the two best tokens of a row, best first, ties by lower id; returns their number (2, or 1 if n is 1), or -1 for
// a NaN. `ids` is null for a full row.
int64_t best_two(const float* logits, const int32_t* ids, int64_t n, int64_t* tokens, float* values) {
    vf first = splat(-INFINITY), second = splat(-INFINITY);
    vi first_at = vi{} + INT32_MAX, second_at = first_at, wrong = {};
    vi lane;
    for (int i = 0; i < W; ++i) lane[i] = i;
    for (int64_t at = 0; at < n; at += W) {
        const int some = (int)(n - at < W ? n - at : W);
        const vf logit = some == W ? load(logits + at) : load_some(logits + at, some, -INFINITY);
        wrong |= logit != logit;
        if (at >= 2 * W && !any(logit >= second)) continue;
        vi id = !ids ? (int32_t)at + lane : some == W ? load_as<vi>(ids + at) : load_some(ids + at, some, INT32_MAX);
        const vi real = lane < some;
        id = (real & id) | (~real & INT32_MAX);
        const vi over = (logit > first) | ((logit == first) & (id < first_at));
        const vi between = ~over & ((logit > second) | ((logit == second) & (id < second_at)));
        second = select(over, first, select(between, logit, second));
        second_at = (over & first_at) | (between & id) | (~over & ~between & second_at);
        first = select(over, logit, first);
        first_at = (over & id) | (~over & first_at);
    }
    for (int i = 0; i < 2; ++i) {
        values[i] = -INFINITY;
        tokens[i] = INT32_MAX;
    }
    const auto offer = [&](float value, int32_t id) {
        const auto before = [&](int i) { return value > values[i] || (value == values[i] && id < tokens[i]); };
        if (before(0)) {
            values[1] = values[0];
            tokens[1] = tokens[0];
            values[0] = value;
            tokens[0] = id;
        } else if (before(1)) {
            values[1] = value;
            tokens[1] = id;
        }
    };
    for (int i = 0; i < W; ++i) {
        if (wrong[i]) return -1;
        offer(first[i], first_at[i]);
        offer(second[i], second_at[i]);
    }
    return n < 2 ? n : 2;
}

// log(sum(exp(logit))). The terms exp(logit - max), at most 1, are added as integers (units of 2^-42), so the sum does
// not depend on their order and a pruned row has the bits of the full one. The error per term is below 2^-42 of the
// sum; the integer holds 2^21 terms.
double logsumexp(const float* logits, int64_t n) {
    typedef int64_t vl __attribute__((vector_size(8 * W)));
    vf top = splat(-INFINITY);
    vi wrong = {};
    int64_t at = 0;
    for (; at < n; at += W) {
        const vf logit = n - at < W ? load_some(logits + at, (int)(n - at), -INFINITY) : load(logits + at);
        wrong |= logit != logit;
        top = maximum(top, logit);
    }
    float most = -INFINITY;
    for (int i = 0; i < W; ++i) {
        if (wrong[i]) return NAN;
        most = top[i] > most ? top[i] : most;
    }
    if (most - most != 0.0f) return most;  // an infinity
    vl sum = {};
    for (at = 0; at < n; at += W) {
        const vf logit = n - at < W ? load_some(logits + at, (int)(n - at), -INFINITY) : load(logits + at);
        sum += __builtin_convertvector(exponential(logit - most) * 0x1p42f, vl);
    }
    int64_t total = 0;
    for (int i = 0; i < W; ++i) total += sum[i];
    return (double)most + std::log((double)total * 0x1p-42);
}

// --- temperature 0 -----------------------------------------------------------------------------------------------------

constexpr int64_t SPAN = 4096;  // logits per span: the largest value is found first, then its index

// The largest of n values; NaN if there is one.
INLINE float largest(const float* x, int64_t n) {
    vf best[4];
    vi wrong = {};
    for (vf& each : best) each = splat(-INFINITY);
    const auto take = [&](vf& best, vf a) {
        wrong |= a != a;
        best = select(a > best, a, best);
    };
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
        for (int j = 0; j < 4; ++j) take(best[j], load(x + i + j * W));
    float top = -INFINITY;
    for (; i < n; ++i) {
        if (x[i] != x[i]) return x[i];
        top = std::max(top, x[i]);
    }
    if (any(wrong)) return NAN;
    for (const vf& each : best)
        for (int j = 0; j < W; ++j) top = std::max(top, each[j]);
    return top;
}

// The lowest id among the largest logits; ~id where that logit is not finite (a NaN beats every number, the first
// wins).
int64_t best_of(const float* logits, const float* spans, int64_t n) {
    int64_t best = 0;
    const int64_t count = (n + SPAN - 1) / SPAN;
    for (int64_t s = 1; s < count && spans[best] == spans[best]; ++s)
        if (spans[s] > spans[best] || spans[s] != spans[s]) best = s;
    const float top = spans[best];
    int64_t id = best * SPAN;
    while (!(top != top ? logits[id] != logits[id] : logits[id] == top)) ++id;
    return std::isfinite(top) ? id : ~id;
}

void argmax_rows(const float* logits, int64_t rows, int64_t n, int64_t* best, int threads) {
    const int64_t count = (n + SPAN - 1) / SPAN;
    float* spans = scratch<6>(rows * count);
    for_blocks(rows * n * 4 < SERIAL_WORK ? 1 : threads, rows * count, [&](int64_t block) {
        const int64_t row = block / count, first = block % count * SPAN;
        spans[block] = largest(logits + row * n + first, std::min(SPAN, n - first));
    });
    for (int64_t row = 0; row < rows; ++row) best[row] = best_of(logits + row * n, spans + row * count, n);
}

}  // namespace specdec

EXPORT void argmax_rows(const float* logits, int64_t rows, int64_t n, int64_t* best, int64_t threads) {
    specdec::argmax_rows(logits, rows, n, best, (int)threads);
}

EXPORT int64_t noisy_argmax(
    const float* logits, int64_t n, float scale, int64_t seed, int64_t position, int64_t purpose) {
    const uint64_t bits = (uint64_t)seed;
    return specdec::noisy_argmax(
        logits, n, scale, {(uint32_t)bits, (uint32_t)(bits >> 32)}, (uint32_t)position, (uint32_t)purpose);
}

EXPORT int64_t noisy_argmax_of(
    const float* logits, const int32_t* ids, int64_t n, float scale, int64_t seed, int64_t position, int64_t purpose) {
    const uint64_t bits = (uint64_t)seed;
    return specdec::noisy_argmax_of(
        logits, ids, n, scale, {(uint32_t)bits, (uint32_t)(bits >> 32)}, (uint32_t)position, (uint32_t)purpose);
}

EXPORT int64_t best_two(const float* logits, const int32_t* ids, int64_t n, int64_t* tokens, float* values) {
    return specdec::best_two(logits, ids, n, tokens, values);
}

EXPORT double logsumexp(const float* logits, int64_t n) { return specdec::logsumexp(logits, n); }
