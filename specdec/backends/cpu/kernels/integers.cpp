// Products of quantised weights with activations in int8 (`packed.h`). Reference: ReferenceOps with int8 activations.
//
// Activations: the unit of QUANTUM consecutive columns of a row is their largest magnitude over 127, and a column is the
// nearest multiple of it, ties to even. Weights: (number - zero) * scale + offset, as in `packed.h`.
//
// Bits contract: products of numbers are summed over a cell, the columns of one group of weights and one quantum of
// activations. These sums are exact, so neither the instruction nor the order matters. A cell's sum times the activations'
// unit is then multiplied by the weights' scale and added to the output, after the product of the offset; cells in ascending
// order. None of this depends on other rows. Instruction sets with fused multiply-add give the same bits.

#include <algorithm>
#include <numeric>

#include "packed.h"

namespace specdec {

constexpr int32_t LARGEST_X = 127;

// --- four products of bytes per lane --------------------------------------------------------------------------------
//
// Dot<BITS> sums the products of numbers of weights, below 2^BITS, with activations. BASE is subtracted from the numbers.
// A lane is an output feature, and its four bytes are four columns.

INLINE vi four(const int8_t* x) { return vi{} + load_as<int32_t>(x); }

#if defined(SPECDEC_AVX512) && defined(__AVX512VNNI__)
#define SPECDEC_DOT(SUM, W, X) (vi)_mm512_dpbusd_epi32((__m512i)(SUM), (__m512i)(W), (__m512i)(X))
#elif defined(X86) && !defined(SPECDEC_AVX512) && defined(__AVXVNNI__)
#define SPECDEC_DOT(SUM, W, X) (vi)_mm256_dpbusd_avx_epi32((__m256i)(SUM), (__m256i)(W), (__m256i)(X))
#elif defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8)
#define SPECDEC_DOT(SUM, W, X) (vi)vusdotq_s32((int32x4_t)(SUM), (uint8x16_t)(W), (int8x16_t)(X))
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#define SPECDEC_DOT(SUM, W, X) (vi)vdotq_s32((int32x4_t)(SUM), (int8x16_t)(W), (int8x16_t)(X))
#define SPECDEC_SIGNED_DOT 1
#elif defined(X86)
#define SPECDEC_PAIRS 1
#else
INLINE vi dot_of_lanes(vi sum, vu w, vi x) {
    for (int i = 0; i < 4; ++i) sum += (vi)(w >> 8 * i & 0xff) * (x << (24 - 8 * i) >> 24);
    return sum;
}
#define SPECDEC_DOT(SUM, W, X) dot_of_lanes(SUM, W, X)
#endif

#ifdef SPECDEC_PAIRS
INLINE Lanes pairs_of_bytes(Lanes w, Lanes x) { return X86(maddubs_epi16)(w, x); }
INLINE Lanes pairs_of_words(Lanes a, Lanes b) { return X86(madd_epi16)(a, b); }
INLINE Lanes sum_of_words(Lanes a, Lanes b) { return X86(add_epi16)(a, b); }
INLINE Lanes magnitude(Lanes a) { return X86(abs_epi8)(a); }
INLINE Lanes with_sign(Lanes x, Lanes of) {
#ifdef SPECDEC_AVX512
    return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(of), _mm512_setzero_si512(), x);
#else
    return _mm256_sign_epi8(x, of);
#endif
}
INLINE Lanes ones() { return (Lanes)(vu{} + 0x00010001u); }

