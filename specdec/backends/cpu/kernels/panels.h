// Inner products of packed weights with a few activation rows. Panels store the weights in the order in which they are
// read.
//
// Layout: FEATURES weight rows make a panel. Row-major weights [N, K] are cut into words of four bytes (two bfloat16 or
// one float32), and a panel stores word i of its rows side by side: [N / FEATURES][words][FEATURES]. A panel has the
// size of its rows; the last one is padded with zero rows. Reading a matrix is then one ascending stream, and a vector
// holds one word of W output features, so no sums across lanes are needed.
//
// Bits contract: the product of one weight row and one activation row has its own accumulator, filled word by word in
// ascending k. None of this depends on other rows. An accumulator that is stored between two parts of K keeps its bits,
// so cutting K into parts changes nothing.
#pragma once

#include <algorithm>

#include "dots.h"
#include "team.h"

namespace specdec {

constexpr int64_t FEATURES = 32;
constexpr int64_t WORD = 4;  // bytes

// How a vector of weight words is multiplied with an activation row. `Input`: an activation as the products read it,
// PER_WORD of them for each word, in PARTS steps.
template <class T> struct Panel;

template <> struct Panel<float> {
    typedef float Input;
    typedef vf part;
    static constexpr int64_t PER_WORD = 1, PARTS = 1;
    template <int I> static INLINE part open(const char* word) { return load_as<vf>(word); }
    static INLINE vf add(part w, const Input* x, vf sum) { return fma(w, splat(*x), sum); }
};

template <> struct Panel<bf16> {
    static constexpr int64_t PER_WORD = 2;
#ifdef SPECDEC_DPBF16
    typedef bf16 Input;
    typedef __m512bh part;
    static constexpr int64_t PARTS = 1;
    template <int I> static INLINE part open(const char* word) { return (__m512bh)_mm512_loadu_si512(word); }
    static INLINE vf add(part w, const Input* x, vf sum) {
        return (vf)_mm512_dpbf16_ps((__m512)sum, w, (__m512bh)_mm512_set1_epi32(load_as<int32_t>(x)));
    }
#else
    typedef float Input;  // widened once per product: widening costs more than reading twice the bytes from L1
    typedef vf part;
    static constexpr int64_t PARTS = 2;
    template <int I> static INLINE part open(const char* word) {  // little endian: element 0 is the low half
        const vu u = load_as<vu>(word);
        return I ? (vf)(u & 0xffff0000u) : (vf)(u << 16);
    }
    static INLINE vf add(part w, const Input* x, vf sum) { return fma(w, splat(*x), sum); }
#endif
};

#if defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = W == 16 ? 32 : 16;
#endif
constexpr int PANEL_ROWS = W == 16 ? 12 : 6;  // activation rows of the largest tile
constexpr int MAX_VECTORS = FEATURES / W;

// Vectors of features summed at once with M activation rows: more hide the latency of additions. Their sums, the
// operands of one kind, one of the other and a mask are in registers.
constexpr int panel_vectors(int M) {
    int vectors = MAX_VECTORS;
    while (M * vectors + std::min(M, vectors) + 2 > REGISTERS) vectors /= 2;
    return vectors;
}

// Rows of a tile that leave registers for a second panel. Two panels hide the latency of additions, which matters when
// the weights come from a cache; one panel streams better from memory.
constexpr int PAIRED_ROWS = W == 16 ? 3 : 1;

// Rows of the next tile when `rows` remain; any split gives the same bits. With few registers, tiles of 6, 5, 4 and 2
// rows keep more additions under way than those of 3 and 1.
INLINE int64_t panel_rows(int64_t rows) {
    if (rows <= PANEL_ROWS) return rows;
    if (REGISTERS < 32) return rows == PANEL_ROWS + 1 || rows == PANEL_ROWS + 3 ? PANEL_ROWS - 1 : PANEL_ROWS;
    return rows >= 2 * PANEL_ROWS ? PANEL_ROWS : (rows + 1) / 2;
}

// The words of K that one call covers. Between calls the accumulators are in `out`.
struct Words {
    int64_t count;
    bool first;
};

// Weights of a later call to prefetch, `step` bytes further with every word of every sweep over the features.
struct Later {
    const char* from;
    int64_t step;
};

template <class T, int M, int V, int P, int PART>
INLINE void add_parts(const char* w, int64_t next_panel, const typename Panel<T>::Input* x, int64_t x_stride,
                      vf (&sum)[M * P * V]) {
    const auto open = [&](int v) __attribute__((always_inline)) {
        return Panel<T>::template open<PART>(w + v / V * next_panel + v % V * W * WORD);
    };
    const auto add = [&](int m, int v, typename Panel<T>::part weight) __attribute__((always_inline)) {
        vf& own = sum[m * P * V + v];
        own = Panel<T>::add(weight, x + m * x_stride + PART, own);
    };
    if constexpr (M < P * V) {  // holds what is fewer in registers
#pragma GCC unroll 16
        for (int v = 0; v < P * V; ++v) {
            const auto weight = open(v);
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) add(m, v, weight);
        }
    } else {
        typename Panel<T>::part weight[P * V];
#pragma GCC unroll 16
        for (int v = 0; v < P * V; ++v) weight[v] = open(v);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
            for (int v = 0; v < P * V; ++v) add(m, v, weight[v]);
    }
    if constexpr (PART + 1 < Panel<T>::PARTS) add_parts<T, M, V, P, PART + 1>(w, next_panel, x, x_stride, sum);
}

