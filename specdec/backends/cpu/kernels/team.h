// Distributes blocks of work over a team of threads. A block writes only its own outputs, so scheduling never changes
// the bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace specdec {

// Waking the threads costs some microseconds: below this much work (bytes read, or a quarter of the multiply-adds,
// whichever is more) the calling thread alone is faster.
constexpr int64_t SERIAL_WORK = 64 * 1024;

// Calls work(body, block) for every block, on the calling thread and on up to threads - 1 others (team.cpp).
void run_blocks(int threads, int64_t blocks, void (*work)(const void* body, int64_t block), const void* body);

// Calls body(block) for every block.
template <class F> void for_blocks(int threads, int64_t blocks, const F& body) {
    if (threads <= 1 || blocks <= 1) {
        for (int64_t b = 0; b < blocks; ++b) body(b);
        return;
    }
    run_blocks(threads, blocks, [](const void* f, int64_t block) { (*static_cast<const F*>(f))(block); }, &body);
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
