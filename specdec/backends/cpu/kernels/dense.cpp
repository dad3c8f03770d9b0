// Matrix products: project, linear, swiglu and head of specdec.backends.ops. Reference: ReferenceOps, same names.
//
// Bits contract: an output is one inner product of `dots.h` or `panels.h` followed by its own epilogue; row t of any
// result is the same for every number of rows and threads.
//
// Weights are row-major [N, K] (`dots.h`) or packed in panels (`panels.h`). The two sum in different orders, so a
// weight never changes its layout. A block of BLOCK output features is multiplied with all activation rows, CHUNK rows
// at a time, before the next block, so that each weight is read from memory once.

#include "dots.h"
#include "panels.h"
#include "threads.h"

namespace specdec {

constexpr int64_t CHUNK = 48;
constexpr int64_t BLOCK = 64;

template <class T> struct Matrix {
    const T* data;
    int64_t stride;  // elements between output features; -K: packed in panels
    int64_t n;

    bool packed() const { return stride < 0; }
    // In a packed matrix, `feature` must be the first of a panel of FEATURES times K elements.
    const T* from(int64_t feature) const { return data + feature * (packed() ? -stride : stride); }
};

template <class T> struct Rows {
    const T* data;
    int64_t stride;
    int64_t count;
    int64_t k;
};

// Activations up to NEAR_BYTES stay in L1 while the weights of a block are read. Above that, K is cut into parts of
// PART_BYTES, because reading eight rows of K = 3584 from L2 for every three weight rows costs a third of the speed.
constexpr int64_t NEAR_BYTES = 40 * 1024;
constexpr int64_t PART_BYTES = 16 * 1024;

// Prefetch distance in packed weights, in bytes: 4 KiB saturate one core's share of the bandwidth.
constexpr int64_t PANEL_AHEAD = 4096;

// Weights up to CACHED_BYTES are probably still in a cache.
constexpr int64_t CACHED_BYTES = 1 << 20;

template <class T>
void panel_products(const Rows<T>& x, int64_t first_row, int64_t rows, const T* w, int64_t n, bool cached, float* out) {
    for (int64_t f = 0; f < n;) {
        const int64_t panels = cached && rows <= PAIRED_ROWS && f + FEATURES < n ? 2 : 1;
        for (int64_t m = 0; m < rows;) {
            const int64_t tile = panel_rows(rows - m);
            panel_tile_of<T>(tile, panels)(w + f * x.k, x.data + (first_row + m) * x.stride, x.stride, x.k,
                                           out + m * BLOCK + f, BLOCK, first_row + m == 0 ? PANEL_AHEAD : 0);
            m += tile;
        }
        f += panels * FEATURES;
    }
}

// Computes a tile of `rows` x `n` products of one matrix, features `w..w + n`, into `out [CHUNK, BLOCK]`.
template <class T>
void tile_products(const Rows<T>& x, int64_t first_row, int64_t rows, const T* w, int64_t stride, int64_t n,
                   bool cached, float* out) {
    if (stride < 0) return panel_products(x, first_row, rows, w, n, cached, out);
    const T* from = x.data + first_row * x.stride;
    // Prefetch 4 to 8 rows ahead: with fewer the data arrives too late, with more it is evicted from L1 again.
    const auto ahead = [&](int64_t tile) {
        const int64_t held = weight_rows(tile);
        return (held < 4 ? 2 * held : held) * stride * (int64_t)sizeof(T);
    };
    if (rows <= MAX_TILE) {
        const int64_t bytes = rows * x.k * (int64_t)sizeof(T);
        const int64_t parts = bytes <= NEAR_BYTES ? 1 : (bytes + PART_BYTES - 1) / PART_BYTES;
        const int64_t step = Product<T>::STEP, length = ((x.k + parts - 1) / parts + step - 1) / step * step;
        const Fetch fetch = {ahead(rows), bytes <= PART_BYTES && stride == x.k};
        alignas(64) vf carry[BLOCK * MAX_TILE];
        for (int64_t k = 0; k < x.k; k += length) {
            const bool last = k + length >= x.k;
            dots_tile_of<T>(rows)(w + k, stride, n, from + k, x.stride, last ? x.k - k : length, out, BLOCK,
                                  fetch, {carry, k == 0, last});
        }
        return;
    }
    for (int64_t r = 0; r < n; r += 4) {
        for (int64_t m = 0; m < rows;) {
            const int64_t tile = tile_rows(rows - m);
            dots_tile_of<T>(tile)(w + r * stride, stride, std::min<int64_t>(4, n - r), from + m * x.stride, x.stride,
                                  x.k, out + m * BLOCK + r, BLOCK, {m == 0 ? ahead(4) : 0, false}, WHOLE);
            m += tile;
        }
    }
}

using Tiles = const float (*)[CHUNK * BLOCK];

// Calls finish(matrix, first_row, rows, first_feature, features, tiles) for every tile of products. PAIR = 2 passes the
// tiles of two matrices of one shape together.
template <int PAIR, class T, class Finish>
void products(const Rows<T>& x, const Matrix<T>* w, int count, int threads, Finish&& finish) {
    int64_t features = 0;
    for (int i = 0; i < count; i += PAIR) features += w[i].n;
    const int64_t weights = features * PAIR * x.k;
    const int64_t work = std::max<int64_t>(weights * (int64_t)sizeof(T), weights * x.count / 4);
    if (work < SERIAL_WORK) threads = 1;
    const bool cached = weights * (int64_t)sizeof(T) <= CACHED_BYTES;
    int64_t size = BLOCK, least = 8;
    for (int i = 0; i < count; ++i)
        if (w[i].packed()) least = FEATURES;
    while (size > least && features < 4 * size * threads) size /= 2;
    int64_t blocks = 0;
    for (int i = 0; i < count; i += PAIR) blocks += (w[i].n + size - 1) / size;
    for_blocks(threads, blocks, [&](int64_t block) {
        int i = 0;
        for (;; i += PAIR) {
            const int64_t own = (w[i].n + size - 1) / size;
            if (block < own) break;
            block -= own;
        }
        const int64_t first = block * size, n = std::min(size, w[i].n - first);
        alignas(64) float tile[PAIR][CHUNK * BLOCK];
        for (int64_t row = 0; row < x.count; row += CHUNK) {
            const int64_t rows = std::min(CHUNK, x.count - row);
            for (int j = 0; j < PAIR; ++j)
                tile_products(x, row, rows, w[i + j].from(first), w[i + j].stride, n, cached,
                              tile[j]);
            finish(i, row, rows, first, n, tile);
        }
    });
}

// Stores value(row, feature-vector) over a tile, whole vectors first and the tail padded.
template <class Out, class Value>
INLINE void store_tile(Out* out, int64_t out_stride, int64_t rows, int64_t n, Value&& value) {
    for (int64_t m = 0; m < rows; ++m) {
        int64_t j = 0;
        for (; j + W <= n; j += W) store(value(m, j, W), out + m * out_stride + j);
        if (j < n) store(value(m, j, (int)(n - j)), out + m * out_stride + j, (int)(n - j));
    }
}

template <class T> INLINE vf load_some(const T* p, int n) { return n == W ? load(p) : load(p, n); }

template <class T>
void project(const Rows<T>& x, int count, const void* const* w, const int64_t* strides, const int64_t* n,
             const float* const* bias, void* const* out, int threads) {
    Matrix<T> matrices[16];
    for (int i = 0; i < count; ++i) matrices[i] = {(const T*)w[i], strides[i], n[i]};
    products<1>(x, matrices, count, threads,
                [&](int i, int64_t row, int64_t rows, int64_t first, int64_t features, Tiles tile) {
                    T* to = (T*)out[i] + row * n[i] + first;
                    const float* b = bias ? bias[i] : nullptr;
                    store_tile(to, n[i], rows, features, [&](int64_t m, int64_t j, int some) {
                        vf y = load(tile[0] + m * BLOCK + j);
                        return b ? y + load_some(b + first + j, some) : y;
                    });
                });
}

template <class T>
void linear(const Rows<T>& x, const Matrix<T>& w, const T* residual, int64_t residual_stride, T* out, int threads) {
    products<1>(x, &w, 1, threads,
                [&](int, int64_t row, int64_t rows, int64_t first, int64_t features, Tiles tile) {
                    store_tile(out + row * w.n + first, w.n, rows, features, [&](int64_t m, int64_t j, int some) {
                        vf y = load(tile[0] + m * BLOCK + j);
                        return residual ? y + load_some(residual + (row + m) * residual_stride + first + j, some) : y;
                    });
                });
}

template <class T>
void swiglu(const Rows<T>& x, const Matrix<T>& gate, const Matrix<T>& up, T* out, int threads) {
    const Matrix<T> pair[2] = {gate, up};
    products<2>(x, pair, 2, threads,
                [&](int, int64_t row, int64_t rows, int64_t first, int64_t features, Tiles tile) {
                    store_tile(out + row * gate.n + first, gate.n, rows, features, [&](int64_t m, int64_t j, int some) {
                        // Lanes past the tail are uninitialised; their results are never stored.
                        vf g = load_some(tile[0] + m * BLOCK + j, some), u = load_some(tile[1] + m * BLOCK + j, some);
                        return silu(g) * u;
                    });
                });
}

template <class T> void head(const Rows<T>& x, const Matrix<T>& w, float* out, int threads) {
    products<1>(x, &w, 1, threads,
                [&](int, int64_t row, int64_t rows, int64_t first, int64_t features, Tiles tile) {
                    store_tile(out + row * w.n + first, w.n, rows, features,
                               [&](int64_t m, int64_t j, int) { return load(tile[0] + m * BLOCK + j); });
                });
}

// Sums all data, eight vectors at a time, to measure the memory bandwidth (for benchmarks).
double stream(const char* data, int64_t bytes, int threads) {
    const int64_t size = 1 << 20;
    std::atomic<int64_t> total{0};
    for_blocks(threads, bytes / size, [&](int64_t block) {
        const char* p = data + block * size;
        vu sum[8] = {};
        for (int64_t at = 0; at < size; at += 8 * (int64_t)sizeof(vu))
            for (int i = 0; i < 8; ++i) sum[i] += load_as<vu>(p + at + i * sizeof(vu));
        uint32_t lanes = 0;
        for (int i = 0; i < 8; ++i)
            for (int j = 0; j < W; ++j) lanes += sum[i][j];
        total += lanes;
    });
    return (double)total.load();
}

}  // namespace specdec

