// Packs weights into the panels of `panels.h`, and releases the pages that they were read from. Packing only moves
// words.

#include "panels.h"
#include "team.h"

#ifdef __linux__
#include <algorithm>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace specdec {

// One stage of a transposition: swaps the blocks of D x D lanes beside the diagonal of each block of 2 D x 2 D.
template <int D, bool UPPER, size_t... I> INLINE vu swapped(vu a, vu b, std::index_sequence<I...>) {
    // lanes below D of each pair of groups come from a, the others from b
    return shuffled<(int)(UPPER ? (I & D ? W + I : I + D) : (I & D ? W + I - D : I))...>(a, b);
}
template <int D = W / 2> INLINE void transpose(vu* v) {
    if constexpr (D > 0) {
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) {
            if (i & D) continue;
            const vu a = v[i], b = v[i + D];
            v[i] = swapped<D, false>(a, b, std::make_index_sequence<W>{});
            v[i + D] = swapped<D, true>(a, b, std::make_index_sequence<W>{});
        }
        transpose<D / 2>(v);
    }
}

// Packs one panel: `rows` <= FEATURES rows of `words` words, the others zero.
void pack_panel(const char* from, int64_t stride, int64_t words, int64_t rows, uint32_t* to) {
    int64_t i = 0;
    if (rows == FEATURES)
        for (; i + W <= words; i += W)
            for (int64_t f = 0; f < FEATURES; f += W) {
                vu block[W];
#pragma GCC unroll 16
                for (int j = 0; j < W; ++j) block[j] = load_as<vu>(from + (f + j) * stride + i * WORD);
                transpose(block);
#pragma GCC unroll 16
                for (int j = 0; j < W; ++j) std::memcpy(to + (i + j) * FEATURES + f, &block[j], sizeof(vu));
            }
    for (; i < words; ++i)
        for (int64_t f = 0; f < FEATURES; ++f)
            to[i * FEATURES + f] = f < rows ? load_as<uint32_t>(from + f * stride + i * WORD) : 0;
}

#ifdef __linux__
// The whole units of `unit` bytes inside a range, without the partial ones at its ends.
struct Pages {
    uintptr_t begin, end;
    Pages(const void* at, int64_t bytes, uintptr_t unit)
        : begin(((uintptr_t)at + unit - 1) / unit * unit), end(((uintptr_t)at + bytes) / unit * unit) {}
    bool any() const { return begin < end; }
    size_t bytes() const { return end - begin; }
};
inline uintptr_t page_size() { return (uintptr_t)sysconf(_SC_PAGESIZE); }
#endif

void give_back(const void* at, int64_t bytes) {
#ifdef __linux__
    const Pages pages(at, bytes, page_size());
    if (pages.any()) madvise((void*)pages.begin, pages.bytes(), MADV_DONTNEED);
#else
    (void)at, (void)bytes;
#endif
}

// Maps pages in one call instead of one fault for every few of them.
void fetch_pages(const void* at, int64_t bytes) {
#if defined(__linux__) && defined(MADV_POPULATE_READ)
    const Pages pages(at, bytes, page_size());
    if (pages.any()) madvise((void*)pages.begin, pages.bytes(), MADV_POPULATE_READ);
#else
    (void)at, (void)bytes;
#endif
}

}  // namespace specdec

using namespace specdec;

// Whether the memory is mapped from a file and its resident pages are unwritten, so that pages can be released and read
// again with the same contents. 0 if unknown.
// Source: Linux's Documentation/admin-guide/mm/pagemap.rst; bit 63 present, 62 swapped, 61 of a file.
EXPORT int64_t is_file(const void* at, int64_t bytes) {
#ifdef __linux__
    const int64_t page = (int64_t)page_size();
    const int64_t first = (int64_t)(uintptr_t)at / page, last = ((int64_t)(uintptr_t)at + bytes - 1) / page;
    if (bytes <= 0) return 0;
    (void)*(const volatile char*)at;  // make one page resident, so that it identifies the mapping
    const int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    bool result = true, seen = false;
    uint64_t entries[4096];
    for (int64_t i = first; result && i <= last;) {
        const size_t wanted = (size_t)std::min<int64_t>(4096, last + 1 - i) * sizeof(uint64_t);
        const ssize_t got = pread(file, entries, wanted, i * (int64_t)sizeof(uint64_t));
        if (got < (ssize_t)sizeof(uint64_t)) {
            result = false;
            break;
        }
        for (int64_t j = 0; j < got / (ssize_t)sizeof(uint64_t); ++j, ++i) {
            const bool present = entries[j] >> 63 & 1, swapped = entries[j] >> 62 & 1, of_file = entries[j] >> 61 & 1;
            if (swapped || (present && !of_file)) result = false;
            seen |= present;
        }
    }
    close(file);
    return result && seen;
#else
    (void)at, (void)bytes;
    return 0;
#endif
}

// Packs rows of `words` words, `stride` bytes apart, into panels at `to`. `release` is that of for_panels.
EXPORT void pack_panels(const void* from, int64_t stride, int64_t words, int64_t rows, void* to, int64_t release,
                        int64_t threads) {
    for_panels(from, stride, rows, release, threads, [&](int64_t panel) {
        pack_panel((const char*)from + panel * FEATURES * stride, stride, words, std::min(FEATURES, rows - panel * FEATURES),
                   (uint32_t*)to + panel * FEATURES * words);
    });
}
