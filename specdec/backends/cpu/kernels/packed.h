// Inner products of quantised weights with a few activation rows. Codes stay packed in memory and become exact bfloat16
// values in registers, which activations are multiplied with as they are. With AVX2, whose integer products take half as
// many instructions, codes of integers become 16-bit integers and so do bfloat16 activations (`whole_numbers`).
//
// Value: w[n, k] = (value(code[n, k]) + centre + inner[n, g]) * scale[n, g] * factor + outer[n, g], where a group g is
// `group` consecutive columns. All file formats are brought into this form (specdec/backends/cpu/packed.py).
//
// Layout: a header of HEADER bytes, then panels of FEATURES features. A panel is a sequence of groups, and a group is
// [FEATURES] scales, [FEATURES] offsets (if any) and its codes, in words of four bytes: word i of the features stands
// side by side. A word holds 8 columns of four bits or 4 columns of eight, lowest bits first: the even columns in its
// low half, the odd ones in its high half. Reading a panel is one ascending stream. Codes of eight bits are a sign bit
// over a magnitude; INTEGERS and HALVES are the number plus 128, rounded down, where there are no tables of bytes and where
// activations have eight bits.
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
};
enum Offsets : int64_t { NO_OFFSETS, INNER, OUTER };

#if defined(__AVX2__) && !defined(__AVX512F__)
#define SPECDEC_WHOLE_NUMBERS 1
constexpr bool WHOLE_NUMBERS = true;
#else
constexpr bool WHOLE_NUMBERS = false;
#endif

// Values as (2 * number - zero) * unit with numbers from 0 to 255. A group's sum of numbers times activations is then below
// 255 * 2^15 * 128, and twice that fits into 32 bits.
struct Numbers {
    float unit;  // 0 if the values are no integers times a power of two
    int32_t zero;
    int32_t linear;  // the code is the number
    uint8_t of[16];  // else: of the codes of four bits
};

struct Packed {
    int64_t n, k;
    int64_t group;  // a multiple of 8, at most MAX_GROUP
    int64_t kind;
    int64_t wide;  // scales and offsets are float32, else bfloat16
    int64_t offsets;
    int64_t int8;  // activations become int8, if codes are integers
    float factor, centre;
    uint16_t values[128];  // bfloat16: of the codes, or of the magnitudes
    Numbers numbers;       // found when it is packed

    const char* data() const;
    int64_t side() const { return FEATURES * (wide ? 4 : 2) * (offsets ? 2 : 1); }  // bytes before the codes of a group
    int64_t code_bytes(int64_t columns) const { return FEATURES * columns / (kind == NIBBLES ? 2 : 1); }
    int64_t groups() const { return (k + group - 1) / group; }
    int64_t panel_bytes() const { return groups() * side() + code_bytes(k); }
    bool needs_sums() const { return offsets || centre != 0; }
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
template <>
void packed_products(const Packed& w, const Activations<int16_t>& x, int64_t rows, int64_t first, int64_t n, float* out,
                     int64_t out_stride);  // defined if WHOLE_NUMBERS

// --- activations in int8 (integers.cpp) ----------------------------------------------------------------------------------

constexpr int64_t QUANTUM = 32;  // columns of a row with one unit

// How a matrix reads activations in int8; matrices with the same form share them.
struct Form {
    int64_t cell;  // columns whose products are summed as integers: of one group of weights and one of activations
    bool nibbles;  // the order of columns in its words
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

INLINE vf load_side(const Packed& w, const char* p, int64_t feature) {
    return w.wide ? load(reinterpret_cast<const float*>(p) + feature) : load(reinterpret_cast<const bf16*>(p) + feature);
}

// The values of one weight row, rounded once.
template <class T> void packed_row(const Packed& w, int64_t row, T* out);

}  // namespace specdec
