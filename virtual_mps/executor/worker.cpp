#include "worker.h"

#include <sys/mman.h>

#include <cstring>
#include <new>
#include <utility>

#include "fibre.h"

namespace vmps {
namespace {

constexpr size_t kStacks = size_t{VMPS_STACK_SIZE} * VMPS_MAX_LANES;
constexpr size_t kCacheLine = 64;
// Dynamic threadgroup memory starts at multiples of this, so each argument may lose almost as much.
constexpr size_t kArgumentAlignment = 128;
constexpr size_t kArena = VMPS_MAX_THREADGROUP_MEMORY + kArgumentAlignment * VMPS_SLOTS;
// Room to align the stacks to their size; only what kernels touch becomes memory.
constexpr size_t kMapping = kStacks + VMPS_STACK_SIZE + kArena;
// All bits set is a NaN in every floating type: what is read before it is written shows.
constexpr int kPoison = 0xFF;

// Read in a signal handler, which must not allocate: as other thread-local variables of a loaded library might.
__attribute__((tls_model("initial-exec"))) thread_local Worker* running_worker = nullptr;

unsigned lowest(unsigned mask) { return static_cast<unsigned>(__builtin_ctz(mask)); }
unsigned highest(unsigned mask) { return 31 - static_cast<unsigned>(__builtin_clz(mask)); }
unsigned runnable(const vmps_simdgroup& s) { return s.alive & ~(s.in_function | s.at_barrier); }

}  // namespace

Worker::Worker() {
  void* memory = mmap(nullptr, kMapping, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<char*>(memory);
  stacks_ = mapping_ + (-reinterpret_cast<uintptr_t>(mapping_) & (VMPS_STACK_SIZE - 1));
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

Worker::~Worker() { munmap(mapping_, kMapping); }

Worker* Worker::running() { return running_worker; }

size_t Worker::arena_size() { return kArena; }

// The next lane after `after`, round and round, or any.
inline unsigned Worker::pick(unsigned mask, unsigned after) const {
  if (launch_->order) return launch_->order->bit(mask);
  unsigned later = mask & ~((2u << after) - 1);
  return lowest(later ? later : mask);
}

std::string Worker::run(const Launch& launch, const unsigned at[3]) {
  place(launch, at);
  running_worker = this;
  if (launch.instruments) launch.instruments->threadgroup_begins(*this, arena_);
  if (launch.waits)
    vmps_switch(&caller_, next(simdgroups_, VMPS_SIMD_LANES - 1));
  else
    vmps_switch(&caller_, &lanes_[0]);
  running_worker = nullptr;
  if (launch.instruments) launch.instruments->threadgroup_ends();
  return std::move(failure_);
}

void Worker::place(const Launch& launch, const unsigned at[3]) {
  launch_ = &launch;
  grid = &launch.grid;
  finished_ = 0;
  barrier_site_ = nullptr;
  barriers_differ_ = false;
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
  if (launch.instruments)
    for (unsigned i = 0; i < VMPS_SLOTS; i++) arguments[i] = launch.instruments->tagged_argument(arguments[i], i);
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
  vmps_switch(lane, worker.after(lane));
  __builtin_unreachable();
}

void Worker::loop_body() {
  vmps_lane* lane = lane_at(__builtin_frame_address(0));
  Worker& worker = of(lane);
  const Launch& launch = *worker.launch_;
  if (launch.order) {
    for (unsigned i : launch.order->permutation(worker.lane_count)) launch.image->run(&worker, i, i + 1);
  } else {
    launch.image->run(&worker, 0, worker.lane_count);
  }
  vmps_switch(lane, &worker.caller_);
  __builtin_unreachable();
}

// The lane to continue with when `lane` cannot: of its own simdgroup, if there is one.
inline vmps_lane* Worker::after(vmps_lane* lane) {
  vmps_simdgroup* simdgroup = lane->simdgroup;
  if (unsigned ready = runnable(*simdgroup)) return &simdgroup->lanes[pick(ready, lane->in_simdgroup)];
  return next(simdgroup, lane->in_simdgroup);
}

void Worker::abandon(const std::string& failure, uintptr_t stack_pointer) {
  failure_ = failure;
  if (stack_pointer - reinterpret_cast<uintptr_t>(stacks_) < kStacks) {
    const unsigned* at = lane_at(reinterpret_cast<void*>(stack_pointer))->position;
    failure_ = "thread (" + std::to_string(at[0]) + ", " + std::to_string(at[1]) + ", " + std::to_string(at[2]) +
               "): " + failure;
  }
  vmps_lane never_continued;
  vmps_switch(&never_continued, &caller_);
}

// The lane to continue with when none of `simdgroup` may be; the caller when the threadgroup is done, or cannot go on.
vmps_lane* Worker::next(vmps_simdgroup* simdgroup, unsigned after) {
  do {
    const unsigned own =
        launch_->order ? launch_->order->below(simdgroup_count) : static_cast<unsigned>(simdgroup - simdgroups_);
    for (unsigned n = 0; n < simdgroup_count; n++) {
      vmps_simdgroup& s = simdgroups_[(own + n) % simdgroup_count];
      if (unsigned ready = runnable(s)) return &s.lanes[pick(ready, n == 0 ? after : VMPS_SIMD_LANES - 1)];
      if (s.in_function) return serve_diverged(&s);
    }
  } while (finished_ < lane_count && release_barrier());
  return &caller_;
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
  if (launch_->instruments) launch_->instruments->served(*simdgroup, together, server);
  server.serve = together;
  return &server;
}

// All lanes that still run stand at a barrier. Returns false, and says why, if that is not one barrier for all.
bool Worker::release_barrier() {
  if (finished_) {
    failure_ = "threadgroup_barrier: " + std::to_string(finished_) + " of " + std::to_string(lane_count) +
               " threads returned without reaching the barrier that the others wait at";
    if (launch_->instruments) {
      unsigned i = 0;
      while (!(lanes_[i].simdgroup->alive >> lanes_[i].in_simdgroup & 1)) i++;
      failure_ += std::string(", at ") + launch_->instruments->where(lanes_[i]);
    }
    return false;
  }
  if (barriers_differ_) {
    unsigned i = 1;
    while (lanes_[i].site == lanes_[0].site) i++;
    failure_ = "threadgroup_barrier: threads 0 and " + std::to_string(i) + " wait at different barriers";
    if (launch_->instruments)
      failure_ += std::string(", at ") + launch_->instruments->where(lanes_[0]) + " and at " +
                  launch_->instruments->where(lanes_[i]);
    return false;
  }
  barrier_site_ = nullptr;
  for (unsigned s = 0; s < simdgroup_count; s++) simdgroups_[s].at_barrier = 0;
  if (launch_->instruments) launch_->instruments->barrier_passed(lanes_[0]);
  return true;
}

vmps_lane* Worker::arrive_in_simdgroup(vmps_lane* lane, const void* site) {
  vmps_simdgroup* simdgroup = lane->simdgroup;
  if (!simdgroup->in_function)
    simdgroup->site = site;
  else
    simdgroup->diverged |= simdgroup->site != site;
  simdgroup->in_function |= 1u << lane->in_simdgroup;
  if (simdgroup->in_function == simdgroup->alive && !simdgroup->diverged) {
    simdgroup->in_function = 0;
    lane->serve = simdgroup->alive;
    if (launch_->instruments) launch_->instruments->served(*simdgroup, simdgroup->alive, *lane);
    return lane;
  }
  lane->site = site;
  lane->serve = 0;
  return after(lane);
}

vmps_lane* Worker::arrive_in_threadgroup(vmps_lane* lane, const void* site) {
  if (!barrier_site_) barrier_site_ = site;
  barriers_differ_ |= site != barrier_site_;
  lane->site = site;
  lane->simdgroup->at_barrier |= 1u << lane->in_simdgroup;
  return after(lane);
}

}  // namespace vmps

extern "C" {

vmps_lane* vmps_arrive_in_simdgroup(vmps_lane* lane, const void* site) {
  return vmps::Worker::of(lane).arrive_in_simdgroup(lane, site);
}

vmps_lane* vmps_arrive_in_threadgroup(vmps_lane* lane, const void* site) {
  return vmps::Worker::of(lane).arrive_in_threadgroup(lane, site);
}
}
