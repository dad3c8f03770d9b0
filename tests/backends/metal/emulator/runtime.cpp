// Runs a kernel: guarded buffers, and one fiber per lane of a simdgroup, one simdgroup after the other.
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

extern "C" {
struct Buffer {  // as in driver.py
  const char* name;
  void* host;  // copied in (inputs) or out (outputs)
  uint64_t bytes;
  uint32_t item;   // bytes of an element
  int32_t poison;  // the byte that an output is filled with; -1: an input
};
typedef void (*Entry)(void* const* buffers, uint32_t x, uint32_t y, uint32_t z);

uint64_t emu_shuffle(uint64_t value, uint32_t mask, int line);
const char* emu_run(Entry entry, const Buffer* buffers, int count, const uint32_t* grid, uint32_t order, uint32_t seed);
}

namespace {

constexpr unsigned LANES = 32;
constexpr size_t STACK = 128 * 1024;
constexpr size_t RESERVE = 1 << 20;    // of unmapped addresses on both sides of a buffer
constexpr unsigned char GUARD = 0xFF;  // NaN in every float type
const size_t PAGE = size_t(sysconf(_SC_PAGESIZE));

// ---------------------------------------------------------------------------------------------------------- fibers

struct Fiber {
  uint32_t x, y, z;  // in the grid
  uint64_t value;    // that it shows to the lane that it meets
  int line;          // of the kernel's text, where it waits; 0: it has returned
  bool started;
  ucontext_t context;
  jmp_buf place;
};

Fiber fibers[LANES];
Fiber* running = nullptr;
uint64_t shown[LANES];  // the values of the latest meeting
jmp_buf scheduler;
char* stacks = nullptr;
Entry entry_point;
std::vector<void*> arguments;

char message[512];
sigjmp_buf escape;

// Report what a thread, or with none the launch, did.
__attribute__((format(printf, 2, 3))) [[noreturn]] void fail(const Fiber* thread, const char* format, ...) {
  int at = 0;
  if (thread) at = snprintf(message, sizeof message, "thread (%u, %u, %u) ", thread->x, thread->y, thread->z);
  va_list list;
  va_start(list, format);
  vsnprintf(message + at, sizeof message - size_t(at), format, list);
  va_end(list);
  for (Fiber& fiber : fibers) fiber.started = false;  // they stand anywhere
  running = nullptr;
  siglongjmp(escape, 1);
}

// ucontext starts a fiber; it would save the signal mask with a system call at every later switch.
__attribute__((noinline)) void to_scheduler() {
  if (!_setjmp(running->place)) _longjmp(scheduler, 1);
}

void fiber_main() {
  for (;;) {
    entry_point(arguments.data(), running->x, running->y, running->z);
    running->line = 0;
    to_scheduler();
  }
}

__attribute__((noinline)) void to_fiber(Fiber& fiber) {
  running = &fiber;
  if (!_setjmp(scheduler)) {
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks + size_t(&fiber - fibers) * STACK + PAGE;
    fiber.context.uc_stack.ss_size = STACK - PAGE;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
    setcontext(&fiber.context);
  }
  running = nullptr;
}

void make_stacks() {
  if (stacks) return;
  void* made = mmap(nullptr, LANES * STACK, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (made == MAP_FAILED) fail(nullptr, "cannot be given its stacks");
  stacks = static_cast<char*>(made);
  for (unsigned i = 0; i < LANES; ++i) mprotect(stacks + i * STACK, PAGE, PROT_NONE);
}

// ---------------------------------------------------------------------------------------------------------- buffers

struct Mapping {
  Buffer buffer;
  char* base = nullptr;  // of the whole reservation
  size_t reserved = 0;
  char* open = nullptr;  // the pages that can be read
  char* data = nullptr;

  // The data end right before unmapped memory; what is left of their pages holds guard bytes.
  void make(const Buffer& given) {
    buffer = given;
    size_t kept = (buffer.bytes + buffer.item - 1) / buffer.item * buffer.item;
    size_t open_bytes = (std::max<size_t>(kept, 1) + PAGE - 1) / PAGE * PAGE;
    reserved = open_bytes + 2 * RESERVE;
    void* made = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) fail(nullptr, "cannot be given its buffers");
    base = static_cast<char*>(made);
    open = base + RESERVE;
    data = open + open_bytes - kept;
    mprotect(open, open_bytes, PROT_READ | PROT_WRITE);
    memset(open, GUARD, open_bytes);
    if (buffer.poison < 0) {
      memcpy(data, buffer.host, buffer.bytes);
      mprotect(open, open_bytes, PROT_READ);
    } else {
      memset(data, buffer.poison, buffer.bytes);
    }
  }

  long element(const char* at) const {
    long item = long(buffer.item), offset = at - data;
    return offset >= 0 ? offset / item : -((item - 1 - offset) / item);
  }

  // Copy an output to the host, after a look at its guard bytes. Inputs cannot be written at all.
  void finish() const {
    if (buffer.poison < 0) return;
    for (const char* at = data; at-- > open;)
      if (static_cast<unsigned char>(*at) != GUARD)
        fail(nullptr, "writes %s[%ld] of %zu elements", buffer.name, element(at), size_t(buffer.bytes / buffer.item));
    memcpy(buffer.host, data, buffer.bytes);
  }
};

std::vector<Mapping> mappings;

// ---------------------------------------------------------------------------------------------------------- signals

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGILL};
struct sigaction old_actions[3];

