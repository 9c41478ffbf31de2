// Runs threadgroups, one at a time, on the calling OS thread.
//
// A kernel that never waits runs as a plain loop over its lanes. In any other each lane is a fibre: it runs until it
// waits in a barrier or simdgroup function or returns, then the next lane of its simdgroup goes on, then the next
// simdgroup's. The last lane of a simdgroup to arrive in a simdgroup function carries it out and continues without a
// switch.
#pragma once

#include <string>

#include "executor.h"
#include "instrument.h"
#include "kernel_abi.h"
#include "order.h"

namespace vmps {

struct Launch {  // one grid, shared by the workers that run it
  vmps_grid grid;
  uint32_t threadgroup_memory[VMPS_SLOTS];
  uint32_t static_memory;
  const vmps_image* image;
  bool waits;
  Instruments* instruments;  // of an observed launch, which one worker runs alone; else null
  Order* order;              // likewise of a launch in random order
};

class Worker : vmps_threadgroup {
 public:
  Worker();
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Runs one threadgroup of the grid. Returns what went wrong in it, or nothing.
  std::string run(const Launch& launch, const unsigned at[3]);

  // Ends run() with `failure`. Called from a signal handler, with the stack pointer at which the lane cannot go on.
  void abandon(const std::string& failure, uintptr_t stack_pointer);

  static Worker& of(vmps_lane* lane) { return static_cast<Worker&>(*lane->group); }
  // The worker whose threadgroup runs on this OS thread, if any.
  static Worker* running();
  // The lane on whose stack this frame is.
  static vmps_lane& current_lane(void* frame) { return *lane_at(frame); }
  static size_t arena_size();

  vmps_lane* arrive_in_simdgroup(vmps_lane* lane, const void* site);
  vmps_lane* arrive_in_threadgroup(vmps_lane* lane, const void* site);

 private:
  static void lane_body();
  static void loop_body();
  static vmps_lane*& lane_at(void* frame) {
    const uintptr_t top_word = (reinterpret_cast<uintptr_t>(frame) | (VMPS_STACK_SIZE - 1)) - 7;
    return *reinterpret_cast<vmps_lane**>(top_word);
  }

  void place(const Launch& launch, const unsigned at[3]);
  void place_memory();
  void place_lanes();
  void* make_lane_fibre(unsigned index, void* (*make)(char* top));
  char* stack(unsigned index) const { return stacks_ + size_t{index} * VMPS_STACK_SIZE; }

  vmps_lane* after(vmps_lane* lane);
  unsigned pick(unsigned mask, unsigned after) const;
  vmps_lane* next(vmps_simdgroup* simdgroup, unsigned after);
  vmps_lane* serve_diverged(vmps_simdgroup* simdgroup);
  bool release_barrier();

  vmps_lane lanes_[VMPS_MAX_LANES];
  vmps_simdgroup simdgroups_[VMPS_MAX_LANES / VMPS_SIMD_LANES];
  const Launch* launch_ = nullptr;
  char* mapping_;
  char* stacks_;
  char* arena_;
  vmps_lane caller_ = {};  // run() itself, to go back to
  unsigned finished_ = 0;
  const void* barrier_site_ = nullptr;  // where the first lane came to wait, and whether others did so elsewhere
  bool barriers_differ_ = false;
  unsigned placed_size_[3] = {};  // the threadgroup size that the lanes' positions are for
  std::string failure_;
};

}  // namespace vmps
