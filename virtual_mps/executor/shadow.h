// What checked mode remembers of each piece ("cell") of memory: who wrote it last, and who read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernel_abi.h"

namespace vmps {

// An access, or all since the last write that matter: the last one stands for those before it, as far as `spread`.
struct Record {
  enum Spread : unsigned { one_lane, one_simdgroup, one_threadgroup, several_threadgroups };

  uint64_t threadgroup : 32;  // its number since the process began; 0: nobody
  uint64_t epoch : 19;        // barriers that its simdgroup had passed: see Clock
  uint64_t lane : 10;
  uint64_t spread : 2;
  uint64_t is_atomic : 1;  // all of them were
  const vmps_site* site;
};
static_assert(sizeof(Record) == 16);

struct Cell {
  Record write, read;
};

// Cells for all memory that a launch binds, in one stretch of address space that is kept from launch to launch. Cells
// of earlier launches are not cleared: their threadgroups' numbers are too low to matter.
class Shadow {
 public:
  struct Span {
    Cell* cells = nullptr;
    uint64_t first = 0;  // number of the first cell, counted from address 0
    Cell* at(uint64_t number) const { return cells + (number - first); }
  };

  ~Shadow();
  void forget();  // the ranges that have cells: a new launch begins
  void clear();   // all cells
  // Cells for the memory [begin, end), shared with ranges of the same launch that contain it.
  void reserve(uint64_t begin, uint64_t end);
  void place(unsigned shift);  // after all calls of reserve(): cells of 2^shift bytes
  Span find(uint64_t begin) const;

 private:
  struct Range {
    uint64_t begin, end;
    size_t first_cell;
    bool is_placed;
  };
  std::vector<Range> ranges_;
  Cell* memory_ = nullptr;
  size_t capacity_ = 0, used_ = 0;  // bytes
  unsigned shift_ = 0;
};

// Counts barriers, for each simdgroup of a threadgroup and one kind of memory.
struct Clock {
  static constexpr unsigned kMost = (1u << 19) - 1;  // then it stops: everything counts as ordered

  unsigned simdgroup[VMPS_MAX_LANES / VMPS_SIMD_LANES] = {};    // barriers of both kinds that it passed
  unsigned threadgroup[VMPS_MAX_LANES / VMPS_SIMD_LANES] = {};  // the same, when it passed the last threadgroup_barrier

  void pass_simdgroup_barrier(unsigned s) { simdgroup[s] += simdgroup[s] < kMost; }
  void pass_threadgroup_barrier(unsigned count) {
    for (unsigned s = 0; s < count; s++) {
      pass_simdgroup_barrier(s);
      threadgroup[s] = simdgroup[s];
    }
  }
};

}  // namespace vmps
