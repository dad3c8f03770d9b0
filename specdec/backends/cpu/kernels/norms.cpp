// Row-wise ops: embed, rms_norm, layer_norm, gelu, scale, add, norm_rope and gated_rms_norm of specdec.backends.ops.
// Reference: ReferenceOps, same names (the reference rounds to act dtype between norm and rotation; these kernels round once, at
// the end).
//
// Bits contract: a head (or row) is read by one thread, and its squares are summed by four vector accumulators in
// ascending order, independently of other heads and rows.

#include "packed.h"
#include "panels.h"
#include "team.h"

namespace specdec {

template <class T> INLINE float square_sum(const T* x, int64_t n) {
    vf sum[4] = {};
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
        for (int j = 0; j < 4; ++j) {
            vf a = load(x + i + j * W);
            sum[j] = fma(a, a, sum[j]);
        }
    for (; i + W <= n; i += W) {
        vf a = load(x + i);
        sum[0] = fma(a, a, sum[0]);
    }
    if (i < n) {
        vf a = load(x + i, (int)(n - i));
        sum[1] = fma(a, a, sum[1]);
    }
    return lane_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

template <class T> INLINE float norm_factor(const T* x, int64_t n, float eps) {
    return 1.0f / std::sqrt(square_sum(x, n) / (float)n + eps);
}

INLINE int team(int threads, int64_t elements) { return elements * 8 < SERIAL_WORK ? 1 : threads; }

template <class T>
void rms_norm(const T* x, int64_t stride, int64_t rows, int64_t n, const float* weight, float eps, T* out,
              int threads) {
    for_blocks(team(threads, rows * n), rows, [&](int64_t row) {
        const T* from = x + row * stride;
        const vf factor = splat(norm_factor(from, n, eps));
        fill(out + row * n, n, [&](int64_t i, int some) {
            return load_some(from + i, some) * factor * load_some(weight + i, some);
        });
    });
}

template <class T>
void layer_norm(const T* x, int64_t stride, int64_t rows, int64_t n, const float* weight, const float* bias, float eps,
                T* out, int threads) {
    for_blocks(team(threads, rows * n), rows, [&](int64_t row) {
        const T* from = x + row * stride;
        float* centred = scratch<0>(n);
        vf sum = {};
        for (int64_t i = 0; i < n; i += W) sum = sum + load_some(from + i, (int)std::min<int64_t>(W, n - i));
        const vf mean = splat(lane_sum(sum) / (float)n);
        fill(centred, n, [&](int64_t i, int some) { return load_some(from + i, some) - mean; });
        const vf factor = splat(norm_factor(centred, n, eps));
        fill(out + row * n, n, [&](int64_t i, int some) {
            return fma(load_some(centred + i, some) * factor, load_some(weight + i, some), load_some(bias + i, some));
        });
    });
}

// to[i] = value(from[i]) for every row
template <class T, class Value>
void map_rows(const T* x, int64_t stride, int64_t rows, int64_t n, T* out, int threads, Value&& value) {
    for_blocks(team(threads, rows * n), rows, [&](int64_t row) {
        fill(out + row * n, n, [&](int64_t i, int some) { return value(load_some(x + row * stride + i, some)); });
    });
}

// Multiplies a row at position p by factor * (1 + beta ln(1 + floor(p / length))).
template <class T>
void scale(const T* x, int64_t stride, int64_t rows, int64_t n, float factor, float beta, int64_t length,
           int64_t position, T* out, int threads) {
    for_blocks(team(threads, rows * n), rows, [&](int64_t row) {
        const double grown = 1 + beta * std::log1p((double)((position + row) / length));
        const vf by = splat((float)(factor * grown));
        fill(out + row * n, n, [&](int64_t i, int some) { return load_some(x + row * stride + i, some) * by; });
    });
}

// to[i] = value(a[i], b[i]) for every row
template <class T, class Value>
void join_rows(const T* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t rows, int64_t n, T* out, int threads,
               Value&& value) {
    for_blocks(team(threads, rows * n), rows, [&](int64_t row) {
        fill(out + row * n, n, [&](int64_t i, int some) {
            return value(load_some(a + row * a_stride + i, some), load_some(b + row * b_stride + i, some));
        });
    });
}

template <class T>
void gated_rms_norm(const T* x, int64_t x_row, int64_t x_head, const T* z, int64_t z_row, int64_t z_head, int64_t rows,
                    int64_t heads, int64_t n, const float* weight, float eps, T* out, int threads) {
    for_blocks(team(threads, rows * heads * n * 2), rows, [&](int64_t row) {
        for (int64_t h = 0; h < heads; ++h) {
            const T* from = x + row * x_row + h * x_head;
            const T* gate = z + row * z_row + h * z_head;
            const vf factor = splat(norm_factor(from, n, eps));
            fill(out + (row * heads + h) * n, n, [&](int64_t i, int some) {
                const vf y = load_some(from + i, some) * factor * load_some(weight + i, some);
                return y * silu(load_some(gate + i, some));
            });
        }
    });
}

template <class T>
void norm_rope(const T* x, int64_t x_row, int64_t x_head, int64_t rows, int64_t heads, int64_t n, const float* weight,
               float eps, const float* inv_freq, int64_t half, int64_t position, T* out, int threads) {
    for_blocks(team(threads, rows * heads * n), rows, [&](int64_t row) {
        float* cosine = scratch<0>(2 * half + n);
        float *sine = cosine + half, *wide = sine + half;
        for (int64_t j = 0; j < half; ++j) {
            const float angle = (float)(position + row) * inv_freq[j];  // float32: what checkpoints were trained with
            cosine[j] = std::cos(angle);
            sine[j] = std::sin(angle);
        }
        for (int64_t h = 0; h < heads; ++h) {
            const T* from = x + row * x_row + h * x_head;
            T* to = out + (row * heads + h) * n;
            const vf factor = splat(weight ? norm_factor(from, n, eps) : 1.0f);
            fill(wide, n, [&](int64_t i, int some) {
                vf a = load_some(from + i, some);
                return weight ? a * factor * load_some(weight + i, some) : a;
            });
            fill(to, half, [&](int64_t j, int some) {
                vf left = load_some(wide + j, some), right = load_some(wide + half + j, some);
                return fma(left, load_some(cosine + j, some), -(right * load_some(sine + j, some)));
            });
            fill(to + half, half, [&](int64_t j, int some) {
                vf left = load_some(wide + j, some), right = load_some(wide + half + j, some);
                return fma(right, load_some(cosine + j, some), left * load_some(sine + j, some));
            });
            fill(to + 2 * half, n - 2 * half,
                 [&](int64_t j, int some) { return load_some(wide + 2 * half + j, some); });
        }
    });
}

}  // namespace specdec

using namespace specdec;

#define NORMS(NAME, T)                                                                                                 \
    EXPORT void rms_norm_##NAME(const void* x, int64_t stride, int64_t rows, int64_t n, const void* weight,            \
                                    float eps, void* out, int64_t threads) {                                           \
        rms_norm((const T*)x, stride, rows, n, (const float*)weight, eps, (T*)out, (int)threads);                      \
    }                                                                                                                  \
    EXPORT void layer_norm_##NAME(const void* x, int64_t stride, int64_t rows, int64_t n, const void* weight,          \
                                      const void* bias, float eps, void* out, int64_t threads) {                       \
        layer_norm((const T*)x, stride, rows, n, (const float*)weight, (const float*)bias, eps, (T*)out,               \
                   (int)threads);                                                                                      \
    }                                                                                                                  \
    EXPORT void gelu_##NAME(const void* x, int64_t stride, int64_t rows, int64_t n, void* out, int64_t threads) {      \
        map_rows((const T*)x, stride, rows, n, (T*)out, (int)threads, [](vf a) { return gelu(a); });                   \
    }                                                                                                                  \
    EXPORT void scale_##NAME(const void* x, int64_t stride, int64_t rows, int64_t n, float factor, float beta,         \
                                 int64_t length, int64_t position, void* out, int64_t threads) {                       \
        scale((const T*)x, stride, rows, n, factor, beta, length, position, (T*)out, (int)threads);                    \
    }                                                                                                                  \
    EXPORT void add_##NAME(const void* a, int64_t a_stride, const void* b, int64_t b_stride, int64_t rows, int64_t n,  \
                               void* out, int64_t threads) {                                                           \
        join_rows((const T*)a, a_stride, (const T*)b, b_stride, rows, n, (T*)out, (int)threads,                        \
                  [](vf x, vf y) { return x + y; });                                                                   \
    }                                                                                                                  \
    EXPORT void multiply_##NAME(const void* a, int64_t a_stride, const void* b, int64_t b_stride, int64_t rows,        \
                                    int64_t n, void* out, int64_t threads) {                                           \
        join_rows((const T*)a, a_stride, (const T*)b, b_stride, rows, n, (T*)out, (int)threads,                        \
                  [](vf x, vf y) { return x * y; });                                                                   \
    }                                                                                                                  \
    EXPORT void gated_rms_norm_##NAME(const void* x, int64_t x_row, int64_t x_head, const void* z, int64_t z_row,      \
                                          int64_t z_head, int64_t rows, int64_t heads, int64_t n, const void* weight,  \
                                          float eps, void* out, int64_t threads) {                                     \
        gated_rms_norm((const T*)x, x_row, x_head, (const T*)z, z_row, z_head, rows, heads, n, (const float*)weight,   \
                       eps, (T*)out, (int)threads);                                                                    \
    }                                                                                                                  \
    EXPORT void norm_rope_##NAME(const void* x, int64_t x_row, int64_t x_head, int64_t rows, int64_t heads,            \
                                     int64_t n, const void* weight, float eps, const void* inv_freq, int64_t half,     \
                                     int64_t position, void* out, int64_t threads) {                                   \
        norm_rope((const T*)x, x_row, x_head, rows, heads, n, (const float*)weight, eps, (const float*)inv_freq,       \
                  half, position, (T*)out, (int)threads);                                                              \
    }

