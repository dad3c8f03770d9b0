// Products of panels (`panels.h`) by AMX: tiles of up to 16 activation rows times 16 weight rows.
//
// Bits contract: that of panels.h. An accumulator takes 16 words at a time, the even and the odd columns summed apart and
// then added (TDPBF16PS, Intel's manual); the last words of K are padded with zeros.
#pragma once

#include "panels.h"

#if defined(__AMX_BF16__) && defined(__linux__)  // elsewhere nobody has asked the system for the tiles
#define SPECDEC_TILES 1

#include <immintrin.h>

namespace specdec {

constexpr int64_t TILE_ROWS = 16, TILE_WORDS = 16, TILE_BYTES = TILE_WORDS * WORD;  // of a row
constexpr int64_t PANEL_WORD = FEATURES * WORD;                                      // bytes
constexpr int64_t LEAST_WORDS = 64;  // of a row: with fewer, setting up tiles takes longer than they save
static_assert(FEATURES == 2 * TILE_ROWS);

// Lets a thread keep the shapes of its tiles until the end of a scope in which nobody else uses them: setting up tiles
// for every block would take a tenth of a product with one row.
struct KeptTiles {
    static inline thread_local int64_t shapes = 0;  // TILE_ROWS * 2 * rows + more; 0: none
    ~KeptTiles() {
        if (shapes) _tile_release();
        shapes = 0;
    }
};

// Tiles 0 to 3 hold sums (of rows 0 to 15 with features 0 to 15, then 16 to 31; of the next rows likewise), 4 and 5
// activations, 6 and 7 weights.
INLINE void set_tiles(int64_t rows, int64_t more) {
    const int64_t shapes = 2 * TILE_ROWS * rows + more;
    if (shapes == KeptTiles::shapes) return;
    KeptTiles::shapes = shapes;
    struct {
        uint8_t palette = 1, rest[15] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } shape;
    const uint8_t of[8] = {(uint8_t)rows, (uint8_t)rows, (uint8_t)more, (uint8_t)more,
                           (uint8_t)rows, (uint8_t)more, TILE_WORDS,    TILE_WORDS};
    for (int i = 0; i < 8; ++i)
        if (of[i]) {
            shape.bytes[i] = TILE_BYTES;
            shape.rows[i] = of[i];
        }
    _tile_loadconfig(&shape);
}

// Compilers do not know that loads of tiles read memory: it must have been written before.
INLINE void written() { asm volatile("" ::: "memory"); }

// Adds the products of 16 words. Strides in bytes.
template <bool MORE> INLINE void add_words(const char* words, const char* x, int64_t x_stride) {
    _tile_loadd(6, words, PANEL_WORD);
    _tile_loadd(7, words + TILE_BYTES, PANEL_WORD);
    _tile_loadd(4, x, x_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (MORE) {
        _tile_loadd(5, x + TILE_ROWS * x_stride, x_stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

template <bool MORE>
INLINE void add_panel(const char* panel, int64_t words, const char* x, int64_t x_stride, int64_t rows, int64_t ahead) {
    constexpr int64_t STEP = TILE_WORDS * PANEL_WORD, LINE = 64;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (MORE) {
        _tile_zero(2);
        _tile_zero(3);
    }
    int64_t i = 0;
    for (; i + TILE_WORDS <= words; i += TILE_WORDS, panel += STEP, x += TILE_BYTES) {
        if (ahead)
#pragma GCC unroll 32
            for (int64_t line = 0; line < STEP; line += LINE) __builtin_prefetch(panel + ahead + line);
        add_words<MORE>(panel, x, x_stride);
    }
    if (i == words) return;
    alignas(LINE) char some[STEP] = {}, last[2 * TILE_ROWS * TILE_BYTES] = {};
    std::memcpy(some, panel, (words - i) * PANEL_WORD);
    for (int64_t m = 0; m < rows; ++m) std::memcpy(last + m * TILE_BYTES, x + m * x_stride, (words - i) * WORD);
    written();
    add_words<MORE>(some, last, TILE_BYTES);
}

// out[m * out_stride + f] = w_f . x_m for `n` features, from the first of a panel. `ahead`: bytes; prefetches later weights.
// Within a scope of KeptTiles.
inline void products_by_tiles(const char* panel, int64_t words, int64_t n, const bf16* x, int64_t x_stride, int64_t rows,
                              float* out, int64_t out_stride, int64_t ahead) {
    const int64_t out_bytes = out_stride * (int64_t)sizeof(float), x_bytes = x_stride * (int64_t)sizeof(bf16);
    for (int64_t m = 0; m < rows; m += 2 * TILE_ROWS) {
        const int64_t own = std::min(rows - m, 2 * TILE_ROWS), first = std::min(own, TILE_ROWS);
        const auto run = own > TILE_ROWS ? add_panel<true> : add_panel<false>;
        set_tiles(first, own - first);
        written();
        for (int64_t f = 0; f < n; f += FEATURES) {
            run(panel + f * words * WORD, words, reinterpret_cast<const char*>(x + m * x_stride), x_bytes, own,
                m ? 0 : ahead);
            float* const to = out + m * out_stride + f;
            _tile_stored(0, to, out_bytes);
            _tile_stored(1, to + TILE_ROWS, out_bytes);
            if (own > TILE_ROWS) {
                _tile_stored(2, to + TILE_ROWS * out_stride, out_bytes);
                _tile_stored(3, to + TILE_ROWS * out_stride + TILE_ROWS, out_bytes);
            }
        }
    }
}

}  // namespace specdec
#endif