// out[m * out_stride + f] = (out before, unless first) + w_f . x_m for the rows of P panels, `panel_bytes` apart, and M
// activation rows. FETCH prefetches weights, because the hardware prefetcher stops at every page.
template <class T, int M, int P, bool FETCH>
__attribute__((noinline)) void panel_tile(const char* panel, int64_t panel_bytes, Words words,
                                          const typename Panel<T>::Input* x, int64_t x_stride, float* out,
                                          int64_t out_stride, Later later) {
    constexpr int V = panel_vectors(M);
    constexpr int64_t LINE = 64;
    for (int64_t first = 0; first < FEATURES; first += V * W) {
        vf sum[M * P * V];
        const auto at = [&](int i) __attribute__((always_inline)) {
            const int m = i / (P * V), v = i % (P * V);
            return out + m * out_stride + v / V * FEATURES + first + v % V * W;
        };
#pragma GCC unroll 32
        for (int i = 0; i < M * P * V; ++i) sum[i] = vf{};
        if (!words.first)
#pragma GCC unroll 32
            for (int i = 0; i < M * P * V; ++i) sum[i] = load(at(i));
        const char* w = panel + first * WORD;
        const typename Panel<T>::Input* row = x;
        for (int64_t i = 0; i < words.count; ++i, w += FEATURES * WORD, row += Panel<T>::PER_WORD) {
            add_parts<T, M, V, P, 0>(w, panel_bytes, row, x_stride, sum);
            if (FETCH) {
#pragma GCC unroll 2
                for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
                    for (int64_t line = 0; line < V * W * WORD; line += LINE)
                        __builtin_prefetch(later.from + p * panel_bytes + line);
                later.from += later.step;
            }
        }
#pragma GCC unroll 32
        for (int i = 0; i < M * P * V; ++i) store(sum[i], at(i));
    }
}

template <class T>
using PanelTile = void (*)(const char*, int64_t, Words, const typename Panel<T>::Input*, int64_t, float*, int64_t,
                           Later);

template <class T, int P, bool FETCH, size_t... I>
INLINE PanelTile<T> panel_tile_of(int64_t rows, std::index_sequence<I...>) {
    static constexpr PanelTile<T> TILES[] = {panel_tile<T, (int)I + 1, P, FETCH>...};
    return TILES[rows - 1];
}

template <class T, bool FETCH> INLINE PanelTile<T> panel_tile_of(int64_t rows, int64_t panels) {
    return panels == 2 ? panel_tile_of<T, 2, FETCH>(rows, std::make_index_sequence<PAIRED_ROWS>{})
                       : panel_tile_of<T, 1, FETCH>(rows, std::make_index_sequence<PANEL_ROWS>{});
}

// --- packing (pack.cpp) --------------------------------------------------------------------------------------------------

void pack_panel(const char* from, int64_t stride, int64_t words, int64_t rows, uint32_t* to);
void fetch_pages(const void* at, int64_t bytes);
void give_back(const void* at, int64_t bytes);

// Calls body(panel) for every panel of rows that are `stride` bytes apart. `release`: they are mapped from a file (see
// is_file), and their pages are released as soon as they are packed.
template <class F>
void for_panels(const void* from, int64_t stride, int64_t rows, bool release, int64_t threads, const F& body) {
    constexpr int64_t AT_ONCE = 16 << 20;  // bytes that are packed before their pages are released
    const int64_t panels = (rows + FEATURES - 1) / FEATURES;
    const int64_t step = std::max(threads, AT_ONCE / (FEATURES * stride));
    for (int64_t begin = 0; begin < panels; begin += step) {
        const int64_t end = std::min(begin + step, panels);
        const char* source = (const char*)from + begin * FEATURES * stride;
        const int64_t size = (std::min(end * FEATURES, rows) - begin * FEATURES) * stride;
        if (release) fetch_pages(source, size);
        for_blocks((int)threads, end - begin, [&](int64_t panel) { body(begin + panel); });
        if (release) give_back(source, size);
    }
}

}  // namespace specdec
