// Quantised weights: repacking (`packed.h`), products, single rows. Reference: StoredMatrix.decode and ReferenceOps.

#include "packed.h"

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "team.h"

namespace specdec {

// --- two columns of a vector of features -------------------------------------------------------------------------------

#ifdef SPECDEC_DPBF16
typedef vu Two;  // a word holds the even column (low half) and the odd one, as bfloat16
INLINE Two two(vu pair) { return pair; }
INLINE Two two(vf even, vf odd) { return ((vu)even >> 16) | ((vu)odd & 0xffff0000u); }
INLINE vu paired(Two a) { return a; }
INLINE vf even_of(Two a) { return (vf)(a << 16); }
INLINE vf odd_of(Two a) { return (vf)(a & 0xffff0000u); }
#else
struct Two {
    vf even, odd;
};
INLINE Two two(vu pair) { return {(vf)(pair << 16), (vf)(pair & 0xffff0000u)}; }
INLINE Two two(vf even, vf odd) { return {even, odd}; }
INLINE vu paired(Two a) { return ((vu)a.even >> 16) | ((vu)a.odd & 0xffff0000u); }
INLINE vf even_of(Two a) { return a.even; }
INLINE vf odd_of(Two a) { return a.odd; }
#endif

// Adds the products of two columns with those of one activation row at x.
INLINE vf add_two(Two w, const float* x, vf sum) {
    return fma(odd_of(w), splat(x[1]), fma(even_of(w), splat(x[0]), sum));
}
#ifdef SPECDEC_DPBF16
INLINE vf add_two(Two w, const bf16* x, vf sum) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(load_as<int32_t>(x)));
}
#endif

// --- codes -------------------------------------------------------------------------------------------------------------
//
// Each class opens STEP bytes of a panel, for W features: PAIRS times two columns, in the order of `pair`.

constexpr int64_t ONE_WORD = FEATURES * WORD;

struct InOrder {
    static constexpr int pair(int i) { return i; }
};

#ifdef SPECDEC_DPBF16
struct Nibbles : InOrder {
    static constexpr int PAIRS = 4;
    static constexpr int64_t STEP = ONE_WORD;
    __m512i table;
    explicit Nibbles(const Packed& w) {  // twice: a lookup takes five bits, of which the highest is the next code's
        std::memcpy(&table, w.values, 32);
        std::memcpy((char*)&table + 32, w.values, 32);
    }
    INLINE Two open(const char* p, int pair) const {
        const __m512i codes = _mm512_loadu_si512(p);
        return two((vu)_mm512_permutexvar_epi16(pair ? _mm512_srli_epi16(codes, 4 * pair) : codes, table));
    }
};

struct Magnitudes : InOrder {  // a sign bit and one of 128 magnitudes
    static constexpr int PAIRS = 2;
    static constexpr int64_t STEP = ONE_WORD;
    __m512i low[2], high[2];
    explicit Magnitudes(const Packed& w) {
        alignas(64) uint8_t octets[2][128];
        for (int i = 0; i < 128; ++i) {
            octets[0][i] = (uint8_t)w.values[i];
            octets[1][i] = (uint8_t)(w.values[i] >> 8);
        }
        for (int i = 0; i < 2; ++i) {
            low[i] = _mm512_load_si512(octets[0] + 64 * i);
            high[i] = _mm512_load_si512(octets[1] + 64 * i);
        }
    }
    INLINE Two open(const char* p, int pair) const {
        const __m512i codes = _mm512_loadu_si512(p);
        const __m512i l = _mm512_permutex2var_epi8(low[0], codes, low[1]);
        const __m512i bare = _mm512_permutex2var_epi8(high[0], codes, high[1]);
        const __m512i h = _mm512_ternarylogic_epi32(bare, codes, _mm512_set1_epi8((char)0x80), 0xf8);  // a | (b & c)
        if (!pair)
            return two((vu)_mm512_ternarylogic_epi32(_mm512_slli_epi16(h, 8), l, _mm512_set1_epi16(0xff), 0xf8));
        return two((vu)_mm512_ternarylogic_epi32(_mm512_srli_epi16(l, 8), h, _mm512_set1_epi16((short)0xff00), 0xf8));
    }
};

