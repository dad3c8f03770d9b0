// Inner products of quantised weights with a few activation rows. Codes stay packed in memory and become exact values in
// registers, which activations are multiplied with as they are. On x86-64 without products of bfloat16, those of integers
// take half as many instructions as those of floats: codes of integers become 16-bit integers and so do bfloat16
// activations (`whole_numbers`).
//
// Value: w[n, k] = (value(code[n, k]) + centre + inner[n, g]) * scale[n, g] * factor + outer[n, g], where a group g is
// `group` consecutive columns. All file formats are brought into this form (specdec/backends/cpu/packed.py).
//
// Layout: a header of HEADER bytes, then panels of FEATURES features. A panel is a sequence of blocks, and a block is the
// units (if any), the sides of its groups and their codes. A side is [FEATURES] scales and [FEATURES] offsets (if any):
// numbers, or whole numbers times the float32 units of the block, [FEATURES] of scales and [FEATURES] of offsets. Codes
// are in words of four bytes: word i of the features stands side by side. Reading a panel is one ascending stream.
//   four bits   a word holds 8 columns, lowest bits first: the even ones in its low half, the odd ones in its high half
//   eight bits  likewise 4 columns
//   five, six   the low four bits of 32 or 16 columns as above, then a word with their high bits: those of the columns that
//               are low in a byte of word i are the bits 2 i * HIGH and up of that byte, the other four follow them
// Codes of eight bits are a sign bit over a magnitude; INTEGERS and HALVES are the number plus 128, rounded down, where
// there are no tables of bytes and where activations have eight bits.
//
// Bits contract: the product of one weight row and one activation row has two accumulators, for even and odd pairs of
// columns, that begin at zero in every group. At the end of a group their sum is scaled and added to the total. Sums of
// integers are exact and then treated in the same way. None of this depends on other rows.
#pragma once

#include "panels.h"

namespace specdec {

enum Kind : int64_t {
    NIBBLES,   // four bits: any 16 values
    INTEGERS,  // a sign bit over a magnitude m: m
    HALVES,    // likewise: m + 1/2, for 256 values in steps of one
    E4M3,      // likewise: an e4m3 number
    FIVES,     // five bits: values[0] plus the code, both whole numbers
    SIXES,     // six bits, likewise
};
enum Sides : int64_t {
    FLOAT32,
    BFLOAT16,
    FLOAT16,
    SMALL,  // int8, times a unit
};
enum Offsets : int64_t { NO_OFFSETS, INNER, OUTER };

#if defined(X86) && !defined(SPECDEC_DPBF16)
#define SPECDEC_WHOLE_NUMBERS 1
constexpr bool WHOLE_NUMBERS = true;
#else
constexpr bool WHOLE_NUMBERS = false;
#endif

// Values as (2 * number - zero) * unit with numbers from 0 to 255 and a power of two. A group's sum of numbers times
// activations is then below 255 * 2^15 * 128, and twice that fits into 32 bits.
struct Numbers {
    float unit;  // 0 of E4M3
    int32_t zero;
    int32_t linear;  // the code is the number
    uint8_t of[16];  // else: of the codes of four bits
};

struct Packed {
    int64_t n, k;
    int64_t group;  // a multiple of 8, at most MAX_GROUP
    int64_t kind;
    int64_t sides;  // what scales and offsets are
    int64_t shift;  // a block has 1 << shift groups, all of them whole if they are several
    int64_t offsets;
    int64_t int8;  // activations become int8, if codes are integers
    float factor, centre;
    uint16_t values[128];  // bfloat16: of the codes, or of the magnitudes
    Numbers numbers;

