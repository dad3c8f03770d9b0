// Runs a kernel: guarded buffers, one fiber per thread, and the meetings of lanes.
#include "runtime.h"

#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <vector>

// ucontext saves the signal mask with a system call at every switch; x86-64 has a switch of its own
#if defined(__x86_64__) && !defined(EMU_UCONTEXT)
#define EMU_OWN_SWITCH 1
#else
#define EMU_OWN_SWITCH 0
#endif

using namespace emu;

emu::Thread* emu_thread = nullptr;
emu::Knobs emu_knobs;

namespace {

constexpr size_t STACK = 128 * 1024;
constexpr size_t RESERVE = 1 << 20;  // of unmapped addresses on both sides of a buffer
constexpr unsigned char GUARD = 0xFF;  // NaN in every float type

size_t page() {
  static const size_t bytes = size_t(sysconf(_SC_PAGESIZE));
  return bytes;
}
size_t whole_pages(size_t bytes) { return (bytes + page() - 1) / page() * page(); }

// ---------------------------------------------------------------------------------------------------------- fibers

enum class State : uint8_t { READY, COLLECTIVE, DONE };

struct Fiber {
  Thread thread;
  State state;
  const char* kind;  // what it waits in
  int line;
#if EMU_OWN_SWITCH
  void* stack_pointer;
#else
  ucontext_t context;
#endif
};

Fiber* fibers = nullptr;
Fiber* running = nullptr;
char* stacks = nullptr;
Simdgroup simdgroups[MAX_THREADS / LANES];
Entry entry_point;
void* const* arguments;
unsigned live_threads;

#if EMU_OWN_SWITCH
void* scheduler_pointer;
extern "C" void emu_switch(void** save, void* load);
// Callee-saved registers only: a call has saved the rest. The rounding mode never changes.
asm(R"(
.text
.type emu_switch,@function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch,.-emu_switch
)");
void to_scheduler() { emu_switch(&running->stack_pointer, scheduler_pointer); }
void to_fiber(Fiber& fiber) { emu_switch(&scheduler_pointer, fiber.stack_pointer); }
#else
ucontext_t scheduler_context;
void to_scheduler() { swapcontext(&running->context, &scheduler_context); }
void to_fiber(Fiber& fiber) { swapcontext(&scheduler_context, &fiber.context); }
#endif

void fiber_main() {
  entry_point(arguments, running->thread);
  running->state = State::DONE;
  to_scheduler();
  abort();  // a finished fiber is not resumed
}

void prepare(Fiber& fiber, size_t index) {
  char* stack = stacks + index * STACK;
#if EMU_OWN_SWITCH
  void** top = reinterpret_cast<void**>(stack + STACK) - 1;
  *top = nullptr;  // the return address of fiber_main, 8 bytes off a multiple of 16 as after any call
  *--top = reinterpret_cast<void*>(fiber_main);
  fiber.stack_pointer = top - 6;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack + page();
  fiber.context.uc_stack.ss_size = STACK - page();
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, fiber_main, 0);
#endif
}

bool make_stacks() {
  if (stacks) return true;
  void* made = mmap(nullptr, MAX_THREADS * STACK, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (made == MAP_FAILED) return false;
  stacks = static_cast<char*>(made);
  for (unsigned i = 0; i < MAX_THREADS; ++i) mprotect(stacks + i * STACK, page(), PROT_NONE);
  fibers = new Fiber[MAX_THREADS];
  return true;
}

// ---------------------------------------------------------------------------------------------------------- reports

Report* report;
sigjmp_buf escape;

void blame(const Fiber& fiber) {
  report->has_thread = 1;
  report->threadgroup = fiber.thread.threadgroup_position;
  report->thread = fiber.thread.position_in_threadgroup;
}

void blame_other(const Fiber& fiber) {
  report->has_other = 1;
  report->other_thread = fiber.thread.position_in_threadgroup;
}

void describe(Kind kind, const char* format, ...) __attribute__((format(printf, 2, 3)));
void describe(Kind kind, const char* format, ...) {
  va_list list;
  va_start(list, format);
  report->kind = kind;
  vsnprintf(report->what, sizeof report->what, format, list);
  va_end(list);
}

[[noreturn]] void leave() { siglongjmp(escape, 1); }

// ---------------------------------------------------------------------------------------------------------- buffers

struct Mapping {
  char* base = nullptr;    // of the whole reservation
  size_t reserved = 0;
  char* open = nullptr;    // the pages that can be read
  size_t open_bytes = 0;
  char* data = nullptr;
  size_t bytes = 0;
  bool written = false;
  size_t item = 1;

  // The data end right before unmapped memory, or begin right behind it; what is left of their pages is guard bytes.
  bool make(const Buffer& buffer, bool front) {
    bytes = buffer.bytes;
    written = buffer.written;
    item = buffer.item;
    size_t kept = (bytes + buffer.align - 1) / buffer.align * buffer.align;
    open_bytes = whole_pages(std::max<size_t>(kept, 1));
    reserved = open_bytes + 2 * RESERVE;
    void* made = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) return false;
    base = static_cast<char*>(made);
    open = base + RESERVE;
    if (mprotect(open, open_bytes, PROT_READ | PROT_WRITE)) return false;
    data = front ? open : open + open_bytes - kept;
    memset(open, GUARD, open_bytes);
    if (written)
      memset(data, int(buffer.poison), bytes);
    else
      memcpy(data, buffer.host, bytes);
    return written || !mprotect(open, open_bytes, PROT_READ);
  }

  // The first damaged guard byte, as an offset from the data, or 0 when all are whole (0 is a byte of the data).
  int64_t damage() const {
    for (const char* at = data + bytes; at < open + open_bytes; ++at)
      if (static_cast<unsigned char>(*at) != GUARD) return at - data;
    for (const char* at = data; at-- > open;)
      if (static_cast<unsigned char>(*at) != GUARD) return at - data;
    return 0;
  }

  void drop() {
    if (base) munmap(base, reserved);
    base = nullptr;
  }
};