template <int BITS> struct Dot;
template <> struct Dot<4> {  // in 16 bits: half of a quantum's products, two of them in each instruction
    static_assert(QUANTUM / 2 * 15 * LARGEST_X <= INT16_MAX);
    static constexpr int32_t BASE = 0;
    typedef vu Weights;
    static INLINE Weights weights(vu numbers) { return numbers; }
    static INLINE vi begin(const int32_t*) { return vi{}; }
    static INLINE vi add(vi sum, Weights w, vi x) {
        return in_register((vi)sum_of_words((Lanes)sum, pairs_of_bytes((Lanes)w, (Lanes)x)));
    }
    static INLINE vi end(vi sum, const int32_t* start) { return (vi)pairs_of_words((Lanes)sum, ones()) + *start; }
};
template <> struct Dot<6> {  // pairs fit into 16 bits
    static_assert(2 * 63 * LARGEST_X <= INT16_MAX);
    static constexpr int32_t BASE = 0;
    typedef vu Weights;
    static INLINE Weights weights(vu numbers) { return in_register(numbers); }
    static INLINE vi begin(const int32_t* start) { return vi{} + *start; }
    static INLINE vi add(vi sum, Weights w, vi x) {
        return in_register(sum + (vi)pairs_of_words(pairs_of_bytes((Lanes)w, (Lanes)x), ones()));
    }
    static INLINE vi end(vi sum, const int32_t*) { return sum; }
};
template <> struct Dot<8> {  // magnitudes times activations with the weights' signs: pairs fit into 16 bits
    static_assert(2 * 128 * LARGEST_X <= INT16_MAX);
    static constexpr int32_t BASE = 128;
    struct Weights {
        Lanes numbers, size;
    };
    static INLINE Weights weights(vu numbers) {
        const Lanes own = (Lanes)in_register(numbers ^ 0x80808080u);
        return {own, (Lanes)in_register((vu)magnitude(own))};
    }
    static INLINE vi begin(const int32_t* start) { return vi{} + *start; }
    static INLINE vi add(vi sum, Weights w, vi x) {
        const Lanes pairs = pairs_of_bytes(w.size, with_sign((Lanes)x, w.numbers));
        return in_register(sum + (vi)pairs_of_words(pairs, ones()));
    }
    static INLINE vi end(vi sum, const int32_t*) { return sum; }
};
#else
#ifdef SPECDEC_SIGNED_DOT
constexpr bool SIGNED_DOT = true;
#else
constexpr bool SIGNED_DOT = false;
#endif
template <int BITS> struct Dot {
    static constexpr int32_t BASE = SIGNED_DOT && BITS == 8 ? 128 : 0;
    typedef vu Weights;
    static INLINE Weights weights(vu numbers) { return in_register(BASE ? numbers ^ 0x80808080u : numbers); }
    static INLINE vi begin(const int32_t* start) { return vi{} + *start; }
    static INLINE vi add(vi sum, Weights w, vi x) { return SPECDEC_DOT(sum, w, x); }
    static INLINE vi end(vi sum, const int32_t*) { return sum; }
};
#endif

// --- activations ----------------------------------------------------------------------------------------------------

Form form_of(const Packed& w) {
    const int bits = w.numbers.linear ? w.bits() : 8;
    const int32_t base = bits == 8 ? Dot<8>::BASE : bits == 4 ? Dot<4>::BASE : Dot<6>::BASE;
    return {std::gcd(w.group, QUANTUM), w.has_low_bits(), w.half_zero() - base};
}

INLINE int32_t sum_of(uint64_t columns) {
    columns ^= 0x8080808080808080;  // plus 128 each
    const uint64_t pairs = (columns & 0x00ff00ff00ff00ff) + (columns >> 8 & 0x00ff00ff00ff00ff);
    return (int32_t)(pairs * 0x0001000100010001 >> 48) - 8 * 128;
}