    const char* data() const;
    int64_t per_offsets() const { return offsets ? 2 : 1; }
    int64_t side_width() const { return sides == FLOAT32 ? 4 : sides == SMALL ? 1 : 2; }
    int64_t side() const { return FEATURES * side_width() * per_offsets(); }  // bytes of the side of a group
    int64_t units() const { return sides == SMALL ? FEATURES * 4 * per_offsets() : 0; }  // bytes of a block's units
    int64_t bits() const { return kind == NIBBLES ? 4 : kind == FIVES ? 5 : kind == SIXES ? 6 : 8; }
    int64_t code_bytes(int64_t columns) const { return FEATURES * columns * bits() / 8; }
    int64_t groups() const { return (k + group - 1) / group; }
    int64_t blocks() const { return ((groups() - 1) >> shift) + 1; }
    int64_t panel_bytes() const { return blocks() * units() + groups() * side() + code_bytes(k); }
    bool has_low_bits() const { return bits() < 8; }  // in words of 8 columns
    const char* panel(int64_t row) const { return data() + row / FEATURES * panel_bytes(); }
    // What is added to 2 * (number - half_zero) * unit.
    float rest() const { return centre + (numbers.zero % 2 ? numbers.unit : 0.0f); }
    int32_t half_zero() const { return (numbers.zero + 1) / 2; }
    bool needs_sums() const { return offsets || rest() != 0; }
    bool takes_int8() const { return int8 && numbers.unit != 0; }
    bool takes_whole_numbers() const {  // if activations are bfloat16
        return WHOLE_NUMBERS && !int8 && numbers.unit != 0;
    }
};
constexpr int64_t HEADER = 512;
constexpr int64_t MAX_GROUP = 128;
static_assert(sizeof(Packed) <= HEADER);
inline const char* Packed::data() const { return reinterpret_cast<const char*>(this) + HEADER; }

// Activation rows as the products read them. X: Panel<T>::Input, int16_t for whole numbers, or int8_t.
template <class X> struct Activations {
    const X* x = nullptr;
    int64_t stride = 0;
    const float* sums = nullptr;   // [rows, groups] of x over the columns of a group; null if the matrix needs none
    const float* units = nullptr;  // [rows, groups]: what 1 means, for integers
    int64_t groups = 0;
    const int32_t* starts = nullptr;  // [rows, groups]: what a sum begins with, for int8_t

    Activations from(int64_t row, int64_t column, int64_t group) const {
        const int64_t at = row * groups + group;
        return {x + row * stride + column,      stride, sums ? sums + at : nullptr, units ? units + at : nullptr, groups,
                starts ? starts + at : nullptr};
    }
};

// Sums of every group of columns of every row, [rows, groups]: the products with an offset. Row by row.
template <class T>
void group_sums(const T* x, int64_t x_stride, int64_t rows, int64_t k, int64_t group, float* out);

// A row as integers times a power of two per group: the largest has 15 bits, so a bfloat16 number is exact unless it is
// smaller than a 128th of the group's largest, and off by no more than 2^-15 of that. A group with a number that is not
// finite has NaN as its unit.
void whole_numbers(const bf16* x, int64_t k, int64_t group, int16_t* out, float* units, float* sums);

// out[m * out_stride + f] = w_f . x_m for the features first .. first + n (whole panels, or up to the last feature).
template <class X>
void packed_products(const Packed& w, const Activations<X>& x, int64_t rows, int64_t first, int64_t n, float* out,
                     int64_t out_stride);

// GCC would read a word again for each row, and add products to each other before it adds them to their sum, for which
// there are not enough registers.
template <class V> INLINE V in_register(V a) {
#if defined(__x86_64__)
    asm("" : "+v"(a));
#elif defined(__aarch64__)
    asm("" : "+w"(a));
#endif
    return a;
}

// --- activations in int8 (integers.cpp) ----------------------------------------------------------------------------------

constexpr int64_t QUANTUM = 32;  // columns of a row with one unit

// How a matrix reads activations in int8; matrices with the same form share them.
struct Form {
    int64_t cell;  // columns whose products are summed as integers: of one group of weights and one of activations
    bool low_bits;  // the order of columns in its words
    int32_t zero;  // is subtracted from its numbers