std::vector<Mapping> mappings;

int64_t element_of(const Mapping& m, int64_t offset) {
  int64_t item = int64_t(m.item);
  return offset >= 0 ? offset / item : -((-offset + item - 1) / item);
}

// ---------------------------------------------------------------------------------------------------------- signals

struct sigaction old_segv, old_bus, old_timer;
pthread_t runner;
char* signal_stack = nullptr;
constexpr size_t SIGNAL_STACK = 64 * 1024;

void on_fault(int number, siginfo_t* info, void* context) {
  if (!running) {  // not a kernel's: hand it to whoever was there
    sigaction(SIGSEGV, &old_segv, nullptr);
    sigaction(SIGBUS, &old_bus, nullptr);
    return;
  }
  auto* machine = static_cast<ucontext_t*>(context);
  const char* does = "reads or writes";
#if defined(__x86_64__)
  report->pc = uint64_t(machine->uc_mcontext.gregs[REG_RIP]) + 1;  // like a return address: one past
  does = machine->uc_mcontext.gregs[REG_ERR] & 2 ? "writes" : "reads";
#elif defined(__aarch64__)
  report->pc = uint64_t(machine->uc_mcontext.pc) + 1;
#endif
  (void)machine;
  (void)number;
  blame(*running);
  auto at = static_cast<const char*>(info->si_addr);
  for (size_t i = 0; i < mappings.size(); ++i) {
    const Mapping& m = mappings[i];
    if (at < m.base || at >= m.base + m.reserved) continue;
    report->buffer = int(i);
    report->element = element_of(m, at - m.data);
    bool in_data = at >= m.data && at < m.data + m.bytes;
    describe(OUT_OF_BOUNDS, in_data ? "writes the input {buffer}{at}" : "%s {buffer}{at}", does);
    leave();
  }
  if (stacks && at >= stacks && at < stacks + MAX_THREADS * STACK)
    describe(RESOURCES, "uses more than %zu bytes of stack{at}", STACK - page());
  else
    describe(FAULT, "%s an address that belongs to no buffer{at}", does);
  leave();
}

void on_timer(int, siginfo_t*, void*) {
  if (!pthread_equal(pthread_self(), runner)) {
    pthread_kill(runner, SIGVTALRM);
  } else if (running) {  // else between two threads; the timer comes again
    blame(*running);
    describe(ENDLESS, "still runs after %u s of processor time", emu_knobs.seconds);
    leave();
  }
}

// -------------------------------------------------------------------------------------------------------- scheduler

// Nobody can go on: name two threads that wait for each other.
[[noreturn]] void stuck() {
  const Fiber* first = nullptr;
  for (unsigned i = 0; i < live_threads && !first; ++i)
    if (fibers[i].state != State::DONE) first = &fibers[i];
  unsigned from = first->thread.simdgroup_index * LANES, to = std::min(from + LANES, live_threads);
  const Fiber* second = nullptr;
  for (unsigned i = from; i < to && !second; ++i)
    if (&fibers[i] != first && (fibers[i].state != first->state || fibers[i].line != first->line)) second = &fibers[i];
  if (!second) second = first;
  blame(*first);
  blame_other(*second);
  report->line = first->line;
  bool done = second->state == State::DONE;
  report->other_line = done ? 0 : second->line;
  describe(DIVERGENCE, "waits in %s{at}, and thread {other} %s%s{other_at}: not all threads of the simdgroup reach the same one",
           first->kind, done ? "" : "waits in ", done ? "has returned" : second->kind);
  leave();
}

