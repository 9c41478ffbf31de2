#include "worker.h"

#include <sys/mman.h>

#include <cstring>
#include <new>
#include <utility>

#include "fibre.h"

namespace vmps {
namespace {

constexpr size_t kHugePage = 2 << 20;
constexpr size_t kStacks = size_t{VMPS_STACK_SIZE} * VMPS_MAX_LANES;
constexpr size_t kCacheLine = 64;
// Dynamic threadgroup memory starts at multiples of this, so each argument may lose almost as much.
constexpr size_t kArgumentAlignment = 128;
constexpr size_t kArena = VMPS_MAX_THREADGROUP_MEMORY + kArgumentAlignment * VMPS_SLOTS;
// All bits set is a NaN in every floating type: what is read before it is written shows.
constexpr int kPoison = 0xFF;

thread_local Worker* running_worker = nullptr;

unsigned lowest(unsigned mask) { return static_cast<unsigned>(__builtin_ctz(mask)); }
unsigned highest(unsigned mask) { return 31 - static_cast<unsigned>(__builtin_clz(mask)); }
unsigned runnable(const vmps_simdgroup& s) { return s.alive & ~(s.in_function | s.at_barrier); }

// The next lane after `after`, round and round.
unsigned pick(unsigned mask, unsigned after) {
  unsigned later = mask & ~((2u << after) - 1);
  return lowest(later ? later : mask);
}

}  // namespace

Worker::Worker() {
  const size_t mapped = kStacks + kHugePage + kArena;
  void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<char*>(memory);
  // Hundreds of stacks on small pages thrash the TLB.
  stacks_ = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(mapping_) + kHugePage - 1) & ~(kHugePage - 1));
  madvise(stacks_, kStacks, MADV_HUGEPAGE);
  arena_ = stacks_ + kStacks;

  std::memset(lanes_, 0, sizeof lanes_);
  std::memset(simdgroups_, 0, sizeof simdgroups_);
  lanes = lanes_;
  for (unsigned i = 0; i < VMPS_MAX_LANES; i++) {
    vmps_lane& lane = lanes_[i];
    lane.group = this;
    lane.simdgroup = &simdgroups_[i / VMPS_SIMD_LANES];
    lane.in_simdgroup = i % VMPS_SIMD_LANES;
    lane.in_threadgroup = i;
  }
  for (unsigned s = 0; s < VMPS_MAX_LANES / VMPS_SIMD_LANES; s++) simdgroups_[s].lanes = lanes_ + s * VMPS_SIMD_LANES;
}

Worker::~Worker() { munmap(mapping_, kStacks + kHugePage + kArena); }

Worker* Worker::running() { return running_worker; }

vmps_lane*& Worker::lane_at(void* frame) {
  const uintptr_t top_word = (reinterpret_cast<uintptr_t>(frame) | (VMPS_STACK_SIZE - 1)) - 7;
  return *reinterpret_cast<vmps_lane**>(top_word);
}

std::string Worker::run(const Launch& launch, const unsigned at[3]) {
  place(launch, at);
  running_worker = this;
  if (launch.waits)
    vmps_switch(&caller_, next(simdgroups_, VMPS_SIMD_LANES - 1)->stack_pointer);
  else
    vmps_switch(&caller_, lanes_[0].stack_pointer);
  running_worker = nullptr;
  return std::move(failure_);
}

void Worker::place(const Launch& launch, const unsigned at[3]) {
  launch_ = &launch;
  grid = &launch.grid;
  finished_ = 0;
  failure_.clear();
  lane_count = 1;
  for (int d = 0; d < 3; d++) {
    position[d] = at[d];
    const unsigned full = launch.grid.threads_per_threadgroup[d];
    const unsigned left = launch.grid.threads[d] - at[d] * full;
    size[d] = left < full ? left : full;
    lane_count *= size[d];
  }
  simdgroup_count = (lane_count + VMPS_SIMD_LANES - 1) / VMPS_SIMD_LANES;
  place_memory();
  place_lanes();
}

