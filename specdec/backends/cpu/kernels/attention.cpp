// attend of specdec.backends.ops: append keys and values, then causal attention. Reference: ReferenceOps.attend.
//
// Bits contract: a query processes the keys in tiles of TILE at absolute positions, in ascending order, with an online
// softmax (Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3). Each split of SPLIT keys, also at absolute
// positions, gives one partial result, and these are merged in ascending order. So a query's result depends only on its
// position and on the keys up to it, not on the rows of the pass, the threads, or whether the splits ran in parallel.
// Scores of keys after a query's position are discarded and their values are not used; slots after the pass are never
// read. With a window, a query processes the keys of its window only: earlier tiles are skipped, and
// what a tile holds before the window is treated like the keys of the future.

#include <algorithm>

#include "dots.h"
#include "team.h"

namespace specdec {

constexpr int64_t TILE = 64;
constexpr int64_t SPLIT = 1024;
constexpr int64_t LINE = 64;  // bytes of a cache line
constexpr int64_t QUERIES = 64;  // query vectors that share the keys and values of one tile while it is in L2
constexpr int64_t NEAR = W == 16 ? TILE : 16;  // keys, or values, that all queries use while they are in L1
static_assert(TILE % NEAR == 0);

template <class T> struct Attention {
    const T* q;
    int64_t q_row, q_head;
    const T* keys;
    const T* values;
    int64_t slot;  // stride of cached rows, in elements
    const T* gate;
    int64_t gate_row, gate_head;
    int64_t rows, heads, kv_heads, dim, position;
    int64_t window;  // keys that a query sees, its own included; 0: all
    float scale;
    const float* sinks;  // a score per head that joins its softmax and has no value, or none
    T* out;

    int64_t group() const { return heads / kv_heads; }
    int64_t wide() const { return (dim + W - 1) / W * W; }  // dim, padded to whole vectors
    int64_t oldest(int64_t row) const { return window ? std::max<int64_t>(0, position + row + 1 - window) : 0; }
    int64_t rows_per_block() const { return std::max<int64_t>(1, QUERIES / group()); }
};

// Partial results of queries over some keys: sums of weights and weighted values, relative to the largest score so far.
struct Partial {
    float* top;    // [queries], -inf: no key yet
    float* total;  // [queries]
    float* sum;    // [queries, wide]
};

INLINE Partial partial_at(float* memory, int64_t queries) {
    return {memory, memory + queries, memory + (2 * queries + 15) / 16 * 16};
}
INLINE int64_t partial_floats(int64_t queries, int64_t wide) { return (2 * queries + 15) / 16 * 16 + queries * wide; }

INLINE void scale_row(float* row, int64_t n, float factor) {
    const vf f = splat(factor);
    for (int64_t d = 0; d < n; d += W) store(load(row + d) * f, row + d);
}

// Queries of the next tile of scores when `queries` remain: as many as hold the sums of several keys in registers.
INLINE int64_t query_tile(int64_t queries) {
    if (W < 16) return std::min<int64_t>(queries, 4);
    return queries == 8 ? 4 : tile_rows(queries);  // 8 rows take 3 keys at a time; NEAR is no multiple
}

// sum[m] += weights[m][j] * values[j] for j ascending; M queries, n keys. `ahead` as in `dots`.
template <class T, int M>
void add_values(const float* weights, const T* values, int64_t slot, int64_t n, int64_t dim, float* sum,
                       int64_t wide, int64_t ahead) {
    constexpr int C = W == 16 || M == 1 ? 4 : 2;  // vectors of a value row at a time, to hide the latency
    int64_t d = 0;
    for (; d + C * W <= dim; d += C * W) {
        vf acc[M][C];
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) acc[m][c] = load(sum + m * wide + d + c * W);
        for (int64_t j = 0; j < n; ++j) {
            vf value[C];
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) value[c] = load(values + j * slot + d + c * W);
            for (int64_t at = 0; at < C * W * (int64_t)sizeof(T); at += LINE)
                __builtin_prefetch(reinterpret_cast<const char*>(values + j * slot + d) + ahead + at);
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m) {
                const vf weight = splat(weights[m * TILE + j]);
#pragma GCC unroll 4
                for (int c = 0; c < C; ++c) acc[m][c] = fma(weight, value[c], acc[m][c]);
            }
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) store(acc[m][c], sum + m * wide + d + c * W);
    }
    for (; d < dim; d += W) {
        const int some = (int)std::min<int64_t>(W, dim - d);
        for (int m = 0; m < M; ++m) {
            vf acc = load(sum + m * wide + d);
            for (int64_t j = 0; j < n; ++j) {
                const T* at = values + j * slot + d;
                acc = fma(splat(weights[m * TILE + j]), load_some(at, some), acc);
            }
            store(acc, sum + m * wide + d);
        }
    }
}

