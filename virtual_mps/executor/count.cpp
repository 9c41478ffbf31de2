#include "count.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "worker.h"

namespace vmps {
namespace {

constexpr uint64_t kMatrixFlops = 2 * 8 * 8 * 8;  // of one multiplication

using Numbers = std::map<std::string, uint64_t>;

struct Slot {
  std::string name;
  bool constant;
  Numbers numbers;
};

struct KernelCounts {
  Numbers numbers;
  std::map<unsigned, Slot> slots;
};

}  // namespace
}  // namespace vmps

struct vmps_count {  // one block
  std::vector<std::pair<std::string, vmps::KernelCounts>> kernels;

  vmps::KernelCounts& kernel(const std::string& name) {
    for (auto& [known, counts] : kernels)
      if (known == name) return counts;
    return kernels.emplace_back(name, vmps::KernelCounts()).second;
  }
};

namespace vmps {
namespace {

std::mutex blocks_mutex;
std::set<vmps_count*> blocks;  // guarded, with all that they hold

std::mutex counter_mutex;  // taken outside of a launch: registering waits until none runs
Counter counter;           // registered while there are blocks
size_t counting = 0;

void add(Numbers& sums, const Numbers& numbers) {
  for (const auto& [name, value] : numbers)
    sums[name] = name == "threadgroup_memory" ? std::max(sums[name], value) : sums[name] + value;
}

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + '"';
}

std::string members(const Numbers& numbers) {
  std::string text;
  for (const auto& [name, value] : numbers) text += ", " + quoted(name) + ": " + std::to_string(value);
  return text;
}

std::string json(const std::string& name, const KernelCounts& kernel) {
  std::string slots;
  for (const auto& [index, slot] : kernel.slots)
    slots += (slots.empty() ? "" : ", ") + ("{\"slot\": " + std::to_string(index)) +
             ", \"name\": " + quoted(slot.name) + ", \"space\": " + (slot.constant ? "\"constant\"" : "\"device\"") +
             members(slot.numbers) + "}";
  return "{\"name\": " + quoted(name) + members(kernel.numbers) + ", \"buffers\": [" + slots + "]}";
}

std::vector<const Region*> bound_buffers(const Run& run) {
  std::vector<const Region*> bound;
  for (unsigned i = 0; i < VMPS_SLOTS; i++) {
    const Region& region = run.regions[VMPS_BUFFER_TAG + i];
    if (region.begin && !region.name.empty()) bound.push_back(&region);
  }
  return bound;
}

// Bytes that were touched through any slot of an address space: those that several slots are bound to, once.
uint64_t unique(const Run& run, bool constant, const std::vector<Traffic>& buffers, TouchedBytes Traffic::* touched) {
  std::vector<const Region*> bound = bound_buffers(run);
  std::erase_if(bound, [&](const Region* region) { return region->is_constant != constant; });
  std::sort(bound.begin(), bound.end(), [](const Region* a, const Region* b) { return a->begin < b->begin; });
  uint64_t count = 0;
  for (size_t i = 0; i < bound.size();) {
    TouchedBytes together;
    const char *base = bound[i]->begin, *end = base;
    do {  // as far as they overlap
      together.add(buffers[bound[i]->index].*touched, static_cast<size_t>(bound[i]->begin - base));
      end = std::max<const char*>(end, bound[i]->begin + bound[i]->size);
      i++;
    } while (i < bound.size() && bound[i]->begin < end);
    count += together.count();
  }
  return count;
}

}  // namespace

void TouchedBytes::set(size_t word, uint64_t bits) {
  constexpr size_t words = kPage / kBits;
  const size_t page = word / words;
  if (page >= pages_.size()) pages_.resize(page + 1);
  if (!pages_[page]) pages_[page] = std::make_unique<Page>();
  (*pages_[page])[word % words] |= bits;
}

void TouchedBytes::touch(size_t offset, size_t size) {
  while (size) {
    const size_t bit = offset % kBits, now = std::min(size, kBits - bit);
    set(offset / kBits, ~uint64_t{0} >> (kBits - now) << bit);
    offset += now;
    size -= now;
  }
}

void TouchedBytes::add(const TouchedBytes& other, size_t offset) {
  const size_t words = offset / kBits, bit = offset % kBits;
  for (size_t p = 0; p < other.pages_.size(); p++) {
    if (!other.pages_[p]) continue;
    const Page& from = *other.pages_[p];
    for (size_t i = 0; i < from.size(); i++) {
      const size_t word = p * from.size() + i + words;
      if (uint64_t low = from[i] << bit) set(word, low);
      if (uint64_t high = bit ? from[i] >> (kBits - bit) : 0) set(word + 1, high);
    }
  }
}