// Of five or six bits.
template <int BITS> struct Split : SplitWords<BITS>, InOrder {
    __m512i table[2];
    explicit Split(const Packed& w) { std::memcpy(table, w.values, sizeof table); }
    INLINE Two open(const char* p, int pair) const {  // a lookup takes as many bits as the table has
        const __m512i low = (__m512i)this->low_of_pair(p, pair), high = (__m512i)this->high_of_pair(p, pair);
        const __m512i at = _mm512_ternarylogic_epi32(_mm512_set1_epi16(0x0f), low, high, 0xca);  // a ? b : c
        if constexpr (BITS == 5) return two((vu)_mm512_permutexvar_epi16(at, table[0]));
        return two((vu)_mm512_permutex2var_epi16(table[0], at, table[1]));
    }
};
#else
struct Floats : InOrder {  // e4m3
    static constexpr int PAIRS = 2;
    static constexpr int64_t STEP = ONE_WORD;
    INLINE Two open(const char* p, int pair) const {
        const vu codes = load_as<vu>(p);
        const auto wide = [&](int odd) {  // the exponent is 120 too low, also of e4m3's subnormal numbers
            const vu up = codes << (odd ? 8 - 8 * pair : 24 - 8 * pair);  // a byte in the highest bits
            const vf low = (vf)(((vi)up >> 4) & (int)0x87f00000);
            return low * 0x1p120f;
        };
        return two(wide(0), wide(1));
    }
};

// Numbers of two columns in every word, half of what C opens at once.
template <class C> struct Pairs : C {
    typedef uint16_t vn __attribute__((vector_size(4 * W)));
    static constexpr int PAIRS = 2 * C::QUADS;
    // In this order, what C opens is used up before the next.
    static constexpr int pair(int i) { return C::QUADS == 1 ? i : i / 4 * 4 + i % 2 * 2 + i / 2 % 2; }
    INLINE vu open(const char* p, int pair) const {
        const vu quad = C::open(p, C::QUADS == 1 ? 0 : pair / 4 * 2 + pair % 2);
        return (C::QUADS == 1 ? pair : pair / 2 % 2) ? (vu)((vn)quad >> 8) : quad & 0x00ff00ffu;
    }
};

template <class C> struct Values : Pairs<C> {  // as floats: times twice the numbers' unit
    int32_t zero;
    explicit Values(const C& codes, const Packed& w) : Pairs<C>{codes}, zero(w.half_zero()) {}
    INLINE Two open(const char* p, int pair) const {
        const vu numbers = Pairs<C>::open(p, pair);
        const auto wide = [&](vu one) { return __builtin_convertvector((vi)one - zero, vf); };
        return two(wide(numbers & 0xffff), wide(numbers >> 16));
    }
};
#endif

// --- whole numbers -----------------------------------------------------------------------------------------------------

#ifdef SPECDEC_WHOLE_NUMBERS
INLINE vu paired(vu a) { return a; }

INLINE vu add_two(vu w, const int16_t* x, vu sum) {
    return in_register(sum + (vu)X86(madd_epi16)((Lanes)w, X86(set1_epi32)(load_as<int32_t>(x))));
}

void whole_numbers(const bf16* x, int64_t k, int64_t group, int16_t* out, float* units, float* sums) {
    for (int64_t at = 0; at < k; at += group) {
        const int64_t end = std::min(at + group, k);
        uint32_t largest = 0;
        for (int64_t i = at; i < end; ++i) largest = std::max<uint32_t>(largest, x[i].bits & 0x7fff);
        const uint32_t exponent = std::max(largest >> 7, 15u);
        const uint32_t inverse = (268 - exponent) << 23, unit = exponent == 255 ? 0x7fc00000u : (exponent - 14) << 23;
        int32_t sum = 0;
        for (int64_t i = at; i < end; ++i) {
            const float number = widen(x[i]) * load_as<float>(&inverse);
            out[i] = exponent == 255 ? 0 : (int16_t)std::nearbyint(number);
            sum += out[i];
        }
        *units++ = load_as<float>(&unit);
        *sums++ = (float)sum;
    }
}
#endif

// --- products ----------------------------------------------------------------------------------------------------------

// Sums of one product of X: of whole numbers they are exact and need no second accumulator.
template <class X> constexpr bool WHOLE_X = std::is_same_v<X, int16_t>;
template <class X> constexpr int ACCUMULATORS = WHOLE_X<X> ? 1 : 2;
template <class X> constexpr int PACKED_ROWS = W == 16 || WHOLE_X<X> ? 6 : 3;  // of the largest tile

// Vectors of features summed at once with M rows, so that their accumulators take three quarters of the registers.
template <class X> constexpr int packed_vectors(int M) {
    if (WHOLE_X<X>) return W == 16 || M <= 2 ? MAX_VECTORS : MAX_VECTORS / 2;
    int vectors = MAX_VECTORS;
    while (2 * M * vectors > REGISTERS * 3 / 4) vectors /= 2;
    return vectors;
}
template <class X> constexpr int64_t OPENED_ROWS = 2 * PACKED_ROWS<X>;  // beyond, values are opened once for all rows
constexpr int64_t OPENED_COLUMNS = 256;                                 // at a time: they stay in L1

