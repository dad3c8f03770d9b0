// conv_window and gated_delta of specdec.backends.ops. Reference: ReferenceOps, same names.
//
// Bits contract: the recurrence runs token by token; column j of a head's matrix S sums over the rows i of S in
// ascending order, with four accumulators (i mod 4), independently of other columns and of the number of tokens.
// COLUMNS columns stay in L1 for all tokens: the first token reads the committed S, the last one writes to a second
// buffer.

#include <algorithm>

#include "team.h"
#include "vectors.h"

namespace specdec {

// --- convolution ---------------------------------------------------------------------------------------------------

constexpr int64_t CHANNELS = 256;
constexpr int MAX_TAPS = 8;

// Weights [C, taps] of W channels as one vector per tap.
INLINE void taps_of(const float* weight, int taps, int lanes, vf* tap) {
    alignas(64) float columns[MAX_TAPS][W] = {};
    for (int c = 0; c < lanes; ++c)
        for (int j = 0; j < taps; ++j) columns[j][c] = weight[c * taps + j];
    for (int j = 0; j < taps; ++j) tap[j] = load(columns[j]);
}
template <int ODD, size_t... I> INLINE vf every_other(vf a, vf b, std::index_sequence<I...>) {
    return shuffled<(int)(2 * I + ODD)...>(a, b);
}
INLINE void four_taps_of(const float* weight, vf* tap) {
    const auto lanes = std::make_index_sequence<W>{};
    const vf a = load(weight), b = load(weight + W), c = load(weight + 2 * W), d = load(weight + 3 * W);
    const vf even_low = every_other<0>(a, b, lanes), odd_low = every_other<1>(a, b, lanes);
    const vf even_high = every_other<0>(c, d, lanes), odd_high = every_other<1>(c, d, lanes);
    tap[0] = every_other<0>(even_low, even_high, lanes);
    tap[1] = every_other<0>(odd_low, odd_high, lanes);
    tap[2] = every_other<1>(even_low, even_high, lanes);
    tap[3] = every_other<1>(odd_low, odd_high, lanes);
}

// Copies window (taps - 1 rows) and x (rows) to raw; out[t] = silu(sum_j weight[:, j] raw[t + j]), j ascending.
template <class T, int TAPS>
void convolve(const T* window, const T* x, int64_t x_row, int64_t rows, int64_t channels, const float* weight, int taps,
              T* raw, T* out, int threads) {
    if (TAPS) taps = TAPS;
    const int64_t bytes = channels * (4 * taps + (2 * taps + 3 * rows) * (int64_t)sizeof(T));
    if (std::max(bytes, rows * channels * 16) < SERIAL_WORK) threads = 1;
    for_blocks(threads, (channels + CHANNELS - 1) / CHANNELS, [&](int64_t block) {
        const int64_t from = block * CHANNELS, to = std::min(from + CHANNELS, channels);
        for (int j = 0; j < taps - 1; ++j)
            std::memcpy(raw + j * channels + from, window + j * channels + from, (to - from) * sizeof(T));
        for (int64_t t = 0; t < rows; ++t)
            std::memcpy(raw + (taps - 1 + t) * channels + from, x + t * x_row + from, (to - from) * sizeof(T));
        constexpr int N = TAPS ? TAPS : MAX_TAPS;
        alignas(64) vf tap[CHANNELS / W][N];
        for (int64_t c = from; c < to; c += W) {
            const int lanes = (int)std::min<int64_t>(W, to - c);
            if (TAPS == 4 && lanes == W)
                four_taps_of(weight + c * 4, tap[(c - from) / W]);
            else
                taps_of(weight + c * taps, taps, lanes, tap[(c - from) / W]);
        }
        for (int64_t t = 0; t < rows; ++t)
            fill(out + t * channels + from, to - from, [&](int64_t c, int lanes) {
                vf sum{};
                for (int j = 0; j < taps; ++j)
                    sum = fma(load_some(raw + (t + j) * channels + from + c, lanes), tap[c / W][j], sum);
                return silu(sum);
            });
    });
}

// --- recurrence ----------------------------------------------------------------------------------------------------

constexpr int VECTORS = W == 16 ? 4 : 2;  // four accumulators of each fill the registers
constexpr int COLUMNS = VECTORS * W;
constexpr int64_t PREPARED = 256;  // tokens whose q and k are prepared at once

// Layers whose matrices have at least this many floats bypass the caches when storing the new ones: before they are
// read again, the weights of all layers pass through the caches.
constexpr int64_t PAST_CACHES = 128 * 1024;

struct Delta {
    int64_t key_heads, value_heads, key_dim, value_dim;
    int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
};

// x / sqrt(sum x^2 + 1e-6) * scale
template <class T> INLINE void unit(const T* x, int64_t n, float scale, float* out) {
    vf sum[2] = {};
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        vf a = load(x + i);
        sum[i / W % 2] = fma(a, a, sum[i / W % 2]);
    }
    if (i < n) {
        vf a = load(x + i, (int)(n - i));
        sum[0] = fma(a, a, sum[0]);
    }
    const float factor = 1.0f / std::sqrt(lane_sum(sum[0] + sum[1]) + 1e-6f) * scale;
    for (i = 0; i < n; ++i) out[i] = widen(x[i]) * factor;
}

