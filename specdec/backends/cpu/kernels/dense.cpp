// Matrix products: project, linear, swiglu, geglu and head of specdec.backends.ops. Reference: ReferenceOps, same names.
//
// Bits contract: an output is one inner product of `dots.h` or `panels.h` followed by its own epilogue; row t of any
// result is the same for every number of rows and threads.
//
// Weights are row-major [N, K] (`dots.h`), packed in panels (`panels.h`) or quantised (`packed.h`). Each sums in an order
// of its own, so a weight never changes its layout. A block of BLOCK output features is multiplied with all activation rows, CHUNK rows
// at a time, before the next block, so that each weight is read from memory once.

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "dots.h"
#include "packed.h"
#include "panels.h"
#include "team.h"
#include "tiles.h"

namespace specdec {

constexpr int64_t CHUNK = 96;
constexpr int64_t BLOCK = 64;
constexpr int MAX_WEIGHTS = 16;
constexpr int SUMS = 9;  // a slot of scratch memory

template <class T> struct Matrix {
    const T* data;
    int64_t stride;  // elements between output features; -K: packed in panels; 0: quantised, data is a Packed
    int64_t n;

    bool packed() const { return stride <= 0; }
    const Packed* codes() const { return stride ? nullptr : reinterpret_cast<const Packed*>(data); }
    bool takes_whole_numbers() const {
        return std::is_same_v<T, bf16> && codes() && codes()->takes_whole_numbers();
    }
    bool takes_integers() const { return takes_whole_numbers() || (codes() && codes()->takes_int8()); }
    int64_t bytes(int64_t k) const { return codes() ? n / FEATURES * codes()->panel_bytes() : n * k * sizeof(T); }
    // In a packed matrix, `feature` must be the first of a panel of FEATURES times K elements.
    const T* from(int64_t feature) const { return data + feature * (packed() ? -stride : stride); }
};

template <class T> struct Rows {
    const T* data;
    int64_t stride;
    int64_t count;
    int64_t k;
};

// Prefetch distance in packed weights, in bytes: 4 KiB saturate one core's share of the bandwidth.
constexpr int64_t PANEL_AHEAD = 4096;

// Weights up to CACHED_BYTES are probably still in a cache.
constexpr int64_t CACHED_BYTES = 1 << 20;

// Words of K that several tiles of rows, or sweeps over the features of a panel, read before the next words. Their
// weights stay in L2; in L1 where a word takes more than one sweep.
constexpr int64_t PART_WORDS = MAX_VECTORS == 2 ? 512 : 128;

// Activations as the products of panels read them: x itself, or x in float32.
template <class T> struct PanelRows {
    typedef typename Panel<T>::Input Input;
    const Input* data = nullptr;
    int64_t stride = 0;

    PanelRows() = default;
    PanelRows(const Rows<T>& x, int threads) {
        if constexpr (std::is_same_v<T, Input>) {
            data = x.data;
            stride = x.stride;
        } else {
            stride = (x.k + W - 1) / W * W;
            float* wide = scratch<6>(x.count * stride);
            data = wide;
            if (x.count * x.k * (int64_t)sizeof(float) < SERIAL_WORK) threads = 1;
            for_blocks(threads, x.count, [&](int64_t row) {
                const T* from = x.data + row * x.stride;
                fill(wide + row * stride, x.k, [&](int64_t i, int some) { return load_some(from + i, some); });
            });
        }
    }
};

// out[m * BLOCK + f] = w_f . x_m for `n` features, `w` being their first panel.
template <class T>
void panel_products(const PanelRows<T>& x, int64_t first_row, int64_t rows, int64_t k, const T* w, int64_t n,
                    bool cached, float* out) {
    typedef Panel<T> P;
    const int64_t words = k / P::PER_WORD, panel_bytes = FEATURES * words * WORD;
    const char* panel = reinterpret_cast<const char*>(w);
    const auto* from = x.data + first_row * x.stride;
#ifdef SPECDEC_TILES
    if constexpr (std::is_same_v<T, bf16>)
        if (words >= LEAST_WORDS)
            return products_by_tiles(panel, words, n, from, x.stride, rows, out, BLOCK, first_row ? 0 : PANEL_AHEAD);
#endif
    const auto tiles = [&](auto run) {  // run(first row, rows) for every tile of rows
        for (int64_t m = 0; m < rows;) {
            const int64_t tile = panel_rows(rows - m);
            run(m, tile);
            m += tile;
        }
    };
    // All of K at once if that reads the weights once; else in parts, each of which prefetches the next one.
    int64_t sweeps = 0;
    tiles([&](int64_t, int64_t tile) { sweeps += MAX_VECTORS / panel_vectors((int)tile); });
    const int64_t step = sweeps == 1 ? words : PART_WORDS;
    const int64_t ahead = sweeps == 1 ? PANEL_AHEAD : PART_WORDS * FEATURES * WORD;
    const int64_t fetched = (FEATURES * WORD + sweeps - 1) / sweeps;  // bytes for a word in one sweep
    for (int64_t f = 0; f < n;) {
        const int64_t panels = cached && rows <= PAIRED_ROWS && f + FEATURES < n ? 2 : 1;
        for (int64_t begin = 0; begin < words; begin += step) {
            const int64_t count = std::min(step, words - begin);
            const char* at = panel + f / FEATURES * panel_bytes + begin * FEATURES * WORD;
            Later later = {at + ahead, fetched};
            tiles([&](int64_t m, int64_t tile) {
                const auto run = first_row == 0 ? panel_tile_of<T, true>(tile, panels)
                                                : panel_tile_of<T, false>(tile, panels);
                run(at, panel_bytes, {count, begin == 0}, from + m * x.stride + begin * P::PER_WORD, x.stride,
                    out + m * BLOCK + f, BLOCK, later);
                later.from += count * fetched * (MAX_VECTORS / panel_vectors((int)tile));
            });
        }
        f += panels * FEATURES;
    }
}

// Computes a tile of `rows` x `n` products of one matrix, features `w..w + n`, into `out [CHUNK, BLOCK]`.
template <class T>
void tile_products(const Rows<T>& x, const PanelRows<T>& inputs, int64_t first_row, int64_t rows, const T* w,
                   int64_t stride, int64_t n, bool cached, float* out) {
    if (stride < 0) return panel_products(inputs, first_row, rows, x.k, w, n, cached, out);
    const T* from = x.data + first_row * x.stride;
    for (int64_t m = 0; m < rows;) {
        const int64_t tile = tile_rows(rows - m), held = weight_rows(tile);
        // Prefetch 4 to 8 rows ahead: with fewer the data arrives too late, with more it is evicted from L1 again.
        const int64_t ahead = (held < 4 ? 2 * held : held) * stride * (int64_t)sizeof(T);
        dots_tile_of<T>(tile)(w, stride, n, from + m * x.stride, x.stride, x.k, out + m * BLOCK, BLOCK,
                              {m == 0 ? ahead : 0, stride == x.k});
        m += tile;
    }
}

using Tiles = const float (*)[CHUNK * BLOCK];

// The activations of one call as products with each of its quantised matrices read them: the numbers of `inputs` with
// their sums over groups, whole numbers, or int8. Matrices that read the same share them. They are valid until the calling
// thread's next call.
template <class T> struct CodeRows {
    Activations<typename Panel<T>::Input> numbers[MAX_WEIGHTS];
    Activations<int16_t> whole[MAX_WEIGHTS];  // without x: not for this matrix
    Activations<int8_t> bytes[MAX_WEIGHTS];   // likewise

    CodeRows(const Rows<T>& x, const PanelRows<T>& inputs, const Matrix<T>* w, int count, int threads) {
        struct Read {  // what a matrix reads, beside `inputs`
            enum { NOTHING, SUMS_OF_NUMBERS, WHOLE, BYTES } type;
            int64_t group;
            Form form;
            bool operator==(const Read&) const = default;
        } reads[MAX_WEIGHTS];
        int64_t floats[MAX_WEIGHTS], total = 0;
        const int64_t whole_stride = (x.k + 1) / 2;  // in floats, as bytes_stride
        const int64_t bytes_stride = (x.k + QUANTUM - 1) / QUANTUM * QUANTUM / 4;
        for (int i = 0; i < count; ++i) {
            const Packed* codes = w[i].codes();
            reads[i] = {Read::NOTHING, 0, {}};
            floats[i] = 0;
            if (codes && codes->takes_int8()) {
                reads[i] = {Read::BYTES, 0, form_of(*codes)};
                floats[i] = x.count * (3 * cells(x.k, reads[i].form) + bytes_stride);
            } else if (w[i].takes_whole_numbers()) {
                reads[i] = {Read::WHOLE, codes->group, {}};
                floats[i] = x.count * (2 * codes->groups() + whole_stride);
            } else if (codes && codes->needs_sums()) {
                reads[i] = {Read::SUMS_OF_NUMBERS, codes->group, {}};
                floats[i] = x.count * codes->groups();
            }
            total += floats[i];
        }
        float* to = total ? scratch<SUMS>(total) : nullptr;
        if (x.count * x.k * (int64_t)sizeof(float) < SERIAL_WORK) threads = 1;
        for (int i = 0; i < count; ++i) {
            if (!w[i].codes()) continue;
            const Packed& codes = *w[i].codes();
            const int same = (int)(std::find(reads, reads + i, reads[i]) - reads);
            numbers[i] = {inputs.data, inputs.stride, numbers[same].sums, nullptr, codes.groups()};
            if (same < i) {
                whole[i] = whole[same];
                bytes[i] = bytes[same];
                continue;
            }
            if (reads[i].type == Read::BYTES) {
                const Form& form = reads[i].form;
                const int64_t row_cells = cells(x.k, form);
                float *units = to, *sums = units + x.count * row_cells;
                int32_t* starts = reinterpret_cast<int32_t*>(sums + x.count * row_cells);
                int8_t* integers = reinterpret_cast<int8_t*>(starts + x.count * row_cells);
                for_blocks(threads, x.count, [&](int64_t row) {
                    quantise_row(x.data + row * x.stride, x.k, form, integers + row * 4 * bytes_stride,
                                 units + row * row_cells, starts + row * row_cells, sums + row * row_cells);
                });
                bytes[i] = {integers, 4 * bytes_stride, sums, units, row_cells, starts};
            } else if (reads[i].type == Read::WHOLE) {
                const int64_t groups = codes.groups();
                int16_t* integers = reinterpret_cast<int16_t*>(to + 2 * x.count * groups);
                if constexpr (WHOLE_NUMBERS && std::is_same_v<T, bf16>)
                    for_blocks(threads, x.count, [&](int64_t row) {
                        whole_numbers(x.data + row * x.stride, x.k, codes.group, integers + row * 2 * whole_stride,
                                      to + row * groups, to + (x.count + row) * groups);
                    });
                whole[i] = {integers, 2 * whole_stride, to + x.count * groups, to, groups};
            } else if (reads[i].type == Read::SUMS_OF_NUMBERS) {
                group_sums(x.data, x.stride, x.count, x.k, codes.group, to);
                numbers[i].sums = to;
            }
            to += floats[i];
        }
    }

    static int64_t cells(int64_t k, const Form& form) { return (k + form.cell - 1) / form.cell; }

    // The products of a quantised matrix.
    void products(int i, const Packed& w, int64_t row, int64_t rows, int64_t first, int64_t n, float* out) const {
        if (bytes[i].x) return packed_products(w, bytes[i].from(row, 0, 0), rows, first, n, out, BLOCK);
        if constexpr (WHOLE_NUMBERS)
            if (whole[i].x) return packed_products(w, whole[i].from(row, 0, 0), rows, first, n, out, BLOCK);
        packed_products(w, numbers[i].from(row, 0, 0), rows, first, n, out, BLOCK);
    }
};

// Calls finish(matrix, first_row, rows, first_feature, features, tiles) for every tile of products. PAIR = 2 passes the
// tiles of two matrices of one shape together.
template <int PAIR, class T, class Finish>
void products(const Rows<T>& x, const Matrix<T>* w, int count, int threads, Finish&& finish) {
    int64_t features = 0, bytes = 0;
    for (int i = 0; i < count; ++i) {
        if (i % PAIR == 0) features += w[i].n;
        bytes += w[i].bytes(x.k);
    }
    const int64_t work = std::max<int64_t>(bytes, features * PAIR * x.k * x.count / 4);
    if (work < SERIAL_WORK) threads = 1;
    const bool cached = bytes <= CACHED_BYTES;
    const bool packed = std::any_of(w, w + count, [](const Matrix<T>& matrix) { return matrix.packed(); });
    const bool whole = std::all_of(w, w + count, [](const Matrix<T>& matrix) { return matrix.takes_integers(); });
    const PanelRows<T> inputs = packed && !whole ? PanelRows<T>(x, threads) : PanelRows<T>();
    const CodeRows<T> rows_of(x, inputs, w, count, threads);
    int64_t size = BLOCK;
    const int64_t least = packed ? FEATURES : 8;
    while (size > least && features < 4 * size * threads) size /= 2;
    int64_t blocks = 0;
    for (int i = 0; i < count; i += PAIR) blocks += (w[i].n + size - 1) / size;
    const auto compute = [&](int64_t block) {
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
            for (int j = 0; j < PAIR; ++j) {
                const Matrix<T>& matrix = w[i + j];
                if (matrix.codes())
                    rows_of.products(i + j, *matrix.codes(), row, rows, first, n, tile[j]);
                else
                    tile_products(x, inputs, row, rows, matrix.from(first), matrix.stride, n, cached, tile[j]);
            }
            finish(i, row, rows, first, n, tile);
        }
    };
    for_shares(threads, blocks, [&](Share& share) {
#ifdef SPECDEC_TILES
        const KeptTiles until_the_end;
#endif
        for (int64_t block; (block = share.take()) >= 0;) compute(block);
    });
}