template <class X> struct Opened : InOrder {  // what was opened before: words of two bfloat16, or of two whole numbers
    static constexpr int PAIRS = 2;
    static constexpr int64_t STEP = PAIRS * ONE_WORD;
    INLINE auto open(const char* p, int pair) const {
        const vu word = load_as<vu>(p + pair * ONE_WORD);
        if constexpr (WHOLE_X<X>)
            return word;
        else
            return two(word);
    }
};

// Some groups of a panel.
struct Groups {
    const char* panel;
    int64_t first, count, columns;  // the first one, and the number of groups and of all their columns
    const char* opened;             // their values, if they were opened before
};

// What the opened codes of a matrix mean: the numbers times `unit`, less `zero` (of whole numbers), plus `centre`.
struct Meaning {
    float unit, centre;
    int32_t zero = 0;
};

// Adds the products of some groups to out[m * out_stride + f], f < FEATURES, for M rows of x, which begin at the first
// column and group. `from_memory`: prefetch later codes.
template <class C, class X, int M>
__attribute__((noinline)) void packed_tile(const Packed& w, const C& codes, const Meaning& meaning, const Groups& groups,
                                           const Activations<X>& x, float* out, int64_t out_stride, bool from_memory) {
    constexpr int V = packed_vectors<X>(M), PAIRS = C::PAIRS, A = ACCUMULATORS<X>;
    typedef std::conditional_t<WHOLE_X<X>, vu, vf> Sum;
    const C own = codes;
    const Layout layout(w);
    const bool offset = w.needs_sums();
    for (int64_t g = 0; g < groups.count; ++g) {
        const Group at = layout.at(groups.panel, groups.first + g);
        if (from_memory) layout.prefetch_head(at);
        const char* stream = groups.opened ? groups.opened + g * w.group * FEATURES * 2 : at.codes;
        const int64_t end = std::min((g + 1) * w.group, groups.columns);
        for (int64_t first = 0; first < FEATURES; first += V * W) {
            Sum sum[A * M * V];
#pragma GCC unroll 64
            for (int i = 0; i < A * M * V; ++i) sum[i] = Sum{};
            const char* p = stream + first * WORD;
            for (int64_t k = g * w.group; k < end; k += 2 * PAIRS, p += C::STEP) {
                if (from_memory)
#pragma GCC unroll 8
                    for (int64_t word = 0; word < C::STEP; word += ONE_WORD) prefetch_later<V * W * WORD>(p + word);
#pragma GCC unroll 16
                for (int i = 0; i < PAIRS; ++i) {
                    const int pair = C::pair(i);
                    decltype(own.open(p, pair)) weight[V];
#pragma GCC unroll 8
                    for (int v = 0; v < V; ++v) {
                        weight[v] = own.open(p + v * W * WORD, pair);
                        if constexpr (WHOLE_X<X>) {
                            weight[v] = in_register(weight[v]);
                            continue;
                        }
#pragma GCC unroll 8
                        for (int m = 0; m < M; ++m) {
                            Sum& total = sum[(m * V + v) * A + pair % A];
                            total = add_two(weight[v], x.x + m * x.stride + k + 2 * pair, total);
                        }
                    }
                    if constexpr (WHOLE_X<X>)  // an order that needs fewer registers
#pragma GCC unroll 8
                        for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
                            for (int v = 0; v < V; ++v)
                                sum[m * V + v] = add_two(weight[v], x.x + m * x.stride + k + 2 * pair, sum[m * V + v]);
                }
            }
            vf unit[M];  // for each row, before stores to `out` make the compiler read them again
            vu zero[M];
            if constexpr (WHOLE_X<X>)
#pragma GCC unroll 8
                for (int m = 0; m < M; ++m) {
                    const int64_t side_at = m * x.groups + g;
                    unit[m] = splat(meaning.unit * x.units[side_at]);
                    zero[m] = vu{} + (uint32_t)meaning.zero * (uint32_t)(int32_t)x.sums[side_at];
                }
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) {
                const int64_t f = first + v * W;
                const vf scale = load_side<0>(layout, at, f) * splat(w.factor);
                vf inner = splat(meaning.centre), outer = vf{};
                if (w.offsets) {
                    const vf given = load_side<1>(layout, at, f);
                    (w.offsets == INNER ? inner : outer) += given;
                }
#pragma GCC unroll 8
                for (int m = 0; m < M; ++m) {
                    float* to = out + m * out_stride + f;
                    const Sum* own_sum = sum + (m * V + v) * A;
                    const int64_t side_at = m * x.groups + g;
                    vf group, total = load(to);
                    if constexpr (WHOLE_X<X>) {
                        group = __builtin_convertvector((vi)(2 * own_sum[0] - zero[m]), vf) * unit[m];
                    } else {
                        group = (own_sum[0] + own_sum[1]) * splat(meaning.unit);
                    }
                    if (offset) {
                        const vf all = splat(WHOLE_X<X> ? x.sums[side_at] * x.units[side_at] : x.sums[side_at]);
                        group = fma(inner, all, group);
                        total = fma(outer, all, total);
                    }
                    store(fma(scale, group, total), to);
                }
            }
        }
    }
}

