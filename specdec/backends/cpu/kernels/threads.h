// Distributes blocks of work over threads. A block writes only its own outputs, so scheduling never changes the bits.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace specdec {

constexpr int MAX_THREADS = 256;

// Waking the threads costs some microseconds: below this much work (bytes read, or a quarter of the multiply-adds,
// whichever is more) the calling thread alone is faster.
constexpr int64_t SERIAL_WORK = 192 * 1024;

struct alignas(64) Counter {
    std::atomic<int64_t> next;
    int64_t end;
};

// Calls body(block) for every block. Each thread owns a contiguous run, which keeps its weight reads sequential, and
// takes blocks from other runs when its own is finished, so a descheduled thread does not delay the others.
template <class F> void for_blocks(int threads, int64_t blocks, F&& body) {
    threads = (int)std::min<int64_t>(std::min(threads, MAX_THREADS), blocks);
#ifndef _OPENMP
    threads = 1;
#endif
    if (threads <= 1) {
        for (int64_t b = 0; b < blocks; ++b) body(b);
        return;
    }
    Counter runs[MAX_THREADS];
    for (int i = 0; i < threads; ++i) {
        runs[i].next.store(blocks * i / threads, std::memory_order_relaxed);
        runs[i].end = blocks * (i + 1) / threads;
    }
#pragma omp parallel num_threads(threads)
    {
#ifdef _OPENMP
        const int own = omp_get_thread_num();
#else
        const int own = 0;
#endif
        for (int i = 0; i < threads; ++i) {
            Counter& run = runs[(own + i) % threads];
            for (;;) {
                int64_t b = run.next.fetch_add(1, std::memory_order_relaxed);
                if (b >= run.end) break;
                body(b);
            }
        }
    }
}

// Scratch memory of the calling thread, kept between calls. Purposes in use at the same time need different slots.
template <int SLOT> float* scratch(size_t floats) {
    thread_local std::unique_ptr<char[]> memory;
    thread_local size_t capacity = 0;
    if (floats > capacity) {
        memory.reset(new char[floats * sizeof(float) + 64]);
        capacity = floats;
    }
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) & ~uintptr_t{63});
}

}  // namespace specdec