template <class T>
void quantise_row(const T* x, int64_t k, const Form& form, int8_t* out, float* units, int32_t* starts, float* sums) {
    constexpr int VECTORS = (int)QUANTUM / W;
    for (int64_t at = 0; at < k; at += QUANTUM) {
        const int64_t n = std::min(QUANTUM, k - at);
        vf values[VECTORS];
        vi largest = {};
        for (int i = 0; i < VECTORS; ++i) {
            const int64_t left = n - i * W;
            values[i] = left > 0 ? load_some(x + at + i * W, (int)std::min<int64_t>(W, left)) : vf{};
            const vi size = (vi)values[i] & 0x7fffffff;
            largest = size > largest ? size : largest;
        }
        int32_t top = 0;
        for (int i = 0; i < W; ++i) top = std::max(top, largest[i]);
        const bool finite = top < 0x7f800000;
        const float magnitude = std::max(load_as<float>(&top), 0x1p-119f);  // so that the inverse is finite
        const float unit = magnitude / LARGEST_X, inverse = LARGEST_X / magnitude;
        int32_t numbers[QUANTUM], of_eight[QUANTUM / 8];
        for (int i = 0; i < VECTORS; ++i) {
            const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
            const vi rounded = finite ? (vi)(values[i] * inverse + magic) - (vi)magic : vi{};
            std::memcpy(numbers + i * W, &rounded, sizeof rounded);
        }
        int8_t columns[QUANTUM];
        uint64_t words[QUANTUM / 8];
        for (int i = 0; i < QUANTUM; ++i) columns[i] = (int8_t)numbers[i];
        for (int i = 0; i < QUANTUM / 8; ++i) {
            const auto eight = load_as<uint64_t>(columns + 8 * i);
            words[i] = in_words(eight, form.low_bits);
            of_eight[i] = sum_of(eight);
        }
        std::memcpy(out + at, words, sizeof words);
        for (int64_t i = 0; i < n; i += form.cell) {
            const int32_t sum = std::accumulate(of_eight + i / 8, of_eight + (i + form.cell) / 8, 0);
            *units++ = unit;
            *starts++ = -form.zero * sum;
            *sums++ = (float)sum * unit;
        }
    }
}
template void quantise_row(const bf16*, int64_t, const Form&, int8_t*, float*, int32_t*, float*);
template void quantise_row(const float*, int64_t, const Form&, int8_t*, float*, int32_t*, float*);

// --- products -------------------------------------------------------------------------------------------------------

constexpr int INTEGER_ROWS = REGISTERS / 4;  // of the largest tile
constexpr int64_t INTEGER_COLUMNS = 1024;  // read by all tiles of rows before the next ones: their weights stay in L1

// Vectors of features summed at once with M rows, so that their sums take half of the registers.
constexpr int integer_vectors(int M) {
    int vectors = MAX_VECTORS;
    while (vectors > 1 && M * vectors > REGISTERS / 2) vectors /= 2;
    return vectors;
}

// Adds the products of the groups from `begin` to `end` of a panel to out[m * out_stride + f], f < FEATURES, for M rows.
// `from_memory`: prefetch later codes.
template <class C, bool OFFSET, int M>
__attribute__((noinline)) void integer_tile(const Packed& w, const C& codes, const char* panel, int64_t begin, int64_t end,
                                            const Activations<int8_t>& activations, float* out, int64_t out_stride,
                                            bool from_memory) {
    constexpr int V = integer_vectors(M);
    typedef Dot<C::BITS> D;
    const C own = codes;
    const Activations<int8_t> x = activations;
    const Layout layout(w);
    const int64_t group = w.group, cell = std::gcd(group, QUANTUM), cells = group / cell;
    const float unit = 2 * w.numbers.unit, centre = w.rest();
    const bool has_inner = w.offsets == INNER || centre != 0;
    for (int64_t first = 0; first < FEATURES; first += V * W) {
        vf total[M * V];
#pragma GCC unroll 64
        for (int i = 0; i < M * V; ++i) total[i] = load(out + i / V * out_stride + first + i % V * W);
        for (int64_t g = begin; g < end; ++g) {
            const Group parts = layout.at(panel, g);
            if (from_memory) layout.prefetch_head(parts);
            vf scale[V], outer[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) {
                const vf given = load_side<0>(layout, parts, first + v * W);
                scale[v] = given * splat(w.factor * unit);  // `unit` is a power of two
                if constexpr (!OFFSET) continue;
                vf inner = splat(centre);
                outer[v] = vf{};
                if (w.offsets) (w.offsets == INNER ? inner : outer[v]) += load_side<1>(layout, parts, first + v * W);
                if (has_inner) outer[v] = fma(given * splat(w.factor), inner, outer[v]);
            }
            const char* p = parts.codes + first * WORD;
            const int8_t* from = x.x + g * group;
            const int64_t columns = std::min(group, w.k - g * group);
            int64_t at = g * cells;
            for (int64_t k = 0; k < columns; k += cell, ++at) {
                vi sum[M * V];
#pragma GCC unroll 64
                for (int i = 0; i < M * V; ++i) sum[i] = D::begin(x.starts + i / V * x.groups + at);
                const auto step = [&]() __attribute__((always_inline)) {
                    if (from_memory)
#pragma GCC unroll 8
                        for (int64_t word = 0; word < C::STEP; word += FEATURES * WORD)
                            prefetch_later<V * W * WORD>(p + word);
#pragma GCC unroll 8
                    for (int quad = 0; quad < C::QUADS; ++quad, from += 4) {
                        typename D::Weights weights[V];
#pragma GCC unroll 8
                        for (int v = 0; v < V; ++v) weights[v] = D::weights(own.open(p + v * W * WORD, quad));
#pragma GCC unroll 8
                        for (int m = 0; m < M; ++m) {
                            const vi four_of_row = four(from + m * x.stride);
#pragma GCC unroll 8
                            for (int v = 0; v < V; ++v) sum[m * V + v] = D::add(sum[m * V + v], weights[v], four_of_row);
                        }
                    }
                    p += C::STEP;
                };
                const int64_t width = std::min(cell, columns - k);
                if (width == QUANTUM)
                    for (int i = 0; i < QUANTUM / (4 * C::QUADS); ++i) step();
                else
                    for (int64_t i = 0; i < width; i += 4 * C::QUADS) step();
#pragma GCC unroll 8
                for (int m = 0; m < M; ++m) {
                    const int64_t side_at = m * x.groups + at;
                    const vf units = splat(x.units[side_at]);
#pragma GCC unroll 8
                    for (int v = 0; v < V; ++v) {
                        vf& own_total = total[m * V + v];
                        if constexpr (OFFSET) own_total = fma(outer[v], splat(x.sums[side_at]), own_total);
                        const vi whole = D::end(sum[m * V + v], x.starts + side_at);
                        own_total = fma(scale[v], __builtin_convertvector(whole, vf) * units, own_total);
                    }
                }
            }
        }
#pragma GCC unroll 64
        for (int i = 0; i < M * V; ++i) store(total[i], out + i / V * out_stride + first + i % V * W);
    }
}