// COLUMNS columns of a matrix, with rows `stride` floats apart.
struct Columns {
    float* data;
    int64_t stride;
    float* at(int64_t row) const { return data + row * stride; }
};

// One token of one head: computes the columns of S after it (`to`) from those before it. The last token prefetches the
// columns that are read next, short runs that the hardware prefetcher misses. With PAST, stores bypass the caches.
template <bool LAST, bool PAST, class T>
void delta_token(int64_t n, const float* q, const float* k, float decay_, float beta_, const T* v, int lanes,
                        Columns from, Columns to, Columns next, T* out) {
    const vf decay = splat(decay_), beta = splat(beta_);
    vf sum[4][VECTORS] = {};
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
            const vf key = splat(k[i + r]);
#pragma GCC unroll 4
            for (int c = 0; c < VECTORS; ++c) sum[r][c] = fma(key, load(from.at(i + r) + c * W), sum[r][c]);
        }
#pragma GCC unroll 4
    for (int r = 0; r < 3; ++r)
        if (i + r < n)
#pragma GCC unroll 4
            for (int c = 0; c < VECTORS; ++c)
                sum[r][c] = fma(splat(k[i + r]), load(from.at(i + r) + c * W), sum[r][c]);
    vf change[VECTORS], read[4][VECTORS] = {};
#pragma GCC unroll 4
    for (int c = 0; c < VECTORS; ++c) {
        const int some = std::clamp(lanes - c * W, 0, W);
        const vf value = some == W ? load(v + c * W) : some ? load(v + c * W, some) : vf{};
        const vf seen = ((sum[0][c] + sum[1][c]) + (sum[2][c] + sum[3][c])) * decay;
        change[c] = beta * (value - seen);
    }
    const auto update = [&](int64_t i, vf(&read)[VECTORS]) __attribute__((always_inline)) {
        const vf key = splat(k[i]), query = splat(q[i]);
#pragma GCC unroll 4
        for (int c = 0; c < VECTORS; ++c) {
            const vf state = fma(key, change[c], load(from.at(i) + c * W) * decay);
            if (PAST)
                store_past(state, to.at(i) + c * W);
            else
                store(state, to.at(i) + c * W);
            read[c] = fma(query, state, read[c]);
        }
        if (LAST)
            for (int64_t line = 0; line < COLUMNS; line += 16) __builtin_prefetch(next.at(i) + line, 0, 2);
    };
    i = 0;
    for (; i + 4 <= n; i += 4)
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) update(i + r, read[r]);
#pragma GCC unroll 4
    for (int r = 0; r < 3; ++r)
        if (i + r < n) update(i + r, read[r]);
    if (!out) return;
#pragma GCC unroll 4
    for (int c = 0; c < VECTORS; ++c) {
        const int some = std::clamp(lanes - c * W, 0, W);
        const vf o = (read[0][c] + read[1][c]) + (read[2][c] + read[3][c]);
        if (some == W)
            store(o, out + c * W);
        else if (some)
            store(o, out + c * W, some);
    }
}

