// Replays recorded passes: sequences of kernel calls without Python in between (specdec/backends/cpu/tape.py).
//
// An argument is value + slots[slot]: a constant plus a slot that the caller fills before each pass (addresses of
// caches and outputs, lengths). slots[0] is 0. In a pass over several sequences each has slots of its own, and the steps
// that read a cache run once per sequence; arguments also depend on the rows of the pass, on the sequence's first row and
// on its number of rows.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "team.h"
#include "vectors.h"

namespace specdec {

constexpr int64_t MAX_ARGUMENTS = 24, MAX_TABLES = 4, MAX_ENTRIES = 16;
constexpr int64_t TABLE = -1;  // as a slot: the argument is the address of an array of arguments
// as in tape.py
enum Slot {
    HIDDEN = 3, TOKENS = 4, OUT = 5, THREADS = 6, ROW = 8, BEST = 10, CHOICE = 11,
    SEQUENCES = 22, WIDTH = 23, ALL_ROWS = 24, FIRST_ROW = 25, OWN_ROWS = 26, FIRST_CACHE = 27, PER_CACHE = 4
};

constexpr int64_t CHOICE_FIRST = 19, CHOICE_POSITION = 20;  // fields of a Choice, as in choice.cpp

struct Argument {
    int64_t slot;
    int64_t value;  // TABLE: 256 * first entry + entries
    int64_t by_rows, per_row_before, per_row;  // added for each row of the pass, before the sequence's, of its own
};

using Caller = int64_t (*)(void* function, const int64_t* arguments);

struct Step {
    int64_t caller, function;
    int64_t first, count;  // of its arguments
    int64_t each;          // whether it runs once per sequence
};

// --- calls by signature: p pointer, i int64, f float ------------------------------------------------------------------

template <char C> struct Letter;
template <> struct Letter<'p'> {
    using type = const void*;
    static type of(int64_t bits) { return reinterpret_cast<const void*>(bits); }
};
template <> struct Letter<'i'> {
    using type = int64_t;
    static type of(int64_t bits) { return bits; }
};
template <> struct Letter<'f'> {
    using type = float;
    static type of(int64_t bits) {
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
};

template <class Result, const char* SIGNATURE, class Index> struct Call;
template <class Result, const char* SIGNATURE, size_t... I> struct Call<Result, SIGNATURE, std::index_sequence<I...>> {
    // -1 for a function without a result
    static int64_t run(void* function, const int64_t* a) {
        const auto call = reinterpret_cast<Result (*)(typename Letter<SIGNATURE[I]>::type...)>(function);
        if constexpr (std::is_void_v<Result>) {
            call(Letter<SIGNATURE[I]>::of(a[I])...);
            return -1;
        } else {
            return call(Letter<SIGNATURE[I]>::of(a[I])...);
        }
    }
};

#define SIGNATURES(X)                                                                                                  \
    X(project, void, "piiiipppppi")                                                                                    \
    X(linear, void, "piiipiipipi")                                                                                      \
    X(gated, void, "piiipipiiipi")                                                                                     \
    X(head, void, "piiipiipi")                                                                                         \
    X(choose_rows, void, "piipippi")                                                                                   \
    X(layer_norm, void, "piiippfpi")                                                                                   \
    X(gelu, void, "piiipi")                                                                                            \
    X(scale, void, "piiiffiipi")                                                                                       \
    X(add, void, "pipiiipi")                                                                                           \
    X(rms_norm, void, "piiipfpi")                                                                                      \
    X(norm_rope, void, "piiiiipfpiipi")                                                                                \
    X(gated_rms_norm, void, "piipiiiiipfpi")                                                                           \
    X(attend, void, "piipiipiipppiiiiiiiifppi")                                                                        \
    X(conv_window, void, "ppiiipippi")                                                                                 \
    X(gated_delta, void, "iiiipppppppipi")                                                                             \
    X(copy_rows, void, "pipiii")                                                                                       \
    X(keep_window, void, "ppiii")                                                                                      \
    X(embed_rows, int64_t, "piiipiip")

#define NAMED(NAME, RESULT, TEXT)                                                                                      \
    static constexpr char NAME##_signature[] = TEXT;                                                                   \
    static_assert(sizeof(TEXT) - 1 <= MAX_ARGUMENTS, TEXT);
SIGNATURES(NAMED)

Caller caller_of(const char* signature, bool has_result) {
#define MATCH(NAME, RESULT, TEXT)                                                                                      \
    if (has_result != std::is_void_v<RESULT> && !std::strcmp(signature, TEXT))                                         \
        return Call<RESULT, NAME##_signature, std::make_index_sequence<sizeof(TEXT) - 1>>::run;
    SIGNATURES(MATCH)
    return nullptr;
}

// Runs a step, over the sequence whose slots come `at` slots after those of the first.
// BOUND: the arguments depend on no rows.
template <bool BOUND>
INLINE int64_t run_step(const Step& step, const Argument* arguments, const int64_t* slots, int64_t at = 0) {
    int64_t values[MAX_ARGUMENTS], room[MAX_TABLES][MAX_ENTRIES];
    const int64_t all = slots[ALL_ROWS], before = slots[FIRST_ROW + at], rows = slots[OWN_ROWS + at];
    const auto value = [&](const Argument& a) {
        if (BOUND) return slots[a.slot] + a.value;
        return slots[a.slot < FIRST_ROW ? a.slot : a.slot + at] + a.value + all * a.by_rows +
               before * a.per_row_before + rows * a.per_row;
    };
    int64_t tables = 0;
    for (int64_t i = 0; i < step.count; ++i) {
        const Argument& a = arguments[step.first + i];
        if (a.slot != TABLE) {
            values[i] = value(a);
            continue;
        }
        const Argument* entries = arguments + a.value / 256;
        for (int64_t j = 0; j < a.value % 256; ++j) room[tables][j] = value(entries[j]);
        values[i] = reinterpret_cast<int64_t>(room[tables++]);
    }
    return reinterpret_cast<Caller>(step.caller)(reinterpret_cast<void*>(step.function), values);
}

// How many threads share the sequences: all, each with whole sequences, if that keeps them about equally busy; else
// one, and the kernels share each sequence's work among all. The work of a row is taken to be the committed rows and a
// constant.
int threads_for_sequences(const int64_t* slots) {
    constexpr int64_t CONSTANT = 512;
    int64_t longest = 0, sum = 0;
    for (int64_t i = 0; i < slots[SEQUENCES]; ++i) {
        const int64_t* own = slots + i * slots[WIDTH];
        const int64_t work = own[OWN_ROWS] * (own[FIRST_CACHE] + CONSTANT);
        longest = std::max(longest, work);
        sum += work;
    }
    const int64_t turns = (slots[SEQUENCES] + slots[THREADS] - 1) / slots[THREADS];
    return 5 * turns * longest * slots[THREADS] <= 7 * sum ? (int)slots[THREADS] : 1;
}

// Runs the steps in order; those in a row that run once per sequence, sequence by sequence. A step that returns a
// number >= 0 has failed: the run ends and gives its index; -1 otherwise.
int64_t run(const Step* steps, int64_t count, const Argument* arguments, const int64_t* slots) {
    if (!slots[ALL_ROWS]) {
        for (int64_t s = 0; s < count; ++s)
            if (run_step<true>(steps[s], arguments, slots) >= 0) return s;
        return -1;
    }
    const int threads = slots[SEQUENCES] ? threads_for_sequences(slots) : 1;
    for (int64_t s = 0; s < count; ++s) {
        if (!steps[s].each) {
            if (run_step<false>(steps[s], arguments, slots) >= 0) return s;
            continue;
        }
        const int64_t first = s;
        while (s + 1 < count && steps[s + 1].each) ++s;
        std::atomic<int64_t> failed{-1};
        for_blocks(threads, slots[SEQUENCES], [&](int64_t sequence) {
            for (int64_t i = first; i <= s; ++i)
                if (run_step<false>(steps[i], arguments, slots, sequence * slots[WIDTH]) >= 0) return failed.store(i);
        });
        if (failed >= 0) return failed;
    }
    return -1;
}

struct Program {
    const Step* steps;
    int64_t count;
    const Argument* arguments;
};

// Runs a pass of `rows` rows and then depth - 1 passes of one row, each followed by `best`, which writes the token for
// the row in slot ROW to slot BEST. A pass takes the token and the output row of the one before it; outputs are
// contiguous from slot OUT on. The position and the number of drafted tokens of a choice (slot CHOICE, see choice.cpp)
// advance. Returns the number of tokens: fewer than `depth` if the next is
// negative (no token is allowed, or the logits were not finite) or its pass failed. Slots of lengths are advanced for
// every pass that was followed by another.
int64_t chain(const Program& first, const Program& next, const Program& best, int64_t* slots, int64_t caches,
              int64_t rows, int64_t depth, int64_t row_bytes, int64_t* tokens) {
    const auto play = [&](const Program& p) { return run(p.steps, p.count, p.arguments, slots); };
    slots[ROW] = slots[OUT] + (rows - 1) * row_bytes;
    for (int64_t step = 0;; ++step) {
        if (play(step ? next : first) >= 0) return step;
        slots[BEST] = (int64_t)(tokens + step);
        play(best);
        auto* choice = (int64_t*)slots[CHOICE];
        ++choice[CHOICE_FIRST];
        ++choice[CHOICE_POSITION];
        if (tokens[step] < 0) return step;
        if (step == depth - 1) return depth;
        for (int64_t c = 0; c < caches; ++c) slots[FIRST_CACHE + PER_CACHE * c] += step ? 1 : rows;
        slots[TOKENS] = slots[BEST];
        slots[HIDDEN] = slots[ROW];
        slots[OUT] = slots[ROW] = slots[ROW] + row_bytes;
    }
}

}  // namespace specdec

EXPORT void* tape_caller(const char* signature, int64_t has_result) {
    return reinterpret_cast<void*>(specdec::caller_of(signature, has_result != 0));
}

EXPORT int64_t tape_run(const void* steps, int64_t count, const void* arguments, const void* slots) {
    return specdec::run((const specdec::Step*)steps, count, (const specdec::Argument*)arguments, (const int64_t*)slots);
}

// `programs`: three, as in chain().
EXPORT int64_t tape_chain(const void* programs, void* slots, int64_t caches, int64_t rows, int64_t depth,
                          int64_t row_bytes, void* tokens) {
    const auto* p = (const specdec::Program*)programs;
    return specdec::chain(p[0], p[1], p[2], (int64_t*)slots, caches, rows, depth, row_bytes, (int64_t*)tokens);
}

// Copies rows of `bytes` bytes from one stride to another.
EXPORT void copy_rows(const void* from, int64_t from_stride, void* to, int64_t to_stride, int64_t bytes, int64_t rows) {
    for (int64_t t = 0; t < rows; ++t)
        std::memcpy((char*)to + t * to_stride, (const char*)from + t * from_stride, bytes);
}

// Updates the convolution window after `kept` rows of a pass: copies `rows` rows of `raw`, from row `kept` on.
EXPORT void keep_window(const void* raw, void* window, int64_t kept, int64_t row_bytes, int64_t rows) {
    std::memcpy(window, (const char*)raw + kept * row_bytes, rows * row_bytes);
}
