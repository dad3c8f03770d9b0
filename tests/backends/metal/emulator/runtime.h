// What a translated kernel and the runtime share. One fiber stands for one GPU thread; one threadgroup runs at a time.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emu {

constexpr unsigned LANES = 32;
constexpr unsigned MAX_THREADS = 1024;
constexpr unsigned VALUE_BYTES = 64;  // the largest operand of a collective

struct Size {
  uint32_t x, y, z;
};

// The waiting room of a simdgroup: operands, then results, of the collective that its lanes are in.
struct Simdgroup {
  uint32_t lanes;    // threads it has: 32, fewer at the end of a threadgroup
  uint32_t arrived;  // lanes that wait in a collective
  uint32_t argument[LANES];
  alignas(64) unsigned char value[LANES][VALUE_BYTES];
  alignas(64) unsigned char result[LANES][VALUE_BYTES];
};

// What the attributes of a kernel's parameters say about the running thread.
struct Thread {
  Size position_in_grid, position_in_threadgroup, threadgroup_position;
  Size threads_per_grid, threadgroups_per_grid, threads_per_threadgroup, dispatched_per_threadgroup;
  uint32_t index_in_threadgroup, index_in_simdgroup, simdgroup_index, simdgroups_per_threadgroup;
  Simdgroup* simdgroup;
};

struct Knobs {
  uint32_t order;    // 0 ascending, 1 descending, 2 random
  uint32_t front;    // 1: unmapped memory stands right before the data, 0: right behind them
  uint32_t seconds;  // of processor time that a run may take
  uint32_t seed;
};

struct Buffer {
  void* host;  // copied in (inputs) or out (outputs)
  uint64_t bytes;
  uint32_t item;     // bytes of an element
  uint32_t written;  // 1: an output
  uint32_t poison;   // the byte that an output is filled with
  uint32_t align;    // of the data's end when that stands before unmapped memory
};

enum Kind : uint32_t { NONE, OUT_OF_BOUNDS, DIVERGENCE, UNINITIALISED, ARITHMETIC, RESOURCES, FAULT, ENDLESS };

struct Report {
  uint32_t kind;
  int32_t buffer;  // -1: none
  int64_t element;
  Size threadgroup, thread, other_thread;
  uint64_t pc, other_pc;  // 0: none
  int32_t has_thread, has_other;
  int32_t line, other_line;  // of the kernel's text, 0: not known (then from pc)
  char what[512];
};

using Entry = void (*)(void* const* buffers, const Thread& thread);

}  // namespace emu

extern "C" {
extern emu::Thread* emu_thread;  // the running thread

// Wait until all lanes of the simdgroup are here. True for the last one, which sets the results and calls emu_release.
bool emu_arrive(const char* kind, int line);
void emu_release();

int emu_run(emu::Entry entry, emu::Buffer* buffers, int count, const emu::Size* grid, const emu::Size* threadgroup,
            const emu::Knobs* knobs, emu::Report* report);
}