// Computes `after`, S after `rows` tokens from `state`; out may be null (a replay needs only the state).
template <class T>
void gated_delta(const Delta& shape, const T* u, const T* a, const T* b, const float* a_log, const float* dt_bias,
                 const float* state, float* after, int64_t rows, T* out, int threads) {
    const int64_t n = shape.key_dim, m = shape.value_dim, channels = shape.channels();
    const int64_t per_head = (m + COLUMNS - 1) / COLUMNS, ratio = shape.value_heads / shape.key_heads;
    const int64_t qk_row = 2 * shape.key_heads * n, gates_row = 2 * shape.value_heads;
    const int64_t at_once = std::min(rows, PREPARED);
    float* qk = scratch<4>(at_once * (qk_row + gates_row));
    float* gates = qk + at_once * qk_row;
    const float scale = 1.0f / std::sqrt((float)n);
    const int64_t size = shape.value_heads * n * m;
    for (int64_t first = 0; first < rows; first += PREPARED) {
        const int64_t tokens = std::min(PREPARED, rows - first);
        for_blocks(tokens * channels * 8 < SERIAL_WORK ? 1 : threads, tokens, [&](int64_t t) {
            const T* row = u + (first + t) * channels;
            for (int64_t h = 0; h < shape.key_heads; ++h) {
                float* to = qk + t * qk_row + 2 * h * n;
                unit(row + h * n, n, scale, to);
                unit(row + (shape.key_heads + h) * n, n, 1.0f, to + n);
            }
            for (int64_t h = 0; h < shape.value_heads; ++h) {
                const float x = widen(a[(first + t) * shape.value_heads + h]) + dt_bias[h];
                const float softplus = x > 20 ? x : std::log1p(std::exp(x));
                gates[t * gates_row + 2 * h] = std::exp(-std::exp(a_log[h]) * softplus);
                gates[t * gates_row + 2 * h + 1] = sigmoid(widen(b[(first + t) * shape.value_heads + h]));
            }
        });
        const float* from = first ? after : state;
        const bool alone = size * 4 + size * tokens < SERIAL_WORK;
        for_blocks(alone ? 1 : threads, shape.value_heads * per_head, [&](int64_t block) {
            const int64_t h = block / per_head, column = block % per_head * COLUMNS;
            const int lanes = (int)std::min<int64_t>(COLUMNS, m - column);
            float* s = scratch<5>(n * COLUMNS);
            const float* before = from + h * n * m + column;
            float* to = after + h * n * m + column;
            const Columns near = {s, COLUMNS}, first_in = {const_cast<float*>(before), m}, last_out = {to, m};
            const bool whole = lanes == COLUMNS;
            const bool past = whole && size >= PAST_CACHES && reinterpret_cast<uintptr_t>(to) % 64 == 0 && m % 16 == 0;
            if (!whole)
                for (int64_t i = 0; i < n; ++i) {
                    std::memset(s + i * COLUMNS, 0, COLUMNS * sizeof(float));
                    std::memcpy(s + i * COLUMNS, before + i * m, lanes * sizeof(float));
                }
            const float* after_this = column + COLUMNS < m ? before + COLUMNS : from + (h + 1) * n * m;
            const Columns next = {const_cast<float*>(after_this), m};
            for (int64_t t = 0; t < tokens; ++t) {
                const bool last = t + 1 == tokens;
                const float* q = qk + t * qk_row + h / ratio * 2 * n;
                const float* gate = gates + t * gates_row + 2 * h;
                const int64_t row = first + t;
                auto run = past ? delta_token<true, true, T> : delta_token<true, false, T>;
                if (!last) run = delta_token<false, false, T>;
                run(n, q, q + n, gate[0], gate[1], u + row * channels + 2 * shape.key_heads * n + h * m + column, lanes,
                    whole && t == 0 ? first_in : near, whole && last ? last_out : near, next,
                    out ? out + (row * shape.value_heads + h) * m + column : nullptr);
            }
            if (past) past_stores_done();
            if (!whole)
                for (int64_t i = 0; i < n; ++i) std::memcpy(to + i * m, s + i * COLUMNS, lanes * sizeof(float));
        });
    }
}

}  // namespace specdec

using namespace specdec;

#define DELTA(NAME, T)                                                                                                 \
    EXPORT void conv_window_##NAME(const void* window, const void* x, int64_t x_row, int64_t rows,                     \
                                       int64_t channels, const void* weight, int64_t taps, void* raw, void* out,       \
                                       int64_t threads) {                                                              \
        auto run = taps == 4 ? convolve<T, 4> : convolve<T, 0>;                                                        \
        run((const T*)window, (const T*)x, x_row, rows, channels, (const float*)weight, (int)taps, (T*)raw, (T*)out,   \
            (int)threads);                                                                                             \
    }                                                                                                                  \
    EXPORT void gated_delta_##NAME(int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim,         \
                                       const void* u, const void* a, const void* b, const void* a_log,                 \
                                       const void* dt_bias, const void* state, void* after, int64_t rows, void* out,   \
                                       int64_t threads) {                                                              \
        gated_delta<T>({key_heads, value_heads, key_dim, value_dim}, (const T*)u, (const T*)a, (const T*)b,            \
                       (const float*)a_log, (const float*)dt_bias, (const float*)state, (float*)after, rows, (T*)out,  \
                       (int)threads);                                                                                  \
    }

DELTA(bf16, bf16)
DELTA(f32, float)