void Worker::place_memory() {
  const Launch& launch = *launch_;
  size_t used = (launch.static_memory + kArgumentAlignment - 1) & ~(kArgumentAlignment - 1);
  memory = arena_;
  for (unsigned i = 0; i < VMPS_SLOTS; i++) {
    if (!launch.threadgroup_memory[i]) {
      arguments[i] = nullptr;
      continue;
    }
    arguments[i] = arena_ + used;
    used += (launch.threadgroup_memory[i] + kArgumentAlignment - 1) & ~(kArgumentAlignment - 1);
  }
  std::memset(arena_, kPoison, used);
}

void* Worker::make_lane_fibre(unsigned index, void* (*make)(char* top)) {
  lane_at(stack(index)) = &lanes_[index];
  // Staggered: with equal offsets the tops of all stacks would fall into the same few sets of the L1 cache.
  const size_t offset = 2 * kCacheLine + index * 5 % VMPS_SIMD_LANES * 3 * kCacheLine;
  return make(stack(index + 1) - offset);
}

void Worker::place_lanes() {
  if (std::memcmp(placed_size_, size, sizeof size) != 0) {
    std::memcpy(placed_size_, size, sizeof size);
    unsigned i = 0;
    for (unsigned z = 0; z < size[2]; z++)
      for (unsigned y = 0; y < size[1]; y++)
        for (unsigned x = 0; x < size[0]; x++, i++) {
          lanes_[i].position[0] = x;
          lanes_[i].position[1] = y;
          lanes_[i].position[2] = z;
        }
  }
  if (!launch_->waits) {
    lanes_[0].stack_pointer = make_lane_fibre(0, make_fibre<loop_body>);
    return;
  }
  for (unsigned s = 0; s < simdgroup_count; s++) {
    const unsigned left = lane_count - s * VMPS_SIMD_LANES;
    vmps_simdgroup& simdgroup = simdgroups_[s];
    simdgroup.alive = left >= VMPS_SIMD_LANES ? ~0u : (1u << left) - 1;
    simdgroup.in_function = simdgroup.at_barrier = simdgroup.diverged = 0;
  }
  for (unsigned i = 0; i < lane_count; i++) lanes_[i].stack_pointer = make_lane_fibre(i, make_fibre<lane_body>);
}

void Worker::lane_body() {
  vmps_lane* lane = lane_at(__builtin_frame_address(0));
  Worker& worker = of(lane);
  worker.launch_->image->run(&worker, lane->in_threadgroup, lane->in_threadgroup + 1);
  lane->simdgroup->alive &= ~(1u << lane->in_simdgroup);
  worker.finished_++;
  worker.leave(lane, worker.next(lane->simdgroup, lane->in_simdgroup));
  __builtin_unreachable();
}

void Worker::loop_body() {
  vmps_lane* lane = lane_at(__builtin_frame_address(0));
  Worker& worker = of(lane);
  worker.launch_->image->run(&worker, 0, worker.lane_count);
  worker.leave(lane, nullptr);
  __builtin_unreachable();
}

void Worker::leave(vmps_lane* from, vmps_lane* to) {
  if (from != to) vmps_switch(&from->stack_pointer, to ? to->stack_pointer : caller_);
}

void Worker::abandon(const std::string& failure) {
  const vmps_lane* lane = lane_at(__builtin_frame_address(0));
  failure_ = "thread (" + std::to_string(lane->position[0]) + ", " + std::to_string(lane->position[1]) + ", " +
             std::to_string(lane->position[2]) + "): " + failure;
  void* never_resumed;
  vmps_switch(&never_resumed, caller_);
}

