#include "check.h"

#include <algorithm>
#include <cstring>

#include "worker.h"

namespace vmps {
namespace {

constexpr unsigned kMemDevice = 1, kMemThreadgroup = 2;  // metal::mem_flags

std::string triple(const unsigned v[3]) {
  return "(" + std::to_string(v[0]) + ", " + std::to_string(v[1]) + ", " + std::to_string(v[2]) + ")";
}

std::string quoted(const std::string& name) { return name.empty() ? "" : " '" + name + "'"; }

std::string name_of(const Region& region) {
  if (region.is_variable) return "threadgroup variable" + quoted(region.name);
  return (region.space == Space::device ? "buffer(" : "threadgroup(") + std::to_string(region.index) + ")" +
         quoted(region.name);
}

std::string size_of(const Region& region) {
  if (!region.begin) return "to which nothing is bound";
  std::string text = "which has " + std::to_string(region.size) + " bytes";
  if (region.space == Space::device && region.begin != region.allocation)
    text += " from its offset of " + std::to_string(region.begin - region.allocation) + " on";
  return text;
}

const char* verb_of(const Access& access) {
  return access.reads()       ? access.writes()      ? "atomic update"
                                : access.is_atomic() ? "atomic read"
                                                     : "read"
         : access.is_atomic() ? "atomic write"
                              : "write";
}

std::string place(const char* location) { return *location ? location : "an unknown line"; }

// Thread position of a lane of the running threadgroup.
std::string thread_of(const Run& run, unsigned lane) {
  return "thread " + triple(run.threadgroup->lanes[lane].position);
}

std::string threadgroup_of(const Run& run, uint32_t index) {
  const unsigned* n = run.launch.grid.threadgroups;
  const unsigned at[3] = {index % n[0], index / n[0] % n[1], index / n[0] / n[1]};
  return "threadgroup " + triple(at);
}

// Calls body(bits, mask) for the bits of the bytes [begin, end) of a map, some at a time.
template <class Body>
void for_bits(unsigned char* map, uint64_t begin, uint64_t end, Body body) {
  constexpr uint64_t kAtOnce = 24;
  for (uint64_t at = begin; at < end; at += kAtOnce) {
    const uint64_t count = std::min(end - at, kAtOnce);
    uint32_t bits;
    std::memcpy(&bits, map + at / 8, sizeof bits);  // a map has room for this behind its end
    body(bits, static_cast<uint32_t>((1u << count) - 1) << at % 8, map + at / 8);
  }
}

}  // namespace

Check::Check() = default;

void Check::launch_begins(Run& run) {
  reports_.clear();
  const unsigned* n = run.launch.grid.threadgroups;
  const uint64_t total = std::min<uint64_t>(uint64_t{n[0]} * n[1] * n[2], UINT32_MAX / 2);
  // Dispatches that nothing orders run one after another all the same; they share cells, of one byte as each has a
  // kernel of its own.
  const bool joins = run.group && run.group == group_ && next_number_ + total < UINT32_MAX;
  group_ = run.group;
  if (next_number_ + total >= UINT32_MAX) {
    device_shadow_.clear();
    next_number_ = 1;
  }
  first_ = next_number_;
  next_number_ += static_cast<uint32_t>(total);
  if (!joins) {
    device_shadow_.forget();
    device_.oldest = first_;
  }
  shift_ = run.group ? 0 : static_cast<unsigned>(__builtin_ctz(run.cell));
  for (const Region& region : run.regions)
    if (region.space == Space::device && region.begin) {
      const auto begin = reinterpret_cast<uint64_t>(region.begin);
      device_shadow_.reserve(begin, begin + region.size);
    }
  device_shadow_.place(shift_);
  spans_.assign(run.regions.size(), {});
  for (size_t tag = 0; tag < spans_.size(); tag++)
    if (run.regions[tag].space == Space::device)
      spans_[tag] = device_shadow_.find(reinterpret_cast<uint64_t>(run.regions[tag].begin));
  fenced_.clear();
}

void Check::threadgroup_begins(Run& run) {
  const unsigned *n = run.launch.grid.threadgroups, *at = run.threadgroup->position;
  device_.current = first_ + at[0] + n[0] * (at[1] + n[1] * at[2]);
  device_.clock = threadgroup_.clock = {};
  const Region* region = &run.regions.back();
  while (region->space == Space::device) region--;
  if (threadgroup_cells_.empty()) threadgroup_cells_.resize(region->allocation_size);
  // Numbered as they run, for they have this memory one after another.
  if (++threadgroup_.current == 0) {
    std::fill(threadgroup_cells_.begin(), threadgroup_cells_.end(), Cell{});
    threadgroup_.current = 1;
  }
  threadgroup_.oldest = threadgroup_.current;
  const auto begin = reinterpret_cast<uint64_t>(region->allocation);
  for (size_t tag = VMPS_ARGUMENT_TAG; tag < spans_.size(); tag++)
    spans_[tag] = {threadgroup_cells_.data(), begin >> shift_};
}

void Check::threadgroup_ends(Run& run) { settle(run); }

void Check::threadgroup_barrier(Run& run, unsigned mem_flags) {
  if (mem_flags & kMemDevice) device_.clock.pass_threadgroup_barrier(run.threadgroup->simdgroup_count);
  if (mem_flags & kMemThreadgroup) threadgroup_.clock.pass_threadgroup_barrier(run.threadgroup->simdgroup_count);
}

void Check::simdgroup_operation(Run& run, const SimdgroupOperation& operation) {
  const unsigned first = operation.simdgroup.lanes[0].in_threadgroup, index = first / VMPS_SIMD_LANES;
  if (operation.operation == VMPS_SIMDGROUP_BARRIER) {
    if (operation.mem_flags & kMemDevice) device_.clock.pass_simdgroup_barrier(index);
    if (operation.mem_flags & kMemThreadgroup) threadgroup_.clock.pass_simdgroup_barrier(index);
  }
  unsigned expected = operation.simdgroup.alive;
  if (operation.operation == VMPS_SIMD_VOTE) return;
  // PyTorch's own headers sum over the first lanes of a simdgroup, which Metal defines.
  if (operation.operation == VMPS_SIMD_FUNCTION && operation.site.kind & VMPS_C10) return;
  if (operation.operation == VMPS_QUAD_FUNCTION) {
    unsigned quads = 0;
    for (unsigned lane = 0; lane < VMPS_SIMD_LANES; lane += 4)
      if (operation.lanes >> lane & 0xF) quads |= 0xFu << lane;
    expected &= quads;
  }
  if (operation.lanes == expected) return;
  static constexpr const char* kNames[] = {"simdgroup function",  "",
                                           "quadgroup function",  "simdgroup_barrier",
                                           "threadgroup_barrier", "simdgroup_load",
                                           "simdgroup_store",     "simdgroup_multiply"};
  const std::string what = std::string(kNames[operation.operation]) + " in diverged control flow";
  if (!reports_.is_new(what.c_str(), operation.site.location)) return;
  const unsigned missing = static_cast<unsigned>(__builtin_ctz(expected & ~operation.lanes));
  const unsigned present = static_cast<unsigned>(__builtin_ctz(operation.lanes));
  reports_.add(what + " at " + place(operation.site.location) + ": " +
               std::to_string(__builtin_popcount(operation.lanes)) + " of " +
               std::to_string(__builtin_popcount(expected)) + " lanes of simdgroup " + std::to_string(index) +
               " take part, " + thread_of(run, first + present) + " but not " + thread_of(run, first + missing) +
               "; threadgroup " + triple(run.threadgroup->position));
}

void Check::device_fence(Run&) {
  const uint32_t index = device_.current - first_;
  if (fenced_.size() <= index) fenced_.resize(index + 1);
  fenced_[index] = true;
}

void Check::access(Run& run, const Access& access) {
  settle(run);
  if (!access.inside) return report(run, access, "out-of-bounds");
  if (access.wrapped) report(run, access, "overflowed");
  if (access.size == 0) return;
  if (reinterpret_cast<uintptr_t>(access.address()) & (access.site.alignment - 1u)) report(run, access, "misaligned");
  check_cells(run, access);
  if (access.region.written) check_written(run, access);
}

inline bool Check::is_ordered(const Record& earlier, const Now& now) const {
  if (earlier.threadgroup != now.memory.current || earlier.spread == Record::several_threadgroups) {
    // Fences and atomic operations can order threadgroups. Which of them did is not followed.
    const auto fenced = [&](uint32_t number) {
      return number >= first_ && number - first_ < fenced_.size() && fenced_[number - first_];
    };
    return !fenced_.empty() && fenced(static_cast<uint32_t>(earlier.threadgroup)) && fenced(device_.current);
  }
  if (earlier.lane == now.record.lane && earlier.spread == Record::one_lane) return true;
  const unsigned simdgroup = earlier.lane / VMPS_SIMD_LANES;
  const Clock& clock = now.memory.clock;
  if (earlier.epoch < clock.threadgroup[simdgroup] || earlier.epoch == Clock::kMost) return true;
  return simdgroup == now.simdgroup && earlier.spread <= Record::one_simdgroup &&
         earlier.epoch < clock.simdgroup[simdgroup];
}

// One record for the accesses that `earlier` stands for and this one, none of which orders the others.
inline Record Check::joined(const Record& earlier, const Now& now) const {
  Record both = now.record;
  if (earlier.threadgroup < now.memory.oldest) return both;
  unsigned spread = Record::one_lane;
  const unsigned simdgroup = earlier.lane / VMPS_SIMD_LANES;
  if (earlier.threadgroup != now.memory.current || earlier.spread == Record::several_threadgroups) {
    spread = Record::several_threadgroups;
  } else if (earlier.epoch < now.memory.clock.threadgroup[simdgroup]) {
    return both;
  } else if (simdgroup != now.simdgroup || earlier.spread == Record::one_threadgroup) {
    spread = Record::one_threadgroup;
  } else if (earlier.epoch < now.memory.clock.simdgroup[simdgroup]) {
    return both;
  } else if (earlier.lane != now.record.lane || earlier.spread == Record::one_simdgroup) {
    spread = Record::one_simdgroup;
  }
  both.spread = spread;
  both.is_atomic &= earlier.is_atomic;
  return both;
}

void Check::check_cells(Run& run, const Access& access) {
  const bool in_threadgroup = access.region.space == Space::threadgroup;
  const Memory& memory = in_threadgroup ? threadgroup_ : device_;
  const unsigned lane = access.lane.in_threadgroup, simdgroup = lane / VMPS_SIMD_LANES;
  const Now now{
      {memory.current, memory.clock.simdgroup[simdgroup], lane, Record::one_lane, access.is_atomic(), &access.site},
      memory,
      simdgroup};
  const Shadow::Span& span = spans_[static_cast<size_t>(&access.region - run.regions.data())];
  const auto address = reinterpret_cast<uint64_t>(access.address());
  Cell* const end = span.at((address + access.size - 1) >> shift_) + 1;
  bool any_written = false, all_written = true;
  for (Cell* cell = span.at(address >> shift_); cell != end; cell++) {
    // The first access of its launch, as most are.
    if (cell->write.threadgroup < memory.oldest && cell->read.threadgroup < memory.oldest && !in_threadgroup) {
      if (access.reads()) cell->read = now.record;
      if (access.writes()) cell->write = now.record;
      continue;
    }
    if (is_raced(cell->write, now)) {
      if (access.reads())
        report_race(run, access, "write", cell->write);
      else
        collide(run, access, cell->write);
    }
    if (access.writes() && is_raced(cell->read, now)) report_race(run, access, "read", cell->read);
    if (access.reads()) {
      const bool is_written = cell->write.threadgroup == memory.current;
      any_written |= is_written;
      all_written &= is_written;
      cell->read = joined(cell->read, now);
    }
    if (access.writes())
      cell->write = access.is_atomic() && cell->write.is_atomic ? joined(cell->write, now) : now.record;
  }
  if (in_threadgroup && access.reads() && !(access.is_copy() ? any_written : all_written))
    report(run, access, "uninitialised");
}

void Check::collide(Run& run, const Access& access, const Record& earlier) {
  if (collision_) return;  // another cell of this access
  if (access.size > sizeof Collision::before) return report_race(run, access, "write", earlier);
  collision_.emplace(Collision{access, earlier, {}});
  std::memcpy(collision_->before, access.address(), access.size);
}

void Check::settle(Run& run) {
  if (!collision_) return;
  const Access& access = collision_->access;
  if (std::memcmp(collision_->before, access.address(), access.size) != 0)
    report_race(run, access, "write", collision_->earlier);
  collision_.reset();
}

void Check::check_written(Run& run, const Access& access) {
  const uint64_t begin = static_cast<uint64_t>(access.address() - access.region.allocation);
  if (access.reads()) {
    bool any = false, all = true;
    for_bits(access.region.written, begin, begin + access.size, [&](uint32_t bits, uint32_t mask, void*) {
      any |= (bits & mask) != 0;
      all &= (bits & mask) == mask;
    });
    if (!(access.is_copy() ? any : all)) report(run, access, "uninitialised");
  }
  if (access.writes())
    for_bits(access.region.written, begin, begin + access.size, [](uint32_t bits, uint32_t mask, void* to) {
      bits |= mask;
      std::memcpy(to, &bits, sizeof bits);
    });
}

std::string Check::verdict(Run&) { return reports_.empty() ? "" : "checked mode found" + reports_.text(); }

void Check::report(Run& run, const Access& access, const char* what, const std::string& more) {
  const std::string kind = std::string(what) + " " + verb_of(access);
  if (!reports_.is_new(kind.c_str(), access.site.location)) return;
  std::string text = kind + " of " + std::to_string(access.size) + " bytes at " + place(access.site.location) +
                     ": byte " + std::to_string(access.offset) + " of " + name_of(access.region) + ", " +
                     size_of(access.region);
  if (access.inside && access.site.alignment > 1 && *what == 'm')
    text += "; it needs an address that is a multiple of " + std::to_string(access.site.alignment);
  if (access.wrapped)
    text += ", whose index wraps round in the 32 bits of the arithmetic at " + place(access.wrapped->location);
  reports_.add(text + more + "; thread " + triple(access.lane.position) + " of threadgroup " +
               triple(run.threadgroup->position));
}

void Check::report_race(Run& run, const Access& access, const char* before, const Record& earlier) {
  std::string who;
  const uint32_t number = static_cast<uint32_t>(earlier.threadgroup);
  if (access.region.space == Space::threadgroup || number == device_.current)
    who = thread_of(run, earlier.lane) + " of the same threadgroup";
  else if (number >= first_)
    who = "a thread of " + threadgroup_of(run, number - first_);
  else
    who = "a thread of an earlier dispatch, with no memoryBarrier between";
  report(run, access, "unordered",
         ", after a " + std::string(earlier.is_atomic ? "atomic " : "") + before + " by " + who + " at " +
             place(earlier.site->location));
}

}  // namespace vmps