template <class C, class X>
using Tile = void (*)(const Packed&, const C&, const Meaning&, const Groups&, const Activations<X>&, float*, int64_t,
                      bool);

template <class C, class X, size_t... I> INLINE Tile<C, X> tile_of(int64_t rows, std::index_sequence<I...>) {
    static constexpr Tile<C, X> TILES[] = {packed_tile<C, X, (int)I + 1>...};
    return TILES[rows - 1];
}

template <class C, class X>
void tiles(const Packed& w, const C& codes, const Meaning& meaning, const Groups& groups, const Activations<X>& x,
           int64_t rows, float* out, int64_t out_stride, bool from_memory) {
    constexpr int64_t MOST = PACKED_ROWS<X>;
    for (int64_t m = 0; m < rows;) {
        const int64_t left = rows - m;
        const int64_t tile = left <= MOST ? left : left >= 2 * MOST ? MOST : (left + 1) / 2;
        tile_of<C, X>(tile, std::make_index_sequence<MOST>{})(w, codes, meaning, groups, x.from(m, 0, 0),
                                                              out + m * out_stride, out_stride, !m && from_memory);
        m += tile;
    }
}

// One panel against all rows.
template <class C, class X>
void panel_against(const Packed& w, const C& codes, const Meaning& meaning, const char* panel, const Activations<X>& x,
                   int64_t rows, float* out, int64_t out_stride) {
    for (int64_t m = 0; m < rows; ++m) std::fill_n(out + m * out_stride, FEATURES, 0.0f);
    if (rows <= OPENED_ROWS<X>) {
        tiles(w, codes, meaning, {panel, 0, w.groups(), w.k, nullptr}, x, rows, out, out_stride, true);
        return;
    }
    alignas(64) uint32_t values[OPENED_COLUMNS / 2 * FEATURES];
    const Layout layout(w);
    const int64_t at_once = OPENED_COLUMNS / w.group;
    for (int64_t g = 0; g < w.groups(); g += at_once) {
        const int64_t from = g * w.group, count = std::min(at_once, w.groups() - g);
        char* to = reinterpret_cast<char*>(values);
        for (int64_t own = g; own < g + count; ++own) {
            const char* p = layout.at(panel, own).codes;
            const int64_t columns = std::min(w.group, w.k - own * w.group);
            for (int64_t k = 0; k < columns; k += 2 * C::PAIRS, p += C::STEP, to += C::PAIRS * ONE_WORD)
                for (int64_t f = 0; f < FEATURES; f += W) {
#pragma GCC unroll 8
                    for (int64_t word = 0; word < C::STEP; word += ONE_WORD) prefetch_later<W * WORD>(p + f * WORD + word);
#pragma GCC unroll 16
                    for (int i = 0; i < C::PAIRS; ++i) {
                        const int pair = C::pair(i);
                        const vu opened = paired(codes.open(p + f * WORD, pair));
                        std::memcpy(to + (pair * FEATURES + f) * WORD, &opened, sizeof opened);
                    }
                }
        }
        const int64_t columns = std::min(w.k - from, at_once * w.group);
        tiles(w, Opened<X>{}, meaning, {panel, g, count, columns, reinterpret_cast<const char*>(values)}, x.from(0, from, g), rows,
              out, out_stride, false);
    }
}

template <class X>
void packed_products(const Packed& w, const Activations<X>& x, int64_t rows, int64_t first, int64_t n, float* out,
                     int64_t out_stride) {
    const auto run = [&](const auto& codes, const Meaning& meaning) {
        for (int64_t f = 0; f < n; f += FEATURES)
            panel_against(w, codes, meaning, w.panel(first + f), x, rows, out + f, out_stride);
    };
#ifdef SPECDEC_DPBF16
    const Meaning meaning = {1, w.centre};
    if (w.kind == NIBBLES)
        run(Nibbles(w), meaning);
    else if (w.kind == FIVES)
        run(Split<5>(w), meaning);
    else if (w.kind == SIXES)
        run(Split<6>(w), meaning);
    else
        run(Magnitudes(w), meaning);
#else
    const Numbers& numbers = w.numbers;
    if constexpr (WHOLE_X<X>)
        with_codes(w, [&]<class C>(const C& codes) {
            run(Pairs<C>{codes}, {numbers.unit, w.centre, numbers.zero});
        });
    else if (w.kind == E4M3)
        run(Floats{}, {1, w.centre});
    else
        with_codes(w, [&]<class C>(const C& codes) {
            run(Values<C>(codes, w), {2 * numbers.unit, w.rest()});
        });
#endif
}
template void packed_products(const Packed&, const Activations<float>&, int64_t, int64_t, int64_t, float*, int64_t);
#ifdef SPECDEC_DPBF16
template void packed_products(const Packed&, const Activations<bf16>&, int64_t, int64_t, int64_t, float*, int64_t);
#endif
#ifdef SPECDEC_WHOLE_NUMBERS
template void packed_products(const Packed&, const Activations<int16_t>&, int64_t, int64_t, int64_t, float*, int64_t);
#endif