template <class T>
void add_values(const float* weights, const T* values, int64_t slot, int64_t keys, int64_t queries, int64_t dim,
                float* sum, int64_t wide, int64_t ahead) {
    for (int64_t m = 0; m < queries; m += 4) {
        const auto run = queries - m >= 4   ? add_values<T, 4>
                         : queries - m == 3 ? add_values<T, 3>
                         : queries - m == 2 ? add_values<T, 2>
                                            : add_values<T, 1>;
        run(weights + m * TILE, values, slot, keys, dim, sum + m * wide, wide, m ? 0 : ahead);
    }
}

// Scores of one query over a tile -> weights relative to the new top; the earlier sums are rescaled. Of the tile's keys
// it sees those from `first` to before `valid`, at least one.
INLINE void soften(float* scores, int64_t first, int64_t valid, float scale, float& top, float& total, float* sum,
                   int64_t wide) {
    const vf s = splat(scale), low = splat(-INFINITY);
    alignas(64) static constexpr float LANE[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vf score[TILE / W], peak = low;
    for (int i = 0; i < TILE / W; ++i) {
        vi inside = (load(LANE) < splat((float)(valid - i * W))) & (load(LANE) >= splat((float)(first - i * W)));
        score[i] = select(inside, load(scores + i * W) * s, low);
        peak = maximum(score[i], peak);
    }
    float tile_top = peak[0];
    for (int i = 1; i < W; ++i) tile_top = peak[i] > tile_top ? peak[i] : tile_top;
    const float new_top = tile_top > top ? tile_top : top;
    if (new_top != top) {
        const float factor = exponential(top - new_top);  // 0 for the first tile
        total *= factor;
        scale_row(sum, wide, factor);
        top = new_top;
    }
    const vf t = splat(top);
    vf added[TILE / W];
    for (int i = 0; i < TILE / W; ++i) {
        added[i] = exponential(score[i] - t);
        store(added[i], scores + i * W);
    }
    vf all = added[0];
    for (int i = 1; i < TILE / W; ++i) all = all + added[i];
    total += lane_sum(all);
}

// One split of the keys for query rows `first..first + rows` of one KV head; `q [rows * group, dim]` is packed.
template <class T>
void attend_split(const Attention<T>& a, const T* q, int64_t first, int64_t rows, int64_t kv, int64_t split,
                  Partial out) {
    const int64_t group = a.group(), wide = a.wide(), queries = rows * group;
    for (int64_t i = 0; i < queries; ++i) {
        out.top[i] = -INFINITY;
        out.total[i] = 0;
    }
    std::memset(out.sum, 0, queries * wide * sizeof(float));
    const int64_t newest = a.position + first + rows - 1;
    float* scores = scratch<2>(queries * TILE);
    const int64_t begin = std::max(split * SPLIT, a.oldest(first) / TILE * TILE);
    for (int64_t start = begin; start < (split + 1) * SPLIT && start <= newest; start += TILE) {
        const int64_t keys = std::min(TILE, newest + 1 - start);
        const T* tile_keys = a.keys + start * a.slot + kv * a.dim;
        const T* tile_values = a.values + start * a.slot + kv * a.dim;
        // Rows that see none of this tile yet, rows that see its first keys, all its keys up to `whole`, its last keys
        // up to `last`, and then none.
        const int64_t none = std::clamp<int64_t>(start - a.position - first, 0, rows);
        const int64_t part = std::clamp<int64_t>(start + TILE - 1 - a.position - first, none, rows);
        const int64_t beyond = a.window - a.position - first;
        const int64_t last = a.window ? std::clamp<int64_t>(start + TILE - 1 + beyond, none, rows) : rows;
        const int64_t whole = a.window ? std::clamp<int64_t>(start + beyond, part, std::max(part, last)) : rows;
        // The keys and values of one head are a short run in each cached row, which the hardware prefetcher misses:
        // reading the keys prefetches the values of the tile, and reading the values prefetches the next tile's keys.
        int64_t ahead = reinterpret_cast<intptr_t>(tile_values) - reinterpret_cast<intptr_t>(tile_keys);
        for (int64_t j = 0; j < keys; j += NEAR) {
            const T* here = tile_keys + j * a.slot;
            for (int64_t m = none * group; m < last * group;) {
                const int64_t tile = query_tile(last * group - m);
                dots_tile_of<T>(tile)(here, a.slot, std::min(NEAR, keys - j), q + m * a.dim, a.dim, a.dim,
                                      scores + m * TILE + j, TILE, {m == none * group ? ahead : 0, false});
                m += tile;
            }
        }
        ahead = TILE * a.slot * (int64_t)sizeof(T) - ahead;
        for (int64_t m = none * group; m < last * group; ++m) {
            const int64_t row = first + m / group, valid = std::min(TILE, a.position + row + 1 - start);
            soften(scores + m * TILE, a.oldest(row) - start, valid, a.scale, out.top[m], out.total[m],
                   out.sum + m * wide, wide);
        }
        for (int64_t j = 0; j < keys; j += NEAR) {
            const T* here = tile_values + j * a.slot;
            const int64_t some = std::min(NEAR, keys - j);
            // for `count` rows from row t: the values of the keys from `from` to before `to`
            const auto add = [&](int64_t t, int64_t count, int64_t from, int64_t to) {
                if (count > 0 && to > from)
                    add_values(scores + t * group * TILE + j + from, here + from * a.slot, a.slot, to - from,
                               count * group, a.dim, out.sum + t * group * wide, wide, 0);
            };
            const auto seen_by = [&](int64_t t) { return std::min(some, a.position + first + t + 1 - start - j); };
            const auto add_some = [&](int64_t t, int64_t from) {
                add(t, 1, std::max(from, a.oldest(first + t) - start - j), seen_by(t));
            };
            // what the first row sees at the end, all see
            const int64_t ends = std::min(part, last);
            const bool old = ends > none && a.oldest(first + ends - 1) > start + j;
            const int64_t shared = old ? 0 : std::max<int64_t>(0, seen_by(none));
            add(none, ends - none, 0, shared);
            for (int64_t t = none; t < ends; ++t) add_some(t, shared);
            for (int64_t t = whole; t < last; ++t) add_some(t, 0);
            add_values(scores + part * group * TILE + j, here, a.slot, some, (whole - part) * group, a.dim,
                       out.sum + part * group * wide, wide, ahead);
        }
    }
}

// Merges later into into; queries that saw no key of the later split keep their bits.
INLINE void merge(Partial into, Partial later, int64_t queries, int64_t wide) {
    for (int64_t m = 0; m < queries; ++m) {
        if (later.total[m] == 0 && later.top[m] == -INFINITY) continue;
        const float top = later.top[m] > into.top[m] ? later.top[m] : into.top[m];
        const float mine = exponential(into.top[m] - top), theirs = exponential(later.top[m] - top);
        into.top[m] = top;
        into.total[m] = fma(into.total[m], mine, later.total[m] * theirs);
        const vf x = splat(mine), y = splat(theirs);
        for (int64_t d = 0; d < wide; d += W)
            store(fma(load(into.sum + m * wide + d), x, load(later.sum + m * wide + d) * y), into.sum + m * wide + d);
    }
}

template <class T>
void finish(const Attention<T>& a, Partial result, int64_t first, int64_t rows, int64_t kv) {
    const int64_t group = a.group(), wide = a.wide();
    for (int64_t m = 0; m < rows * group; ++m) {
        const int64_t row = first + m / group, head = kv * group + m % group;
        float sum = result.total[m];
        vf kept = splat(1.0f);
        if (a.sinks) {  // relative to the larger one, so that neither overflows
            const float top = std::max(result.top[m], a.sinks[head]);
            kept = splat(exponential(result.top[m] - top));
            sum = fma(sum, kept[0], exponential(a.sinks[head] - top));
        }
        const vf total = splat(sum);
        const T* gate = a.gate ? a.gate + row * a.gate_row + head * a.gate_head : nullptr;
        fill(a.out + (row * a.heads + head) * a.dim, a.dim, [&](int64_t d, int some) {
            const vf y = load(result.sum + m * wide + d) * kept / total;
            return gate ? y * sigmoid(load_some(gate + d, some)) : y;
        });
    }
}

template <class T> const T* pack_queries(const Attention<T>& a, int64_t first, int64_t rows, int64_t kv) {
    T* q = (T*)scratch<3>(rows * a.group() * a.dim);
    for (int64_t t = 0; t < rows; ++t)
        for (int64_t g = 0; g < a.group(); ++g)
            std::memcpy(q + (t * a.group() + g) * a.dim, a.q + (first + t) * a.q_row + (kv * a.group() + g) * a.q_head,
                        a.dim * sizeof(T));
    return q;
}

template <class T> void attend(const Attention<T>& a, int threads) {
    const int64_t group = a.group(), wide = a.wide(), per_block = a.rows_per_block();
    const int64_t row_blocks = (a.rows + per_block - 1) / per_block;
    const int64_t splits = (a.position + a.rows - 1) / SPLIT + 1;
    const int64_t keys = a.position + a.rows - a.oldest(0);
    const int64_t bytes = keys * a.kv_heads * a.dim * 2 * (int64_t)sizeof(T);
    const int64_t work = bytes * std::max<int64_t>(1, a.rows * group / 4);
    if (work < SERIAL_WORK) threads = 1;
    const int64_t floats = partial_floats(per_block * group, wide);
    if (row_blocks * a.kv_heads >= threads || splits == 1) {
        // Later row blocks see more keys, so they run first and the last ones to run are short.
        for_blocks(threads, row_blocks * a.kv_heads, [&](int64_t block) {
            const int64_t kv = block % a.kv_heads, first = (row_blocks - 1 - block / a.kv_heads) * per_block;
            const int64_t rows = std::min(per_block, a.rows - first), queries = rows * group;
            const T* q = pack_queries(a, first, rows, kv);
            float* memory = scratch<0>(2 * floats);
            Partial result = partial_at(memory, queries), later = partial_at(memory + floats, queries);
            attend_split(a, q, first, rows, kv, 0, result);
            for (int64_t split = 1; split * SPLIT < a.position + first + rows; ++split) {
                attend_split(a, q, first, rows, kv, split, later);
                merge(result, later, queries, wide);
            }
            finish(a, result, first, rows, kv);
        });
        return;
    }
    // Few rows, many keys: the splits are the parallel work.
    float* memory = scratch<1>(row_blocks * a.kv_heads * splits * floats);
    auto partial = [&](int64_t block, int64_t split) {
        const int64_t rows = std::min(per_block, a.rows - block / a.kv_heads * per_block);
        return partial_at(memory + (block * splits + split) * floats, rows * group);
    };
    for_blocks(threads, row_blocks * a.kv_heads * splits, [&](int64_t task) {
        const int64_t block = task / splits, split = task % splits;
        const int64_t kv = block % a.kv_heads, first = block / a.kv_heads * per_block;
        const int64_t rows = std::min(per_block, a.rows - first);
        attend_split(a, pack_queries(a, first, rows, kv), first, rows, kv, split, partial(block, split));
    });
    for_blocks(threads, row_blocks * a.kv_heads, [&](int64_t block) {
        const int64_t kv = block % a.kv_heads, first = block / a.kv_heads * per_block;
        const int64_t rows = std::min(per_block, a.rows - first), queries = rows * group;
        Partial result = partial(block, 0);
        for (int64_t split = 1; split < splits; ++split) merge(result, partial(block, split), queries, wide);
        finish(a, result, first, rows, kv);
    });
}

template <class T>
void append(T* to, int64_t slot, const T* from, int64_t row, int64_t head, int64_t rows, int64_t heads, int64_t dim) {
    for (int64_t t = 0; t < rows; ++t)
        for (int64_t h = 0; h < heads; ++h)
            std::memcpy(to + t * slot + h * dim, from + t * row + h * head, dim * sizeof(T));
}

}  // namespace specdec

