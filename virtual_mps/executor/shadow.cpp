#include "shadow.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace vmps {
namespace {

// Touched memory that a launch may leave behind for the next one.
constexpr size_t kKept = size_t{256} << 20;

}  // namespace

Shadow::~Shadow() {
  if (memory_) munmap(memory_, capacity_);
}

void Shadow::forget() {
  ranges_.clear();
  if (used_ > kKept) clear();
  used_ = 0;
}

void Shadow::clear() {
  if (memory_) madvise(memory_, capacity_, MADV_DONTNEED);
}

void Shadow::reserve(uint64_t begin, uint64_t end) {
  if (begin == end) return;
  for (Range& range : ranges_) {
    if (begin >= range.end || end <= range.begin) continue;
    if (range.is_placed && begin >= range.begin && end <= range.end) return;
    begin = std::min(begin, range.begin);
    end = std::max(end, range.end);
    std::swap(range, ranges_.back());
    ranges_.pop_back();
    return reserve(begin, end);
  }
  ranges_.push_back({begin, end, 0, false});
}

void Shadow::place(unsigned shift) {
  for (Range& range : ranges_) {
    if (range.is_placed) continue;
    range.first_cell = used_ / sizeof(Cell);
    range.is_placed = true;
    used_ += sizeof(Cell) * (((range.end - 1) >> shift) - (range.begin >> shift) + 1);
  }
  shift_ = shift;
  if (used_ <= capacity_) return;
  const size_t capacity = std::max(used_, 2 * capacity_);
  void* memory =
      memory_ ? mremap(memory_, capacity_, capacity, MREMAP_MAYMOVE)
              : mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<Cell*>(memory);
  capacity_ = capacity;
}

Shadow::Span Shadow::find(uint64_t begin) const {
  for (const Range& range : ranges_)
    if (begin >= range.begin && begin < range.end) return {memory_ + range.first_cell, range.begin >> shift_};
  return {};
}

}  // namespace vmps
