// Counts what launches do, for the blocks of `virtual_mps.count()`: see vmps_count_begin.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "instrument.h"

namespace vmps {

// Which bytes of a buffer were touched: a bit for each, in pages that exist where one was.
class TouchedBytes {
 public:
  void touch(size_t offset, size_t size);
  void add(const TouchedBytes& other, size_t offset);  // `offset`: where the other's bytes begin in this one
  uint64_t count() const;

 private:
  static constexpr size_t kBits = 64, kPage = 32 * 1024;
  using Page = std::array<uint64_t, kPage / kBits>;
  void set(size_t word, uint64_t bits);

  std::vector<std::unique_ptr<Page>> pages_;
};

struct Traffic {
  uint64_t read = 0, written = 0;
  TouchedBytes bytes_read, bytes_written;
};

// The observer of all blocks: counts one launch after another, and gives each that ended well to all of them.
class Counter final : public Observer {
 public:
  void launch_begins(Run&) override;
  void launch_ends(Run&) override;
  void access(Run&, const Access&) override;
  void threadgroup_barrier(Run&, unsigned mem_flags) override;
  void simdgroup_operation(Run&, const SimdgroupOperation&) override;

 private:
  std::vector<Traffic> buffers_;  // by slot
  uint64_t threadgroup_read_, threadgroup_written_;
  uint64_t threadgroup_barriers_, simdgroup_barriers_, matrix_multiplications_;
};

}  // namespace vmps