void check_guards(const Fiber* fiber) {
  for (size_t i = 0; i < mappings.size(); ++i) {
    if (!mappings[i].written) continue;  // cannot be written at all
    int64_t offset = mappings[i].damage();
    if (!offset) continue;
    if (fiber) blame(*fiber);
    report->buffer = int(i);
    report->element = element_of(mappings[i], offset);
    describe(OUT_OF_BOUNDS, "writes {buffer}");
    leave();
  }
}

uint32_t product(const Size& size) { return size.x * size.y * size.z; }

void run_threadgroup(const Size& grid, const Size& block, const Size& at, std::mt19937& random, bool check_slices) {
  Size blocks{(grid.x + block.x - 1) / block.x, (grid.y + block.y - 1) / block.y, (grid.z + block.z - 1) / block.z};
  Size size{std::min(block.x, grid.x - at.x * block.x), std::min(block.y, grid.y - at.y * block.y),
            std::min(block.z, grid.z - at.z * block.z)};
  live_threads = product(size);
  unsigned groups = (live_threads + LANES - 1) / LANES;
  for (unsigned g = 0; g < groups; ++g) {
    simdgroups[g].lanes = std::min(LANES, live_threads - g * LANES);
    simdgroups[g].arrived = 0;
  }
  for (unsigned i = 0; i < live_threads; ++i) {
    Thread& t = fibers[i].thread;
    Size p{i % size.x, i / size.x % size.y, i / (size.x * size.y)};
    t.position_in_threadgroup = p;
    t.threadgroup_position = at;
    t.position_in_grid = {at.x * block.x + p.x, at.y * block.y + p.y, at.z * block.z + p.z};
    t.threads_per_grid = grid;
    t.threadgroups_per_grid = blocks;
    t.threads_per_threadgroup = size;
    t.dispatched_per_threadgroup = block;
    t.index_in_threadgroup = i;
    t.index_in_simdgroup = i % LANES;
    t.simdgroup_index = i / LANES;
    t.simdgroups_per_threadgroup = groups;
    t.simdgroup = &simdgroups[i / LANES];
    fibers[i].state = State::READY;
    fibers[i].kind = "";
    fibers[i].line = 0;
    prepare(fibers[i], i);
  }
  static std::vector<unsigned> order;  // static, as an error leaves without destructors
  order.resize(live_threads);
  for (unsigned i = 0; i < live_threads; ++i) order[i] = emu_knobs.order == 1 ? live_threads - 1 - i : i;
  unsigned done = 0;
  while (done < live_threads) {
    if (emu_knobs.order == 2) std::shuffle(order.begin(), order.end(), random);
    bool ran = false;
    for (unsigned i : order) {
      Fiber& fiber = fibers[i];
      if (fiber.state != State::READY) continue;
      ran = true;
      running = &fiber;
      emu_thread = &fiber.thread;
      to_fiber(fiber);
      running = nullptr;
      if (fiber.state == State::DONE) ++done;
      if (check_slices) check_guards(&fiber);
    }
    if (!ran) stuck();
  }
}

}  // namespace

// ---------------------------------------------------------------------------------------------- called by the kernel

bool emu_arrive(const char* kind, int line) {
  Fiber& me = *running;
  Simdgroup& group = *me.thread.simdgroup;
  me.kind = kind;
  me.line = line;
  if (++group.arrived < group.lanes) {
    me.state = State::COLLECTIVE;
    to_scheduler();
    return false;
  }
  Fiber* first = &fibers[me.thread.simdgroup_index * LANES];
  for (unsigned i = 0; i < group.lanes; ++i) {
    if (first[i].line == line && !strcmp(first[i].kind, kind)) continue;
    blame(me);
    blame_other(first[i]);
    report->line = line;
    report->other_line = first[i].line;
    describe(DIVERGENCE, "is in %s{at}, and thread {other} of the same simdgroup in %s{other_at}", kind, first[i].kind);
    leave();
  }
  return true;
}

void emu_release() {
  Fiber& me = *running;
  Simdgroup& group = *me.thread.simdgroup;
  Fiber* first = &fibers[me.thread.simdgroup_index * LANES];
  group.arrived = 0;
  for (unsigned i = 0; i < group.lanes; ++i) first[i].state = State::READY;
}

// Kernels are compiled with -fsanitize=undefined for the checks below; their handlers are these, not libubsan's.
namespace {
[[noreturn]] void undefined(const char* what, uint64_t pc) {
  blame(*running);
  report->pc = pc;
  describe(ARITHMETIC, "%s{at}", what);
  leave();
}
}  // namespace