template <class T>
void group_sums(const T* x, int64_t x_stride, int64_t rows, int64_t k, int64_t group, float* out) {
    for (int64_t m = 0; m < rows; ++m, x += x_stride)
        for (int64_t at = 0; at < k; at += group) {
            const int64_t end = std::min(at + group, k);
            vf sum = {};
            for (int64_t i = at; i < end; i += W)
                sum += load_some(x + i, (int)std::min<int64_t>(W, end - i));
            *out++ = lane_sum(sum);
        }
}
template void group_sums(const bf16*, int64_t, int64_t, int64_t, int64_t, float*);
template void group_sums(const float*, int64_t, int64_t, int64_t, int64_t, float*);

// --- single rows ---------------------------------------------------------------------------------------------------------

// Bytes and columns of a step: what is read to open a column.
INLINE int64_t step_columns(const Packed& w) {
    if (w.kind == FIVES) return 2 * SplitWords<5>::PAIRS;
    if (w.kind == SIXES) return 2 * SplitWords<6>::PAIRS;
    return w.kind == NIBBLES ? 8 : 4;
}
INLINE int64_t step_bytes(const Packed& w) { return w.code_bytes(step_columns(w)); }

// The code of a column of a group, whose words begin at `codes` for its feature.
INLINE uint8_t code_at(const Packed& w, const char* codes, int64_t column) {
    const int64_t in = column % step_columns(w), of_four = in % 4, of_eight = in % 8;
    const char* step = codes + column / step_columns(w) * step_bytes(w);
    if (!w.has_low_bits()) return (uint8_t)step[of_four / 2 + of_four % 2 * 2];
    const int64_t byte = of_eight / 4 + of_eight % 2 * 2, quad = of_eight / 2 % 2, high = w.bits() - 4;
    const uint8_t low = (uint8_t)step[in / 8 * ONE_WORD + byte] >> 4 * quad & 15;
    if (!high) return low;
    const uint8_t others = (uint8_t)step[step_bytes(w) - ONE_WORD + byte];
    return low | (others >> high * (in / 8 * 2 + quad) & ((1 << high) - 1)) << 4;
}

// How a sign bit over a magnitude is stored, and back.
INLINE bool stored_as_numbers(const Packed& w) {
#ifdef SPECDEC_DPBF16
    if (!w.int8) return false;
#endif
    return w.kind == INTEGERS || w.kind == HALVES;
}
INLINE uint8_t stored(const Packed& w, uint8_t code) {
    if (!stored_as_numbers(w)) return code;
    return code & 128 ? (w.kind == HALVES ? 255 : 256) - code : 128 + code;
}
INLINE uint8_t unstored(const Packed& w, uint8_t byte) {
    if (!stored_as_numbers(w)) return byte;
    return byte & 128 ? byte - 128 : (w.kind == HALVES ? 255 : 256) - byte;
}

template <int OF> INLINE float side_value(const Layout& w, const Group& at, int64_t feature) {
    const int64_t first = feature / W * W;
    return load_side<OF>(w, at, first)[feature - first];
}

template <class T> void packed_row(const Packed& w, int64_t row, T* out) {
    const int64_t f = row % FEATURES;
    const Layout layout(w);
    for (int64_t g = 0; g < w.groups(); ++g) {
        const Group at = layout.at(w.panel(row), g);
        const float scale = side_value<0>(layout, at, f) * w.factor;
        const float offset = w.offsets ? side_value<1>(layout, at, f) : 0;
        const float inner = w.centre + (w.offsets == INNER ? offset : 0), outer = w.offsets == OUTER ? offset : 0;
        const int64_t first = g * w.group;
        for (int64_t k = first; k < std::min(first + w.group, w.k); ++k) {
            const uint8_t code = code_at(w, at.codes + f * WORD, k - first);
            const uint8_t sign_and_size = unstored(w, code);
            float value = widen(bf16{w.values[w.has_low_bits() ? code : sign_and_size & 127]});
            if (!w.has_low_bits() && sign_and_size & 128) value = -value;
            if (inner != 0) value += inner;  // -0 stays as it is
            value *= scale;
            narrow(w.offsets == OUTER ? value + outer : value, out + k);
        }
    }
}
template void packed_row(const Packed&, int64_t, bf16*);
template void packed_row(const Packed&, int64_t, float*);