uint64_t TouchedBytes::count() const {
  uint64_t bits = 0;
  for (const auto& page : pages_)
    if (page)
      for (uint64_t word : *page) bits += static_cast<uint64_t>(std::popcount(word));
  return bits;
}

void Counter::launch_begins(Run&) {
  buffers_.clear();
  buffers_.resize(VMPS_SLOTS);
  threadgroup_read_ = threadgroup_written_ = 0;
  threadgroup_barriers_ = simdgroup_barriers_ = matrix_multiplications_ = 0;
}

void Counter::access(Run&, const Access& access) {
  if (!access.inside) return;
  if (access.region.space == Space::threadgroup) {
    if (access.reads()) threadgroup_read_ += access.size;
    if (access.writes()) threadgroup_written_ += access.size;
    return;
  }
  Traffic& traffic = buffers_[access.region.index];
  const auto offset = static_cast<size_t>(access.offset);
  if (access.reads()) {
    traffic.read += access.size;
    traffic.bytes_read.touch(offset, access.size);
  }
  if (access.writes()) {
    traffic.written += access.size;
    traffic.bytes_written.touch(offset, access.size);
  }
}

void Counter::threadgroup_barrier(Run&, unsigned) { threadgroup_barriers_++; }

void Counter::simdgroup_operation(Run&, const SimdgroupOperation& its) {
  simdgroup_barriers_ += its.operation == VMPS_SIMDGROUP_BARRIER;
  matrix_multiplications_ += its.operation == VMPS_MATRIX_MULTIPLY;
}

void Counter::launch_ends(Run& run) {
  if (run.failed) return;
  const vmps_grid& grid = run.launch.grid;
  const auto product = [](const unsigned v[3]) { return uint64_t{v[0]} * v[1] * v[2]; };
  uint64_t threadgroup_memory = run.launch.static_memory;
  for (uint32_t bytes : run.launch.threadgroup_memory) threadgroup_memory += bytes;
  Numbers numbers = {
      {"dispatches", 1},
      {"threadgroups", product(grid.threadgroups)},
      {"threads", product(grid.threads)},
      {"device_read", 0},
      {"device_written", 0},
      {"device_unique_read", unique(run, false, buffers_, &Traffic::bytes_read)},
      {"device_unique_written", unique(run, false, buffers_, &Traffic::bytes_written)},
      {"constant_read", 0},
      {"constant_unique_read", unique(run, true, buffers_, &Traffic::bytes_read)},
      {"threadgroup_memory", threadgroup_memory},
      {"threadgroup_read", threadgroup_read_},
      {"threadgroup_written", threadgroup_written_},
      {"threadgroup_barriers", threadgroup_barriers_},
      {"simdgroup_barriers", simdgroup_barriers_},
      {"matrix_flops", matrix_multiplications_ * kMatrixFlops},
      {"scalar_flops", run.scalar_flops},
  };
  std::map<unsigned, Slot> slots;
  for (const Region* region : bound_buffers(run)) {
    const Traffic& traffic = buffers_[region->index];
    slots[region->index] = {region->name,
                            region->is_constant,
                            {{"read", traffic.read},
                             {"written", traffic.written},
                             {"unique_read", traffic.bytes_read.count()},
                             {"unique_written", traffic.bytes_written.count()}}};
    numbers[region->is_constant ? "constant_read" : "device_read"] += traffic.read;
    if (!region->is_constant) numbers["device_written"] += traffic.written;
  }

  std::lock_guard<std::mutex> lock(blocks_mutex);
  for (vmps_count* block : blocks) {
    KernelCounts& kernel = block->kernel(run.kernel);
    vmps::add(kernel.numbers, numbers);
    for (const auto& [index, slot] : slots) {
      Slot& known = kernel.slots[index];
      known.name = slot.name;
      known.constant = slot.constant;
      vmps::add(known.numbers, slot.numbers);
    }
  }
}

}  // namespace vmps

extern "C" {

vmps_count* vmps_count_begin(void) {
  auto* block = new vmps_count;
  {
    std::lock_guard<std::mutex> lock(vmps::blocks_mutex);
    vmps::blocks.insert(block);
  }
  std::lock_guard<std::mutex> lock(vmps::counter_mutex);
  if (vmps::counting++ == 0) vmps::add_observer(vmps::counter);
  return block;
}

char* vmps_count_end(vmps_count* block) {
  {
    std::lock_guard<std::mutex> lock(vmps::counter_mutex);
    if (--vmps::counting == 0) vmps::remove_observer(vmps::counter);
  }
  {
    std::lock_guard<std::mutex> lock(vmps::blocks_mutex);
    vmps::blocks.erase(block);
  }
  std::string text;
  for (const auto& [name, kernel] : block->kernels) text += (text.empty() ? "[" : ",\n ") + vmps::json(name, kernel);
  delete block;
  return strdup(text.empty() ? "[]" : (text + "]").c_str());
}
}