#define HANDLER(name, what, ...)                                              \
  extern "C" void __ubsan_handle_##name##_abort(const void*, ##__VA_ARGS__) { \
    undefined(what, uint64_t(__builtin_return_address(0)));                   \
  }
HANDLER(divrem_overflow, "divides an integer by zero", void*, void*)
HANDLER(shift_out_of_bounds, "shifts an integer by more bits than it has", void*, void*)
HANDLER(add_overflow, "overflows a signed integer in an addition", void*, void*)
HANDLER(sub_overflow, "overflows a signed integer in a subtraction", void*, void*)
HANDLER(mul_overflow, "overflows a signed integer in a multiplication", void*, void*)
HANDLER(negate_overflow, "overflows a signed integer in a negation", void*)
HANDLER(float_cast_overflow, "converts a float to an integer that cannot hold it", void*)
HANDLER(type_mismatch_v1, "uses a pointer that is null or not aligned for its type", void*)

extern "C" void __ubsan_handle_out_of_bounds_abort(const void*, void* index) {
  blame(*running);
  report->pc = uint64_t(__builtin_return_address(0));
  describe(OUT_OF_BOUNDS, "indexes an array with %ld, outside its bounds{at}", long(intptr_t(index)));
  leave();
}

// ------------------------------------------------------------------------------------------------------- the launch

static int launch(Entry entry, Buffer* buffers, int count, const Size& grid, const Size& block, bool front,
                  bool check_slices) {
  mappings.assign(size_t(count), Mapping());
  std::vector<void*> data;
  running = nullptr;
  bool made = make_stacks();
  for (int i = 0; made && i < count; ++i) {
    made = mappings[size_t(i)].make(buffers[i], front);
    data.push_back(mappings[size_t(i)].data);
  }
  entry_point = entry;
  arguments = data.data();
  if (!made) {
    describe(FAULT, "cannot be given its buffers: out of memory or of mappings");
  } else if (!sigsetjmp(escape, 1)) {
    std::mt19937 random(emu_knobs.seed);
    Size blocks{(grid.x + block.x - 1) / block.x, (grid.y + block.y - 1) / block.y, (grid.z + block.z - 1) / block.z};
    std::vector<uint32_t> order(product(blocks));
    for (uint32_t i = 0; i < order.size(); ++i) order[i] = emu_knobs.order == 1 ? uint32_t(order.size()) - 1 - i : i;
    if (emu_knobs.order == 2) std::shuffle(order.begin(), order.end(), random);
    for (uint32_t i : order)
      run_threadgroup(grid, block, {i % blocks.x, i / blocks.x % blocks.y, i / (blocks.x * blocks.y)}, random,
                      check_slices);
    check_guards(nullptr);
    for (int i = 0; i < count; ++i)
      if (buffers[i].written && buffers[i].bytes) memcpy(buffers[i].host, mappings[size_t(i)].data, buffers[i].bytes);
  }
  running = nullptr;
  for (Mapping& mapping : mappings) mapping.drop();
  mappings.clear();
  return int(report->kind);
}

int emu_run(Entry entry, Buffer* buffers, int count, const Size* grid, const Size* block, const Knobs* knobs,
            Report* out) {
  report = out;
  memset(report, 0, sizeof *report);
  report->buffer = -1;
  emu_knobs = *knobs;
  if (!signal_stack) signal_stack = static_cast<char*>(malloc(SIGNAL_STACK));
  stack_t ours{}, old{};
  ours.ss_sp = signal_stack;
  ours.ss_size = SIGNAL_STACK;
  sigaltstack(&ours, &old);
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, &old_segv);
  sigaction(SIGBUS, &action, &old_bus);
  action.sa_sigaction = on_timer;
  sigaction(SIGVTALRM, &action, &old_timer);
  runner = pthread_self();
  itimerval limit{{1, 0}, {long(knobs->seconds), 0}}, old_limit{};
  setitimer(ITIMER_VIRTUAL, &limit, &old_limit);
  launch(entry, buffers, count, *grid, *block, knobs->front, false);
  if (report->kind == OUT_OF_BOUNDS && !report->has_thread) {
    // guard bytes were damaged: once more with unmapped memory on that side, looking after every step of every thread
    Report found = *report;
    memset(report, 0, sizeof *report);
    report->buffer = -1;
    launch(entry, buffers, count, *grid, *block, found.element < 0, true);
    if (!report->kind) *report = found;
  }
  setitimer(ITIMER_VIRTUAL, &old_limit, nullptr);
  sigaction(SIGVTALRM, &old_timer, nullptr);
  sigaction(SIGSEGV, &old_segv, nullptr);
  sigaction(SIGBUS, &old_bus, nullptr);
  sigaltstack(&old, nullptr);
  return int(report->kind);
}