// Stores value(row, feature-vector) over a tile, whole vectors first and the tail padded.
template <class Out, class Value>
INLINE void store_tile(Out* out, int64_t out_stride, int64_t rows, int64_t n, Value&& value) {
    for (int64_t m = 0; m < rows; ++m)
        fill(out + m * out_stride, n, [&](int64_t j, int some) { return value(m, j, some); });
}

template <class T>
void project(const Rows<T>& x, int count, const void* const* w, const int64_t* strides, const int64_t* n,
             const float* const* bias, void* const* out, int threads) {
    Matrix<T> matrices[MAX_WEIGHTS];
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

template <class T, class Out>
void linear(const Rows<T>& x, const Matrix<T>& w, const T* residual, int64_t residual_stride, Out* out, int threads) {
    products<1>(x, &w, 1, threads,
                [&](int, int64_t row, int64_t rows, int64_t first, int64_t features, Tiles tile) {
                    store_tile(out + row * w.n + first, w.n, rows, features, [&](int64_t m, int64_t j, int some) {
                        vf y = load(tile[0] + m * BLOCK + j);
                        return residual ? y + load_some(residual + (row + m) * residual_stride + first + j, some) : y;
                    });
                });
}

// activation(x @ gate.T) * (x @ up.T)
template <class T, vf (*ACTIVATION)(vf)>
void gated(const Rows<T>& x, const Matrix<T>& gate, const Matrix<T>& up, T* out, int threads) {
    const Matrix<T> pair[2] = {gate, up};
    products<2>(x, pair, 2, threads,
                [&](int, int64_t row, int64_t rows, int64_t first, int64_t features, Tiles tile) {
                    store_tile(out + row * gate.n + first, gate.n, rows, features, [&](int64_t m, int64_t j, int some) {
                        // Lanes past the tail are uninitialised; their results are never stored.
                        vf g = load_some(tile[0] + m * BLOCK + j, some), u = load_some(tile[1] + m * BLOCK + j, some);
                        return ACTIVATION(g) * u;
                    });
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
    EXPORT void gated_##NAME(const void* x, int64_t x_stride, int64_t rows, int64_t k, const void* gate,               \
                                  int64_t gate_stride, const void* up, int64_t up_stride, int64_t n, int64_t of_gelu,  \
                                  void* out, int64_t threads) {                                                        \
        auto run = of_gelu ? gated<T, gelu> : gated<T, silu>;                                                          \
        run({(const T*)x, x_stride, rows, k}, {(const T*)gate, gate_stride, n}, {(const T*)up, up_stride, n},          \
            (T*)out, (int)threads);                                                                                    \
    }                                                                                                                  \
    EXPORT void head_##NAME(const void* x, int64_t x_stride, int64_t rows, int64_t k, const void* w,                   \
                                int64_t w_stride, int64_t n, void* out, int64_t threads) {                             \
        linear<T>({(const T*)x, x_stride, rows, k}, {(const T*)w, w_stride, n}, nullptr, 0, (float*)out, (int)threads);\
    }

DENSE(bf16, bf16)
DENSE(f32, float)

EXPORT double stream_read(const void* data, int64_t bytes, int64_t threads) {
    return stream((const char*)data, bytes, (int)threads);
}