// --- packing -------------------------------------------------------------------------------------------------------------

// The codes of columns k .. k + 7 of a stream of bits, lowest bits first, one per byte.
INLINE uint64_t eight_codes(const uint8_t* from, int64_t k, int64_t bits) {
    if (bits == 8) return load_as<uint64_t>(from + k);
    if (bits == 4) {
        uint64_t stream = load_as<uint32_t>(from + k / 2);
        stream = (stream | stream << 16) & 0x0000ffff0000ffff;
        stream = (stream | stream << 8) & 0x00ff00ff00ff00ff;
        return (stream | stream << 4) & 0x0f0f0f0f0f0f0f0f;
    }
    uint64_t stream = 0, codes = 0;
    std::memcpy(&stream, from + k * bits / 8, bits);
    for (int i = 0; i < 8; ++i) codes |= (stream >> i * bits & ((1u << bits) - 1)) << 8 * i;
    return codes;
}

// Eight codes of four bits, in the order of a word of NIBBLES.
INLINE uint32_t in_order(uint32_t word) {
    const uint32_t inner = (word ^ word >> 4) & 0x00f000f0;
    word ^= inner | inner << 4;
    const uint32_t middle = (word ^ word >> 8) & 0x0000ff00;
    return word ^ (middle | middle << 8);
}

constexpr int64_t LINES = 512;  // bytes of a row that are read at a time: a few lines beside each other

// How the codes of a file are stored: `internal` [256] has the kind's own.
struct Translation {
    uint8_t own[256];
    uint8_t flips;  // these bits, if it looks up none
    bool looks_up = false;
    Translation(const Packed& w, const uint8_t* internal, int codes) {
        for (int i = 0; i < 256; ++i) own[i] = stored(w, internal[i]);
        flips = own[0];
        for (int i = 0; i < codes; ++i) looks_up |= own[i] != (i ^ flips);
    }
    INLINE void apply(uint8_t* codes, int64_t columns) const {
        if (looks_up) std::transform(codes, codes + columns, codes, [&](uint8_t code) { return own[code]; });
        else if (flips)
            for (int64_t i = 0; i < columns; ++i) codes[i] ^= flips;
    }
};

// Writes the scale (OF = 0) or the offset of one feature in a group, and its unit if it is SMALL.
INLINE void put_side(const Packed& w, const Group& at, int64_t of, int64_t f, const void* value, const float* unit) {
    const int64_t width = w.side_width();
    char* to = (char*)at.side + (of * FEATURES + f) * width;
    if (width == 1) std::memcpy(to, value, 1);
    if (width == 2) std::memcpy(to, value, 2);
    if (width == 4) std::memcpy(to, value, 4);
    if (w.sides == SMALL) std::memcpy((char*)at.units + (of * FEATURES + f) * 4, unit, 4);
}

// The bits of a number in a dtype of 16 bits or more that holds it.
INLINE uint32_t side_bits(const Packed& w, float value) {
    const auto bits = load_as<uint32_t>(&value);
    if (w.sides != FLOAT16) return w.sides == BFLOAT16 ? bits >> 16 : bits;
    const float low = value * 0x1p-112f;  // with the exponent of float16
    return (bits >> 16 & 0x8000) | (load_as<uint32_t>(&low) >> 13 & 0x7fff);
}

// A word of eight codes below 1 << bits, which are given as bytes: columns 0 and 2, 4 and 6, 1 and 3, 5 and 7 share one.
INLINE uint32_t in_a_word(uint64_t eight, int64_t bits) {
    const uint64_t pairs = eight | eight >> (16 - bits);
    return (uint32_t)((pairs & 0xff) | (pairs >> 24 & 0xff00) | (pairs << 8 & 0xff0000) | (pairs >> 16 & 0xff000000));
}

// Words of low bits in a step, which a word with their high bits follows, if there are any.
template <int BITS> constexpr int LOW_WORDS = BITS == 5 ? 4 : BITS == 6 ? 2 : 1;

