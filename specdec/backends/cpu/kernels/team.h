// Distributes blocks of work over a team of threads. A block writes only its own outputs, so scheduling never changes
// the bits.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace specdec {

// Waking the threads costs some microseconds: below this much work (bytes read, or a quarter of the multiply-adds,
// whichever is more) the calling thread alone is faster.
constexpr int64_t SERIAL_WORK = 64 * 1024;

// Contiguous blocks of a job that are still to be taken.
struct alignas(64) Run {
    std::atomic<int64_t> next;
    int64_t end;
};

// The blocks that one thread takes: those of a run of its own, which keeps its reads of weights sequential, and then
// blocks of other runs.
struct Share {
    Run* runs;
    int count, own, done = 0;

    // The next block, or -1.
    int64_t take() {
        for (; done < count; ++done) {
            Run& run = runs[(own + done) % count];
            const int64_t block = run.next.fetch_add(1, std::memory_order_relaxed);
            if (block < run.end) return block;
        }
        return -1;
    }
};

typedef void (*Work)(const void* body, Share& share);

// Calls work(body, share) on the calling thread and on up to threads - 1 others (team.cpp).
void run_shares(int threads, int64_t blocks, Work work, const void* body);

// Calls body(share) on each thread that takes part.
template <class F> void for_shares(int threads, int64_t blocks, const F& body) {
    run_shares(threads, blocks, [](const void* f, Share& share) { (*static_cast<const F*>(f))(share); }, &body);
}

// Calls body(block) for every block.
template <class F> void for_blocks(int threads, int64_t blocks, const F& body) {
    if (threads <= 1) {
        for (int64_t b = 0; b < blocks; ++b) body(b);
        return;
    }
    for_shares(threads, blocks, [&](Share& share) {
        for (int64_t block; (block = share.take()) >= 0;) body(block);
    });
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
