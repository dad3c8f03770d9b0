// Sharing blocks of work between threads. Which thread runs a block, and when, never reaches the bits: a block writes
// its own outputs only.
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

// Waking a team costs some microseconds: below this much work (bytes read, or a quarter of the multiply-adds, whichever
// is more) the caller's thread is faster alone.
constexpr int64_t SERIAL_WORK = 192 * 1024;

struct alignas(64) Counter {
    std::atomic<int64_t> next;
    int64_t end;
};

// body(block) for every block. Each thread owns a contiguous run, so that a stream of weights stays a stream, and takes
// from the others' runs when its own is finished: a thread that lost its core does not hold up the rest.
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

// Scratch of the calling thread; keeps its memory between calls. One slot per purpose that is alive at the same time.
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
