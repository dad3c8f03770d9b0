// The team of threads that run blocks: one for the process, started on first use.
//
// Work is taken, not assigned. The calling thread opens a job, takes blocks itself, closes the job when no block is
// left, and waits only for members that are inside one. A member that the system runs late, or not at all, finds the
// job closed and delays nothing.
//
// A caller that finds the team at work for another one, or calls from inside a block, works alone.

#include "team.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <system_error>
#include <thread>
#if defined(__unix__) || defined(__APPLE__)
#define POSIX
#include <pthread.h>
#include <signal.h>
#endif

#include "vectors.h"

namespace specdec {

constexpr int MAX_THREADS = 256;

using Nanoseconds = int64_t;
constexpr Nanoseconds MICROSECOND = 1000, MILLISECOND = 1000 * MICROSECOND;
constexpr Nanoseconds MEMBER_SPINS = 100 * MICROSECOND;  // for the next job: longer than Python takes between passes
constexpr Nanoseconds CALLER_SPINS = 20 * MICROSECOND;   // for members inside a block

INLINE void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

INLINE Nanoseconds now() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

// Spins until ready() or until the time is over; returns ready().
template <class F> INLINE bool spin(Nanoseconds longest, F&& ready) {
    Nanoseconds end = 0;
    for (int i = 0;; ++i) {
        if (ready()) return true;
        relax();
        if (i % 64 != 63) continue;
        const Nanoseconds time = now();
        if (end == 0) end = time + longest;
        if (time > end) return ready();
    }
}

// Signals are for the program's own threads.
void leave_signals() {
#ifdef POSIX
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
#endif
}

class Team {
  public:
    void run(int threads, int64_t blocks, Work work, const void* body) {
        threads = std::min<int64_t>(std::min(threads, MAX_THREADS), blocks);
        if (threads <= 1 || busy_.test_and_set(std::memory_order_acquire)) {
            Run all = {0, blocks};
            Share share = {&all, 1, 0};
            return work(body, share);
        }
        start_members(threads - 1);
        work_ = work;
        body_ = body;
        threads_ = threads;
        for (int i = 0; i < threads; ++i) {
            runs_[i].next.store(blocks * i / threads, std::memory_order_relaxed);
            runs_[i].end = blocks * (i + 1) / threads;
        }
        const uint32_t job = job_.load(std::memory_order_relaxed) + 1;
        gate_.store((uint64_t)job << 32 | OPEN, std::memory_order_release);
        job_.store(job);
        job_.notify_all();
        take(0);
        if (gate_.fetch_and(~OPEN, std::memory_order_acq_rel) & COUNT) wait(job);
        busy_.clear(std::memory_order_release);
    }

  private:
    static constexpr uint64_t OPEN = 1ull << 31, COUNT = OPEN - 1;

    // Whether the job is open, and how many members are inside: job << 32 | OPEN | count.
    alignas(64) std::atomic<uint64_t> gate_{0};
    alignas(64) std::atomic<uint32_t> job_{0};   // the last one opened; idle members wait for the next
    alignas(64) std::atomic<uint32_t> left_{0};  // the last one that members left after it was closed
    alignas(64) std::atomic_flag busy_ = ATOMIC_FLAG_INIT;

    // Of the job; written by the caller while no member is inside.
    Work work_ = nullptr;
    const void* body_ = nullptr;
    int threads_ = 0;
    Run runs_[MAX_THREADS];

    int members_ = 0;  // started so far

    void take(int own) {
        Share share = {runs_, threads_, own};
        work_(body_, share);
    }

    void wait(uint32_t job) {
        const auto empty = [&] { return (gate_.load(std::memory_order_acquire) & COUNT) == 0; };
        if (spin(CALLER_SPINS, empty)) return;
        while (!empty()) {
            const uint32_t left = left_.load();
            if (left != job) left_.wait(left);
        }
    }

    void start_members(int wanted) {
        while (members_ < wanted) {
            try {
                std::thread(&Team::member, this, members_ + 1, job_.load()).detach();
            } catch (const std::system_error&) {  // the system gives no more threads
                return;
            }
            ++members_;
        }
    }

    [[noreturn]] void member(int own, uint32_t seen) {
        leave_signals();
        for (;;) {
            const auto opened = [&] { return job_.load(std::memory_order_acquire) != seen; };
            if (!spin(MEMBER_SPINS, opened)) job_.wait(seen);
            seen = job_.load(std::memory_order_acquire);
            uint64_t gate = gate_.load(std::memory_order_acquire);
            bool entered = false;
            while (!entered && gate & OPEN && gate >> 32 == seen)
                entered = gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel);
            if (!entered) continue;
            if (own < threads_) take(own);
            if (((gate_.fetch_sub(1, std::memory_order_acq_rel) - 1) & (OPEN | COUNT)) == 0) {
                left_.store(seen);
                left_.notify_one();
            }
        }
    }
};

// Never destroyed: its members wait in it until the process ends.
std::atomic<Team*> team{nullptr};

// Threads do not survive a fork: the child starts a team of its own.
void forget_team() { team.store(new Team); }

Team& the_team() {
    static const bool made = [] {
        team.store(new Team);
#ifdef POSIX
        pthread_atfork(nullptr, nullptr, forget_team);
#endif
        return true;
    }();
    (void)made;
    return *team.load(std::memory_order_acquire);
}

void run_shares(int threads, int64_t blocks, Work work, const void* body) {
    the_team().run(threads, blocks, work, body);
}

}  // namespace specdec