using namespace specdec;

#define DENSE(NAME, T)                                                                                                 \
    EXPORT void project_##NAME(const void* x, int64_t x_stride, int64_t rows, int64_t k, int64_t count,                \
                                   const void* const* w, const int64_t* w_strides, const int64_t* n,                   \
                                   const float* const* bias, void* const* out, int64_t threads) {                      \
        project<T>({(const T*)x, x_stride, rows, k}, (int)count, w, w_strides, n, bias, out, (int)threads);            \
    }                                                                                                                  \
    EXPORT void linear_##NAME(const void* x, int64_t x_stride, int64_t rows, int64_t k, const void* w,                 \
                                  int64_t w_stride, int64_t n, const void* residual, int64_t residual_stride,          \
                                  void* out, int64_t threads) {                                                        \
        linear<T>({(const T*)x, x_stride, rows, k}, {(const T*)w, w_stride, n}, (const T*)residual, residual_stride,   \
                  (T*)out, (int)threads);                                                                              \
    }                                                                                                                  \
    EXPORT void swiglu_##NAME(const void* x, int64_t x_stride, int64_t rows, int64_t k, const void* gate,              \
                                  int64_t gate_stride, const void* up, int64_t up_stride, int64_t n, void* out,        \
                                  int64_t threads) {                                                                   \
        swiglu<T>({(const T*)x, x_stride, rows, k}, {(const T*)gate, gate_stride, n}, {(const T*)up, up_stride, n},    \
                  (T*)out, (int)threads);                                                                              \
    }                                                                                                                  \
    EXPORT void head_##NAME(const void* x, int64_t x_stride, int64_t rows, int64_t k, const void* w,                   \
                                int64_t w_stride, int64_t n, void* out, int64_t threads) {                             \
        head<T>({(const T*)x, x_stride, rows, k}, {(const T*)w, w_stride, n}, (float*)out, (int)threads);              \
    }

DENSE(bf16, bf16)
DENSE(f32, float)

EXPORT double stream_read(const void* data, int64_t bytes, int64_t threads) {
    return stream((const char*)data, bytes, (int)threads);
}
