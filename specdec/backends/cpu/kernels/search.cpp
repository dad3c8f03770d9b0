// Searches rows of logits for drafters: the two best tokens and the log-sum-exp of a row.
//
// A pruned row has logits for some ids only, in any order: element i belongs to token ids[i], and every other token
// counts as -infinity. Each function gives it the same bits as the full row.
//
// Bits contract: the lowest id wins ties.

#include <algorithm>

#include "noise.h"

namespace specdec {

// Finds the two best tokens of a row, best first, ties by lower id; returns their number (2, or 1 if n is 1), or -1 for
// a NaN. `ids` is null for a full row.
int64_t best_two(const float* logits, const int32_t* ids, int64_t n, int64_t* tokens, float* values) {
    vf first = splat(-INFINITY), second = splat(-INFINITY);
    vi first_at = vi{} + INT32_MAX, second_at = first_at, wrong = {};
    vi lane;
    for (int i = 0; i < W; ++i) lane[i] = i;
    for (int64_t at = 0; at < n; at += W) {
        const int some = (int)(n - at < W ? n - at : W);
        const vf logit = logits_at(logits, at, n);
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
        const vf logit = logits_at(logits, at, n);
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
        const vf logit = logits_at(logits, at, n);
        sum += __builtin_convertvector(exponential(logit - most) * 0x1p42f, vl);
    }
    int64_t total = 0;
    for (int i = 0; i < W; ++i) total += sum[i];
    return (double)most + std::log((double)total * 0x1p-42);
}

}  // namespace specdec

EXPORT int64_t best_two(const float* logits, const int32_t* ids, int64_t n, int64_t* tokens, float* values) {
    return specdec::best_two(logits, ids, n, tokens, values);
}

EXPORT double logsumexp(const float* logits, int64_t n) { return specdec::logsumexp(logits, n); }