using namespace specdec;

#define ATTENTION(NAME, T)                                                                                             \
    EXPORT void attend_##NAME(const void* q, int64_t q_row, int64_t q_head, const void* k, int64_t k_row,              \
                                  int64_t k_head, const void* v, int64_t v_row, int64_t v_head, void* keys,            \
                                  void* values, const void* gate, int64_t gate_row, int64_t gate_head, int64_t rows,   \
                                  int64_t heads, int64_t kv_heads, int64_t dim, int64_t position, int64_t window,      \
                                  float scale, const void* sinks, void* out, int64_t threads) {                        \
        const int64_t slot = kv_heads * dim;                                                                           \
        if (k) { /* else they are there already */                                                                     \
            append((T*)keys + position * slot, slot, (const T*)k, k_row, k_head, rows, kv_heads, dim);                 \
            append((T*)values + position * slot, slot, (const T*)v, v_row, v_head, rows, kv_heads, dim);               \
        }                                                                                                              \
        attend<T>({(const T*)q, q_row, q_head, (const T*)keys, (const T*)values, slot, (const T*)gate, gate_row,       \
                   gate_head, rows, heads, kv_heads, dim, position, window, scale, (const float*)sinks, (T*)out},      \
                  (int)threads);                                                                                       \
    }

ATTENTION(bf16, bf16)
ATTENTION(f32, float)