void restore_signals() {
  for (int i = 0; i < 3; ++i) sigaction(SIGNALS[i], &old_actions[i], nullptr);
}

void on_fault(int number, siginfo_t* info, void* context) {
  if (!running) return restore_signals();  // not a kernel's: it comes again, for whoever was there
  if (number == SIGILL) fail(running, "computes, converts or indexes what has no defined result");
  const char* does = "reads or writes";
#if defined(__x86_64__)
  does = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2 ? "writes" : "reads";
#endif
  (void)context;
  auto at = static_cast<const char*>(info->si_addr);
  for (const Mapping& m : mappings) {
    if (at < m.base || at >= m.base + m.reserved) continue;
    bool input = at >= m.data && at < m.data + m.buffer.bytes;
    fail(running, "%s %s%s[%ld] of %zu elements", input ? "writes" : does, input ? "the input " : "", m.buffer.name,
         m.element(at), size_t(m.buffer.bytes / m.buffer.item));
  }
  fail(running, "%s an address that belongs to no buffer", does);
}

// -------------------------------------------------------------------------------------------------------- scheduler

// Every lane runs until it waits for the others or has returned; then all must be at the same place.
void run_simdgroup(std::vector<unsigned>& lanes, std::mt19937* random) {
  do {
    if (random) std::shuffle(lanes.begin(), lanes.end(), *random);
    for (unsigned lane : lanes) to_fiber(fibers[lane]);
    for (unsigned i = 0; i < LANES; ++i) {
      const Fiber &one = fibers[i], &other = fibers[(i + 1) % LANES];
      shown[i] = one.value;
      if (one.line == other.line || !one.line) continue;
      const char* where = other.line ? "waits at another line" : "has returned";
      fail(&one, "waits in simd_shuffle_xor at line %d, and thread (%u, %u, %u) %s", one.line, other.x, other.y,
           other.z, where);
    }
  } while (fibers[0].line);
}

void launch(const Buffer* buffers, int count, const uint32_t* grid, uint32_t order, uint32_t seed) {
  make_stacks();
  mappings.resize(size_t(count));
  arguments.clear();
  for (int i = 0; i < count; ++i) {
    mappings[size_t(i)].make(buffers[i]);
    arguments.push_back(mappings[size_t(i)].data);
  }
  static std::mt19937 random;  // static, as an error leaves without destructors
  static std::vector<unsigned> lanes, groups;
  random.seed(seed);
  lanes.resize(LANES);
  groups.resize(size_t(grid[0] / LANES) * grid[1] * grid[2]);
  for (auto* turns : {&lanes, &groups}) {
    std::iota(turns->begin(), turns->end(), 0);
    if (order == 1) std::reverse(turns->begin(), turns->end());
    if (order == 2) std::shuffle(turns->begin(), turns->end(), random);
  }
  for (unsigned group : groups) {
    unsigned across = grid[0] / LANES, x = group % across, y = group / across % grid[1], z = group / across / grid[1];
    for (unsigned i = 0; i < LANES; ++i) fibers[i].x = x * LANES + i, fibers[i].y = y, fibers[i].z = z;
    run_simdgroup(lanes, order == 2 ? &random : nullptr);
  }
  for (const Mapping& mapping : mappings) mapping.finish();
}

}  // namespace

// Called by a kernel: the value of the lane whose number differs by the bits of the mask.
uint64_t emu_shuffle(uint64_t value, uint32_t mask, int line) {
  running->value = value;
  running->line = line;
  to_scheduler();
  return shown[(unsigned(running - fibers) ^ mask) % LANES];
}

// What went wrong, or null.
const char* emu_run(Entry entry, const Buffer* buffers, int count, const uint32_t* grid, uint32_t order, uint32_t seed) {
  static char signal_stack[64 * 1024];
  stack_t ours{}, old{};
  ours.ss_sp = signal_stack;
  ours.ss_size = sizeof signal_stack;
  sigaltstack(&ours, &old);
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int i = 0; i < 3; ++i) sigaction(SIGNALS[i], &action, &old_actions[i]);
  message[0] = 0;
  entry_point = entry;
  if (!sigsetjmp(escape, 1)) launch(buffers, count, grid, order, seed);
  for (Mapping& mapping : mappings)
    if (mapping.base) munmap(mapping.base, mapping.reserved);
  mappings.clear();
  restore_signals();
  sigaltstack(&old, nullptr);
  return message[0] ? message : nullptr;
}