// The lane to continue with when one of `simdgroup` cannot; null when the threadgroup is done, or cannot go on.
vmps_lane* Worker::next(vmps_simdgroup* simdgroup, unsigned after) {
  do {
    const unsigned own = static_cast<unsigned>(simdgroup - simdgroups_);
    for (unsigned n = 0; n < simdgroup_count; n++) {
      vmps_simdgroup& s = simdgroups_[(own + n) % simdgroup_count];
      if (unsigned ready = runnable(s)) return &s.lanes[pick(ready, n == 0 ? after : VMPS_SIMD_LANES - 1)];
      if (s.in_function) return serve_diverged(&s);
    }
  } while (finished_ < lane_count && release_barrier());
  return nullptr;
}

// No lane of the simdgroup can go on before a simdgroup function, but not all wait in the same one (or some returned,
// or stand at a barrier): those at the lowest address go first, which in most code is the inner of two branches.
vmps_lane* Worker::serve_diverged(vmps_simdgroup* simdgroup) {
  const void* site = nullptr;
  unsigned together = 0;
  for (unsigned waiting = simdgroup->in_function; waiting; waiting &= waiting - 1) {
    const unsigned lane = lowest(waiting);
    const void* its = simdgroup->lanes[lane].site;
    if (!site || its < site) {
      site = its;
      together = 0;
    }
    if (its == site) together |= 1u << lane;
  }
  simdgroup->in_function &= ~together;
  simdgroup->diverged = simdgroup->in_function != 0;
  vmps_lane& server = simdgroup->lanes[highest(together)];
  server.serve = together;
  return &server;
}

// All lanes that still run stand at a barrier. Returns false, and says why, if that is not one barrier for all.
bool Worker::release_barrier() {
  if (finished_) {
    failure_ = "threadgroup_barrier: " + std::to_string(finished_) + " of " + std::to_string(lane_count) +
               " threads returned without reaching the barrier that the others wait at";
    return false;
  }
  const void* site = lanes_[0].site;
  for (unsigned i = 0; i < lane_count; i++)
    if (lanes_[i].site != site) {
      failure_ = "threadgroup_barrier: threads 0 and " + std::to_string(i) + " wait at different barriers";
      return false;
    }
  for (unsigned s = 0; s < simdgroup_count; s++) simdgroups_[s].at_barrier = 0;
  return true;
}

void Worker::wait_simdgroup(vmps_lane* lane) {
  vmps_simdgroup* simdgroup = lane->simdgroup;
  lane->serve = 0;
  const unsigned ready = runnable(*simdgroup);
  leave(lane, ready ? &simdgroup->lanes[pick(ready, lane->in_simdgroup)] : next(simdgroup, lane->in_simdgroup));
}

void Worker::wait_threadgroup(vmps_lane* lane) {
  vmps_simdgroup* simdgroup = lane->simdgroup;
  simdgroup->at_barrier |= 1u << lane->in_simdgroup;
  const unsigned ready = runnable(*simdgroup);
  leave(lane, ready ? &simdgroup->lanes[pick(ready, lane->in_simdgroup)] : next(simdgroup, lane->in_simdgroup));
}

}  // namespace vmps

extern "C" {

VMPS_API unsigned vmps_wait_simdgroup(vmps_lane* lane) {
  const void* site = __builtin_return_address(0);
  vmps_simdgroup* simdgroup = lane->simdgroup;
  if (!simdgroup->in_function)
    simdgroup->site = site;
  else
    simdgroup->diverged |= simdgroup->site != site;
  simdgroup->in_function |= 1u << lane->in_simdgroup;
  if (simdgroup->in_function == simdgroup->alive && !simdgroup->diverged) {
    simdgroup->in_function = 0;
    return simdgroup->alive;
  }
  lane->site = site;
  vmps::Worker::of(lane).wait_simdgroup(lane);
  return lane->serve;
}

VMPS_API void vmps_wait_threadgroup(vmps_lane* lane) {
  lane->site = __builtin_return_address(0);
  vmps::Worker::of(lane).wait_threadgroup(lane);
}
}