    bool operator==(const Form&) const = default;
};
Form form_of(const Packed& w);

// A row in int8 as matrices of one form read it: the numbers [k, rounded up to whole quanta], and for every cell what 1
// means, what a sum begins with and the sum of the numbers times what 1 means. A number that is not finite makes its unit
// so, and all products NaN.
template <class T>
void quantise_row(const T* x, int64_t k, const Form& form, int8_t* out, float* units, int32_t* starts, float* sums);

template <>
void packed_products(const Packed& w, const Activations<int8_t>& x, int64_t rows, int64_t first, int64_t n, float* out,
                     int64_t out_stride);

// Prefetches BYTES of those that are read after the ones at p: near ones into L1, and into L2 those that take longer to
// come from memory than L1 has room for. Called for all bytes of a panel, so that no line is missed at either distance.
template <int64_t BYTES> INLINE void prefetch_later(const char* p) {
    constexpr int64_t NEAR = 4096, FAR = 16384;
#pragma GCC unroll 8
    for (int64_t line = 0; line < BYTES; line += 64) {
        __builtin_prefetch(p + NEAR + line);
        __builtin_prefetch(p + FAR + line, 0, 2);
    }
}

// Where the parts of a group are: copied before a loop, as stores keep the compiler from holding a Packed in registers.
struct Group {
    const char *units, *side, *codes;
};
struct Layout {
    int64_t sides, width, units, side, codes, block;
    int shift;
    explicit Layout(const Packed& w)
        : sides(w.sides), width(w.side_width()), units(w.units()), side(w.side()), codes(w.code_bytes(w.group)),
          block(units + ((side + codes) << w.shift)), shift((int)w.shift) {}
    INLINE Group at(const char* panel, int64_t g) const {
        const int64_t in = g & ((1 << shift) - 1);
        const char* first = panel + (g >> shift) * block;
        return {first, first + units + in * side, first + units + (side << shift) + in * codes};
    }
    // With the first group of a block: prefetches as many bytes as there are before its codes.
    INLINE void prefetch_head(const Group& at) const {
        if (at.side == at.units + units)
            for (const char* p = at.units; p < at.codes; p += 64) prefetch_later<64>(p);
    }
};

// W bytes as signed numbers. GCC turns a conversion of vectors into many more instructions.
INLINE vi wide_bytes(const char* p) {
#ifdef SPECDEC_AVX512
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(X86)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    typedef int8_t Small __attribute__((vector_size(W)));
    return __builtin_convertvector(load_as<Small>(p), vi);
#endif
}

// W float16 numbers. Without an instruction for it, not for infinities and NaN.
INLINE vf load_float16(const char* p) {
#ifdef SPECDEC_AVX512
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(X86)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    const vi up = (vi)(__builtin_convertvector(load_as<vh>(p), vu) << 16);
    return (vf)((up >> 3) & (int)0x8fffe000) * 0x1p112f;
#endif
}

// The scales of W features, or the offsets (OF = 1).
template <int OF> INLINE vf load_side(const Layout& w, const Group& at, int64_t feature) {
    const char* p = at.side + (OF * FEATURES + feature) * w.width;
    if (w.sides == SMALL) {
        const float* unit = reinterpret_cast<const float*>(at.units) + OF * FEATURES + feature;
        return __builtin_convertvector(wide_bytes(p), vf) * load(unit);
    }
    if (w.sides == FLOAT16) return load_float16(p);
    return w.sides == FLOAT32 ? load(reinterpret_cast<const float*>(p)) : load(reinterpret_cast<const bf16*>(p));
}

// Eight columns, a byte each, in the order of their words: of two words of bytes, or of the low and the high halves of the
// bytes of a word with their low bits.
INLINE uint64_t in_words(uint64_t columns, bool low_bits) {
    if (!low_bits)  // 0 2 1 3, 4 6 5 7
        return (columns & 0xff0000ffff0000ff) | (columns & 0x0000ff000000ff00) << 8 | (columns >> 8 & 0x0000ff000000ff00);
    uint64_t half[2] = {columns & 0xffffffff, columns >> 32};  // 0 4 1 5, 2 6 3 7
    for (uint64_t& x : half) {
        x = (x | x << 16) & 0x0000ffff0000ffff;
        x = (x | x << 8) & 0x00ff00ff00ff00ff;
    }
    return half[0] | half[1] << 8;
}

// --- codes of five and six bits ------------------------------------------------------------------------------------------

template <int BITS> struct SplitWords {
    static constexpr int HIGH = BITS - 4, WORDS = 4 / HIGH;  // of low bits; one of high bits follows
    static constexpr int QUADS = 2 * WORDS, PAIRS = 4 * WORDS;
    static constexpr int64_t STEP = (WORDS + 1) * FEATURES * WORD;  // bytes of a panel
    static constexpr uint32_t MASK = ((1 << HIGH) - 1) << 4;

    // High bits where bits 4 and up of every byte or half word of low bits are; what is beside them is arbitrary.
    static INLINE vu high(const char* p, int from) {
        const vu word = load_as<vu>(p + WORDS * FEATURES * WORD);
        return from < 4 ? word << (4 - from) : word >> (from - 4);
    }
    static INLINE vu low(const char* p, int word, int shift) { return load_as<vu>(p + word * FEATURES * WORD) >> shift; }

    static INLINE vu quad(const char* p, int i) {
        return (low(p, i / 2, i % 2 * 4) & 0x0f0f0f0fu) | (high(p, HIGH * i) & MASK * 0x01010101u);
    }
    static INLINE vu low_of_pair(const char* p, int i) { return low(p, i / 4, i % 4 * 4); }
    static INLINE vu high_of_pair(const char* p, int i) {
        return high(p, i % 4 / 2 * 8 + HIGH * (i / 4 * 2 + i % 2));
    }
};

// --- numbers of four columns in every word -------------------------------------------------------------------------------

struct NibbleCodes {  // that are the numbers
    static constexpr int BITS = 4, QUADS = 2;  // of columns in a step
    static constexpr int64_t STEP = FEATURES * WORD;
    explicit NibbleCodes(const Numbers&) {}
    INLINE vu open(const char* p, int quad) const { return load_as<vu>(p) >> 4 * quad & 0x0f0f0f0fu; }
};

struct TableCodes {  // of four bits
    static constexpr int BITS = 8, QUADS = 2;
    static constexpr int64_t STEP = FEATURES * WORD;
    ByteTable table;
    explicit TableCodes(const Numbers& numbers) : table([&](size_t i) { return numbers.of[i]; }) {}
    INLINE vu open(const char* p, int quad) const { return table[load_as<vu>(p) >> 4 * quad & 0x0f0f0f0fu]; }
};

struct ByteCodes {
    static constexpr int BITS = 8, QUADS = 1;
    static constexpr int64_t STEP = FEATURES * WORD;
    explicit ByteCodes(const Numbers&) {}
    INLINE vu open(const char* p, int) const { return load_as<vu>(p); }
};

template <int OF> struct SplitCodes : SplitWords<OF> {
    static constexpr int BITS = 6;
    explicit SplitCodes(const Numbers&) {}
    INLINE vu open(const char* p, int quad) const { return this->quad(p, quad); }
};

// Calls run(codes) with what opens the numbers of a matrix.
template <class F> void with_codes(const Packed& w, F&& run) {
    const Numbers& numbers = w.numbers;
    if (w.kind == FIVES)
        run(SplitCodes<5>(numbers));
    else if (w.kind == SIXES)
        run(SplitCodes<6>(numbers));
    else if (w.kind != NIBBLES)
        run(ByteCodes(numbers));
    else if (numbers.linear)
        run(NibbleCodes(numbers));
    else
        run(TableCodes(numbers));
}

// --- blocks of GGUF (blocks.cpp) -----------------------------------------------------------------------------------------

constexpr int64_t MAX_BLOCK = 256;  // values

// A block: the codes of its columns, and its scale and offset. These are what the small ones of its groups are multiples of,
// in a format that has them.
struct Block {
    uint8_t codes[MAX_BLOCK];
    float sides[2];
    int8_t small[2][16];
};

// `type`: its number in ggml.
void open_block(int64_t type, const uint8_t* from, Block& to);

// The values of one weight row, rounded once.
template <class T> void packed_row(const Packed& w, int64_t row, T* out);

}  // namespace specdec
