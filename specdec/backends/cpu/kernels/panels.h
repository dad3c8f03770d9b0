// Inner products of packed weights with a few activation rows. Panels store the weights in the order in which they are
// read.
//
// Layout: FEATURES weight rows make a panel. Row-major weights [N, K] are cut into words of four bytes (two bfloat16 or
// one float32), and a panel stores word i of its rows side by side: [N / FEATURES][words][FEATURES]. A panel has the
// size of its rows; the last one is padded with zero rows. Reading a matrix is then one ascending stream, and a vector
// holds one word of W output features, so no sums across lanes are needed.
//
// Bits contract: the product of one weight row and one activation row has its own accumulator, filled word by word in
// ascending k. None of this depends on other rows.
#pragma once

#include "dots.h"

namespace specdec {

constexpr int64_t FEATURES = 32;
constexpr int64_t WORD = 4;  // bytes

// Vectors of features summed at once, and the number of activation rows that keeps their accumulators in registers.
#if defined(__aarch64__)
constexpr int PANEL_VECTORS = 4;
#else
constexpr int PANEL_VECTORS = 2;
#endif
constexpr int PANEL_ROWS = W == 16 ? 12 : 4;
static_assert(FEATURES % (PANEL_VECTORS * W) == 0);

// Rows of the next tile when `rows` remain; any split gives the same bits.
INLINE int64_t panel_rows(int64_t rows) {
    return rows <= PANEL_ROWS ? rows : rows >= 2 * PANEL_ROWS ? PANEL_ROWS : (rows + 1) / 2;
}

// out[m * out_stride + f] = w_f . x_m for the rows of P panels and M activation rows of length k. Prefetches weights
// `ahead` bytes after those being read, to cover the memory latency: the hardware prefetcher stops at every page.
template <class T, int M, int P>
__attribute__((noinline)) void panel_tile(const T* panel, const T* x, int64_t x_stride, int64_t k, float* out,
                                          int64_t out_stride, int64_t ahead) {
    typedef Product<T> Product;
    constexpr int V = PANEL_VECTORS;
    constexpr int64_t PER_WORD = WORD / (int64_t)sizeof(T);
    constexpr int64_t LINE = 64;
    const int64_t next_panel = FEATURES * k * (int64_t)sizeof(T);
    for (int64_t first = 0; first < FEATURES; first += V * W) {
        vf sum[M * P * V];
#pragma GCC unroll 32
        for (int i = 0; i < M * P * V; ++i) sum[i] = vf{};
        const char* w = reinterpret_cast<const char*>(panel) + first * WORD;
        for (int64_t at = 0; at < k; at += PER_WORD, w += FEATURES * WORD) {
            typename Product::part weight[P * V];
#pragma GCC unroll 2
            for (int p = 0; p < P; ++p) {
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v)
                    weight[p * V + v] = Product::open(reinterpret_cast<const T*>(w + p * next_panel + v * W * WORD));
#pragma GCC unroll 8
                for (int64_t line = 0; line < V * W * WORD; line += LINE)
                    __builtin_prefetch(w + p * next_panel + ahead + line);
            }
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) {
                const typename Product::part row = Product::spread(x + m * x_stride + at);
#pragma GCC unroll 8
                for (int v = 0; v < P * V; ++v)
                    sum[m * P * V + v] = Product::add(weight[v], row, sum[m * P * V + v]);
            }
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
            for (int v = 0; v < P * V; ++v)
                store(sum[m * P * V + v], out + m * out_stride + v / V * FEATURES + first + v % V * W);
    }
}

template <class T> using PanelTile = void (*)(const T*, const T*, int64_t, int64_t, float*, int64_t, int64_t);

template <class T, int P, size_t... I> INLINE PanelTile<T> panel_tile_of(int64_t rows, std::index_sequence<I...>) {
    static constexpr PanelTile<T> TILES[] = {panel_tile<T, (int)I + 1, P>...};
    return TILES[rows - 1];
}

// Rows of a tile that leave registers for a second panel. Two panels hide the latency of additions, which matters when
// the weights come from a cache; one panel streams better from memory.
constexpr int64_t PAIRED_ROWS = PANEL_ROWS / 4;

template <class T> INLINE PanelTile<T> panel_tile_of(int64_t rows, int64_t panels) {
    return panels == 2 ? panel_tile_of<T, 2>(rows, std::make_index_sequence<PAIRED_ROWS>{})
                       : panel_tile_of<T, 1>(rows, std::make_index_sequence<PANEL_ROWS>{});
}

}  // namespace specdec
