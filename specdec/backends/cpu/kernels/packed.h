// Inner products of quantised weights with a few activation rows. Codes stay packed in memory and become exact bfloat16
// values in registers; activations are never rounded.
//
// Value: w[n, k] = (value(code[n, k]) + centre + inner[n, g]) * scale[n, g] * factor + outer[n, g], where a group g is
// `group` consecutive columns. All file formats are brought into this form (specdec/backends/cpu/packed.py).
//
// Layout: a header of HEADER bytes, then panels of FEATURES features. A panel is a sequence of groups, and a group is
// [FEATURES] scales, [FEATURES] offsets (if any) and its codes, in words of four bytes: word i of the features stands
// side by side. A word holds 8 columns of four bits or 4 columns of eight, lowest bits first: the even columns in its
// low half, the odd ones in its high half. Reading a panel is one ascending stream.
//
// Bits contract: the product of one weight row and one activation row has two accumulators, for even and odd pairs of
// columns, that begin at zero in every group. At the end of a group their sum is scaled and added to the total. None of
// this depends on other rows.
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

struct Packed {
    int64_t n, k;
    int64_t group;  // a multiple of 8, at most MAX_GROUP
    int64_t kind;
    int64_t wide;  // scales and offsets are float32, else bfloat16
    int64_t offsets;
    float factor, centre;
    uint16_t values[128];  // bfloat16: of the codes, or of the magnitudes

    const char* data() const;
    int64_t side() const { return FEATURES * (wide ? 4 : 2) * (offsets ? 2 : 1); }  // bytes before the codes of a group
    int64_t code_bytes(int64_t columns) const { return FEATURES * columns / (kind == NIBBLES ? 2 : 1); }
    int64_t groups() const { return (k + group - 1) / group; }
    int64_t panel_bytes() const { return groups() * side() + code_bytes(k); }
    bool needs_sums() const { return offsets || centre != 0; }
};
constexpr int64_t HEADER = 512;
constexpr int64_t MAX_GROUP = 128;
static_assert(sizeof(Packed) <= HEADER);
inline const char* Packed::data() const { return reinterpret_cast<const char*>(this) + HEADER; }

// Sums of every group of columns of every row, [rows, groups]: the products with an offset. Row by row.
template <class T>
void group_sums(const T* x, int64_t x_stride, int64_t rows, int64_t k, int64_t group, float* out);

// out[m * out_stride + f] = w_f . x_m for the features first .. first + n (whole panels, or up to the last feature).
// X: Panel<T>::Input. `sums` as from group_sums, null if the matrix needs none.
template <class X>
void packed_products(const Packed& w, const X* x, int64_t x_stride, int64_t rows, const float* sums, int64_t first,
                     int64_t n, float* out, int64_t out_stride);

// The values of one weight row, rounded once.
template <class T> void packed_row(const Packed& w, int64_t row, T* out);

}  // namespace specdec
