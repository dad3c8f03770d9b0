// Inner products of a few weight rows with a few activation rows, used by matrix products and attention scores.
//
// Bits contract: the product of one weight row and one activation row has one vector accumulator, filled in ascending k
// in steps of STEP elements, the tail padded with zeros, and folded by `lane_sums`. None of this depends on the number
// of rows of either kind.
#pragma once

#include "vectors.h"

namespace specdec {

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(SPECDEC_AVX512)
#define SPECDEC_DPBF16 1
#endif

template <class T> struct Product;

// `open` loads STEP elements.
template <> struct Product<float> {
    static constexpr int STEP = W;
    typedef vf part;
    static INLINE part open(const float* p) { return load(p); }
    static INLINE vf add(part w, part x, vf sum) { return fma(w, x, sum); }
};

template <> struct Product<bf16> {
    static constexpr int STEP = 2 * W;
#ifdef SPECDEC_DPBF16
    typedef __m512bh part;
    static INLINE part open(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
    static INLINE vf add(part w, part x, vf sum) { return (vf)_mm512_dpbf16_ps((__m512)sum, w, x); }
#else
    struct part {
        vf even, odd;
    };
    static INLINE part open(const bf16* p) {
        vu u = load_as<vu>(p);  // little endian: the even element is the low half
        return {(vf)(u << 16), (vf)(u & 0xffff0000u)};
    }
    static INLINE vf add(part w, part x, vf sum) { return fma(w.odd, x.odd, fma(w.even, x.even, sum)); }
#endif
};

template <class T> INLINE typename Product<T>::part open_tail(const T* p, int n) {
    T padded[Product<T>::STEP] = {};
    std::memcpy(padded, p, n * sizeof(T));
    return Product<T>::open(padded);
}

// Where to prefetch weights of a later call: `ahead` bytes after those being read. Prefetched in the order of the rows,
// or (dense rows, all of K at once) in memory order.
struct Fetch {
    int64_t ahead;
    bool linear;
};
constexpr Fetch NOTHING = {0, false};

// out[m * out_stride + r] = w_r . x_m for R weight rows and M activation rows of length k.
template <class T, int R, int M>
INLINE void dots(const T* w, int64_t w_stride, const T* x, int64_t x_stride, int64_t k, float* out, int64_t out_stride,
                 Fetch fetch) {
    typedef Product<T> P;
    vf sum[M * R];
#pragma GCC unroll 32
    for (int i = 0; i < M * R; ++i) sum[i] = vf{};
    const char* later = reinterpret_cast<const char*>(w) + fetch.ahead;
    const int64_t later_row = (fetch.linear ? P::STEP : w_stride) * (int64_t)sizeof(T);
    const int64_t later_step = (fetch.linear ? R : 1) * P::STEP * (int64_t)sizeof(T);
    int64_t at = 0;
    for (; at + P::STEP <= k; at += P::STEP, later += later_step) {
        typename P::part weight[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            weight[r] = P::open(w + r * w_stride + at);
            __builtin_prefetch(later + r * later_row);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            typename P::part row = P::open(x + m * x_stride + at);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sum[m * R + r] = P::add(weight[r], row, sum[m * R + r]);
        }
    }
    if (at < k) {
        const int n = (int)(k - at);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            typename P::part row = open_tail(x + m * x_stride + at, n);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                sum[m * R + r] = P::add(open_tail(w + r * w_stride + at, n), row, sum[m * R + r]);
        }
    }
#pragma GCC unroll 8
    for (int begin = 0; begin < M * R; begin += W) {
        constexpr int N = M * R < W ? M * R : W;
        vf group[N];
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) group[i] = begin + i < M * R ? sum[(begin + i) % (M * R)] : vf{};
        float sums[W];
        store(lane_sums<N>(group), sums);
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i)
            if (begin + i < M * R) out[(begin + i) / R * out_stride + (begin + i) % R] = sums[i];
    }
}

// Weight rows processed at once with M activation rows: as many as keep all accumulators in registers.
constexpr int weight_rows(int64_t M) {
#if defined(SPECDEC_DPBF16)
    return M <= 2 ? 8 : M <= 6 ? 4 : 3;
#else
    return W == 16 ? (M <= 2 ? 8 : M <= 4 ? 4 : 2) : (M <= 2 ? 4 : M <= 4 ? 2 : 1);
#endif
}
constexpr int MAX_TILE = 8;  // activation rows of one tile

// `n` weight rows against M activation rows.
template <class T, int M>
__attribute__((noinline)) void dots_tile(const T* w, int64_t w_stride, int64_t n, const T* x, int64_t x_stride,
                                         int64_t k, float* out, int64_t out_stride, Fetch fetch) {
    constexpr int R = weight_rows(M);
    int64_t r = 0;
    for (; r + R <= n; r += R)
        dots<T, R, M>(w + r * w_stride, w_stride, x, x_stride, k, out + r, out_stride, fetch);
    if constexpr (R > 1)
        for (; r < n; ++r)
            dots<T, 1, M>(w + r * w_stride, w_stride, x, x_stride, k, out + r, out_stride, NOTHING);
}

template <class T> using DotsTile = void (*)(const T*, int64_t, int64_t, const T*, int64_t, int64_t, float*, int64_t,
                                             Fetch);

template <class T> INLINE DotsTile<T> dots_tile_of(int64_t rows) {
    static constexpr DotsTile<T> TILES[MAX_TILE] = {dots_tile<T, 1>, dots_tile<T, 2>, dots_tile<T, 3>, dots_tile<T, 4>,
                                                    dots_tile<T, 5>, dots_tile<T, 6>, dots_tile<T, 7>, dots_tile<T, 8>};
    return TILES[rows - 1];
}

// Rows of the next tile when `rows` remain. Any split gives the same bits; 6 keeps most operands in registers, and 7
// and 8 rows are cheaper as one tile than as two.
INLINE int64_t tile_rows(int64_t rows) { return rows <= 8 ? rows : rows >= 12 ? 6 : (rows + 1) / 2; }

}  // namespace specdec
