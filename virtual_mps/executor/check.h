// Checked mode: the observer that finds what a kernel must not do.
//
// A race is found by what orders two accesses, not by when they happen to run: two accesses of a cell, of which one
// writes and not both are atomic, by different lanes, with no barrier for that kind of memory between them that both
// lanes pass.
#pragma once

#include <optional>

#include "instrument.h"
#include "reports.h"
#include "shadow.h"

namespace vmps {

class Check final : public Observer {
 public:
  Check();
  void launch_begins(Run&) override;
  void threadgroup_begins(Run&) override;
  void threadgroup_ends(Run&) override;
  void access(Run&, const Access&) override;
  void threadgroup_barrier(Run&, unsigned mem_flags) override;
  void simdgroup_operation(Run&, const SimdgroupOperation&) override;
  void device_fence(Run&) override;
  std::string verdict(Run&) override;

 private:
  struct Memory {          // device or threadgroup memory
    uint32_t current = 0;  // number of the running threadgroup
    uint32_t oldest = 0;   // threadgroups with lower numbers came before all that may run at the same time
    Clock clock;
  };
  // The accessing lane, in the form of a record of one access.
  struct Now {
    Record record;
    const Memory& memory;
    unsigned simdgroup;
  };

  bool is_ordered(const Record& earlier, const Now& now) const;
  bool is_raced(const Record& earlier, const Now& now) const {
    if (earlier.threadgroup < now.memory.oldest) return false;
    return !(earlier.is_atomic && now.record.is_atomic) && !is_ordered(earlier, now);
  }
  Record joined(const Record& earlier, const Now& now) const;
  // Threads that all write the same value do so on purpose. Whether this one does shows only after the write.
  struct Collision {
    Access access;
    Record earlier;
    unsigned char before[64];
  };
  void collide(Run& run, const Access& access, const Record& earlier);
  void settle(Run& run);

  void check_cells(Run& run, const Access& access);
  void check_written(Run& run, const Access& access);

  void report(Run& run, const Access& access, const char* what, const std::string& more = {});
  void report_race(Run& run, const Access& access, const char* before, const Record& earlier);

  Reports reports_;
  Shadow device_shadow_;
  std::vector<Shadow::Span> spans_;  // by tag
  std::vector<Cell> threadgroup_cells_;
  unsigned shift_ = 0;
  uint32_t group_ = 0;
  // Of threadgroups, for device memory: of one launch they may run in any order.
  uint32_t next_number_ = 1;
  uint32_t first_ = 0;  // number of the launch's first threadgroup
  std::optional<Collision> collision_;
  std::vector<bool> fenced_;  // by threadgroup of the launch
  Memory device_, threadgroup_;
};

}  // namespace vmps