NORMS(bf16, bf16)
NORMS(f32, float)

// Copies the rows of a table for token ids, or from row `first` on if `tokens` is null. Returns the index of the first row
// outside it, or -1. A table in panels (`panels.h`) has the stride -row_bytes, a quantised one (`packed.h`) the stride 0.
EXPORT int64_t embed_rows(const void* table, int64_t stride_bytes, int64_t row_bytes, int64_t size, const int64_t* tokens,
                          int64_t first, int64_t rows, void* out) {
    const auto id = [&](int64_t t) { return tokens ? tokens[t] : first + t; };
    for (int64_t t = 0; t < rows; ++t)
        if (id(t) < 0 || id(t) >= size) return t;
    for (int64_t t = 0; t < rows; ++t) {
        char* to = (char*)out + t * row_bytes;
        if (!stride_bytes) {
            const Packed& w = *(const Packed*)table;
            if (row_bytes == w.k * (int64_t)sizeof(float))
                packed_row(w, id(t), (float*)to);
            else
                packed_row(w, id(t), (bf16*)to);
            continue;
        }
        if (stride_bytes > 0) {
            std::memcpy(to, (const char*)table + id(t) * stride_bytes, row_bytes);
            continue;
        }
        const int64_t place = id(t) % FEATURES;
        const char* from = (const char*)table + (id(t) - place) * row_bytes + place * WORD;
        for (int64_t at = 0; at < row_bytes; at += WORD) std::memcpy(to + at, from + at * FEATURES, WORD);
    }
    return -1;
}