// Writes 8 N codes of one feature, the words of which are ONE_WORD apart. Returns where the next ones go.
template <int BITS, int N> INLINE char* put_eights(const uint8_t* codes, char* to) {
    constexpr int HIGH = BITS == 8 ? 0 : BITS - 4, WORDS = LOW_WORDS<BITS>;
    const auto put = [&](uint32_t word) {
        std::memcpy(to, &word, WORD);
        to += ONE_WORD;
    };
    uint64_t eights[N];
    uint32_t low[N], high[N];
    std::memcpy(eights, codes, sizeof eights);
    for (int i = 0; i < N; ++i) {
        if (BITS == 8) eights[i] = in_words(eights[i], false);
        else low[i] = in_a_word(eights[i] & 0x0f0f0f0f0f0f0f0fu, 4);
        if (HIGH) high[i] = in_a_word(eights[i] >> 4 & 0x0f0f0f0f0f0f0f0fu, HIGH);
    }
    for (int i = 0; i < N; ++i) {
        put(BITS == 8 ? (uint32_t)eights[i] : low[i]);
        if (BITS == 8) put((uint32_t)(eights[i] >> 32));
        if (!HIGH || (i + 1) % WORDS) continue;
        uint32_t others = 0;
        for (int j = 0; j < WORDS; ++j) others |= high[i + 1 - WORDS + j] << 2 * HIGH * j;
        put(others);
    }
    return to;
}

// Likewise `columns` codes, a multiple of those of one step: most of them four words at a time.
template <int BITS> void put_codes(const uint8_t* codes, int64_t columns, char* to) {
    constexpr int STEP = 8 * LOW_WORDS<BITS>;
    for (; columns >= 32; columns -= 32, codes += 32) to = put_eights<BITS, 4>(codes, to);
    for (; columns > 0; columns -= STEP, codes += STEP) to = put_eights<BITS, STEP / 8>(codes, to);
}

void put_codes(const Packed& w, const uint8_t* codes, int64_t columns, char* to) {
    switch (w.kind) {
    case NIBBLES: return put_codes<4>(codes, columns, to);
    case FIVES: return put_codes<5>(codes, columns, to);
    case SIXES: return put_codes<6>(codes, columns, to);
    default: return put_codes<8>(codes, columns, to);
    }
}

}  // namespace specdec

using namespace specdec;

// Bytes of a packed matrix with this header.
EXPORT int64_t packed_bytes(const void* header) {
    const Packed& w = *(const Packed*)header;
    return HEADER + (w.n + FEATURES - 1) / FEATURES * w.panel_bytes();
}

// Whether a byte is among rows of `bytes` bytes, `row_bytes` apart.
EXPORT int64_t holds_byte(const uint8_t* from, int64_t rows, int64_t bytes, int64_t row_bytes, int64_t byte,
                          int64_t threads) {
    constexpr int64_t AT_ONCE = 64;
    std::atomic<bool> found{false};
    for_blocks((int)threads, (rows + AT_ONCE - 1) / AT_ONCE, [&](int64_t i) {
        for (int64_t row = i * AT_ONCE; row < std::min((i + 1) * AT_ONCE, rows) && !found; ++row)
            if (std::memchr(from + row * row_bytes, (int)byte, bytes)) found = true;
    });
    return found;
}

// Packs rows of codes, each a stream of `bits` bits per column, lowest bits first, `row_bytes` bytes apart.
// `internal` [256] translates codes. Scales and offsets (or null) are [.., side_columns] in the dtype of `sides`, one for
// block_rows x block_columns; a block is a whole number of groups wide. Their units, float32 [n, blocks], belong to SMALL
// ones. The header is copied to `to`. `release` is that of for_panels.
EXPORT void pack_codes(const void* header, const void* codes, int64_t row_bytes, int64_t bits, const uint8_t* internal,
                       const char* scales, const char* offsets, const float* scale_units, const float* offset_units,
                       int64_t block_rows, int64_t block_columns, int64_t side_columns, void* to, int64_t release,
                       int64_t threads) {
    const Packed w = *(const Packed*)header;
    std::memcpy(to, header, sizeof(Packed));
    const Layout layout(w);
    const int64_t groups = w.groups(), wide = block_columns / w.group;
    const Translation translation(w, internal, 1 << bits);
    const int64_t at_once = std::max<int64_t>(1, LINES * 8 / (w.group * bits));
    const bool whole_words = w.kind == NIBBLES && bits == 4 && !translation.looks_up && !translation.flips;
    for_panels(codes, row_bytes, w.n, release, threads, [&](int64_t i) {
        char* panel = (char*)to + HEADER + i * w.panel_bytes();
        const int64_t features = std::min(FEATURES, w.n - i * FEATURES);
        if (features < FEATURES) std::memset(panel, 0, w.panel_bytes());
        for (int64_t begin = 0; begin < groups; begin += at_once) {
            const int64_t end = std::min(begin + at_once, groups);
            if (whole_words) {  // moved as in a matrix of floats, then put in order
                uint32_t words[LINES / WORD * FEATURES];
                const int64_t count = (std::min(end * w.group, w.k) - begin * w.group) / 8 * FEATURES;
                pack_panel((const char*)codes + i * FEATURES * row_bytes + begin * w.group / 2, row_bytes,
                           count / FEATURES, features, words);
                for (int64_t at = 0, of_group = w.group / 8 * FEATURES; at < count; at += of_group) {
                    auto* packed = (uint32_t*)layout.at(panel, begin + at / of_group).codes;
                    for (int64_t j = 0; j < std::min(of_group, count - at); ++j)
                        packed[j] = in_order(words[at + j]);
                }
            }
            for (int64_t f = 0; f < features; ++f) {
                const int64_t row = i * FEATURES + f, blocks = row / block_rows * side_columns;
                for (int64_t g = begin; g < end; ++g) {
                    const Group at = layout.at(panel, g);
                    const int64_t first = g * w.group, columns = std::min(w.group, w.k - first);
                    const int64_t block = blocks + g / wide;
                    const int64_t unit = row * w.blocks() + (g >> w.shift);
                    put_side(w, at, 0, f, scales + block * w.side_width(), scale_units + unit);
                    if (offsets) put_side(w, at, 1, f, offsets + block * w.side_width(), offset_units + unit);
                    if (whole_words) continue;
                    uint8_t group[MAX_GROUP];
                    for (int64_t k = 0; k < columns; k += 8) {
                        const uint64_t eight = eight_codes((const uint8_t*)codes + row * row_bytes, first + k, bits);
                        std::memcpy(group + k, &eight, 8);
                    }
                    translation.apply(group, columns);
                    put_codes(w, group, columns, (char*)at.codes + f * WORD);
                }
            }
        }
    });
}