template <class C>
using IntegerTile = void (*)(const Packed&, const C&, const char*, int64_t, int64_t, const Activations<int8_t>&, float*,
                             int64_t, bool);

template <class C, size_t... I>
INLINE IntegerTile<C> integer_tile_of(int64_t rows, bool offset, std::index_sequence<I...>) {
    static constexpr IntegerTile<C> TILES[][sizeof...(I)] = {{integer_tile<C, false, (int)I + 1>...},
                                                             {integer_tile<C, true, (int)I + 1>...}};
    return TILES[offset][rows - 1];
}

template <class C>
void integer_panel(const Packed& w, const C& codes, const char* panel, const Activations<int8_t>& x, int64_t rows,
                   float* out, int64_t out_stride) {
    for (int64_t m = 0; m < rows; ++m) std::fill_n(out + m * out_stride, FEATURES, 0.0f);
    const bool once = rows <= INTEGER_ROWS && integer_vectors((int)rows) == MAX_VECTORS;  // each weight is read once
    const int64_t groups = w.groups(), at_once = once ? groups : INTEGER_COLUMNS / w.group;
    for (int64_t g = 0; g < groups; g += at_once)
        for (int64_t m = 0; m < rows;) {
            const int64_t left = rows - m;
            const int64_t tile = left <= INTEGER_ROWS ? left : left >= 2 * INTEGER_ROWS ? INTEGER_ROWS : (left + 1) / 2;
            integer_tile_of<C>(tile, w.needs_sums(), std::make_index_sequence<INTEGER_ROWS>{})(
                w, codes, panel, g, std::min(g + at_once, groups), x.from(m, 0, 0), out + m * out_stride, out_stride,
                m == 0);
            m += tile;
        }
}

template <>
void packed_products(const Packed& w, const Activations<int8_t>& x, int64_t rows, int64_t first, int64_t n, float* out,
                     int64_t out_stride) {
    with_codes(w, [&]<class C>(const C& codes) {
        for (int64_t f = 0; f < n; f += FEATURES)
            integer_panel(w, codes, w.panel(first + f), x, rows, out + f, out_stride);
    });
}

}  // namespace specdec