// Packs rows of GGUF blocks of a `type` of ggml, `row_bytes` bytes apart; the rest is as in pack_codes.
EXPORT void pack_blocks(const void* header, const void* rows, int64_t row_bytes, int64_t type, const uint8_t* internal,
                        void* to, int64_t release, int64_t threads) {
    std::memcpy(to, header, sizeof(Packed));
    const Packed& w = *(const Packed*)to;
    const Layout layout(w);
    const Translation translation(w, internal, 1 << w.bits());
    const int64_t values = w.group << w.shift, bytes = row_bytes / w.blocks();
    const int64_t at_once = std::max<int64_t>(1, LINES / bytes);
    for_panels(rows, row_bytes, w.n, release, threads, [&](int64_t i) {
        char* panel = (char*)to + HEADER + i * w.panel_bytes();
        const uint8_t* from = (const uint8_t*)rows + i * FEATURES * row_bytes;
        const int64_t features = std::min(FEATURES, w.n - i * FEATURES);
        if (features < FEATURES) std::memset(panel, 0, w.panel_bytes());
        Block block;
        for (int64_t begin = 0; begin < w.blocks(); begin += at_once)
            for (int64_t f = 0; f < features; ++f)
                for (int64_t b = begin; b < std::min(begin + at_once, w.blocks()); ++b) {
                    open_block(type, from + f * row_bytes + b * bytes, block);
                    translation.apply(block.codes, values);
                    Group at = layout.at(panel, b << w.shift);
                    put_codes(w, block.codes, values, (char*)at.codes + f * WORD);
                    for (int64_t g = 0; g < 1 << w.shift; ++g, at.side += layout.side)
                        for (int64_t of = 0; of < w.per_offsets(); ++of) {
                            const uint32_t bits = side_bits(w, block.sides[of]);
                            const void* value = w.sides == SMALL ? (const void*)&block.small[of][g] : &bits;
                            put_side(w, at, of, f, value, &block.sides[of]);
                        }
                }
    });
}

// A packed matrix of some rows of another; the header at `to` must have been written.
EXPORT void pack_rows(const void* from, const int32_t* rows, void* to, int64_t threads) {
    const Packed &source = *(const Packed*)from, &w = *(const Packed*)to;
    const Layout layout(w);
    for_blocks((int)threads, (w.n + FEATURES - 1) / FEATURES, [&](int64_t i) {
        char* panel = (char*)to + HEADER + i * w.panel_bytes();
        std::memset(panel, 0, w.panel_bytes());
        for (int64_t f = 0; f < FEATURES && i * FEATURES + f < w.n; ++f) {
            const int64_t row = rows[i * FEATURES + f], other = row % FEATURES;
            for (int64_t g = 0; g < w.groups(); ++g) {
                const Group at = layout.at(source.panel(row), g), mine = layout.at(panel, g);
                const auto copy = [&](const char* a, const char* b, int64_t count, int64_t width) {
                    for (int64_t j = 0; j < count; ++j)
                        std::memcpy((char*)b + (j * FEATURES + f) * width, a + (j * FEATURES + other) * width, width);
                };
                if (w.sides == SMALL) copy(at.units, mine.units, w.per_offsets(), 4);
                copy(at.side, mine.side, w.per_offsets(), w.side_width());
                copy(at.codes, mine.codes, w.code_bytes(std::min(w.group, w.k - g * w.group)) / ONE_WORD, WORD);
            }
        }
    });
}
