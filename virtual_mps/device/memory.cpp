#include "memory.h"

#include <ATen/mps/MPSDevice.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstring>
#include <iomanip>
#include <map>
#include <mutex>
#include <sstream>

#include "../metal/buffer_c.h"
#include "../metal/device_limits.h"
#include "../metal/modes.h"
#include "version.h"

namespace vmps {
namespace {

std::atomic<size_t> allocated{0};
std::atomic<size_t> driver{0};
std::atomic<double> fraction{0};

void raise_driver_to(size_t bytes) {
  size_t seen = driver;
  while (bytes > seen && !driver.compare_exchange_weak(seen, bytes)) {
  }
}

// Freed when the last tensor is, though work that is still encoded may keep the buffer itself.
void release_storage(void* buffer) {
  allocated -= buffer_length(buffer);
  buffer_release(buffer);
}

c10::DataPtr storage_pointer(void* buffer) {
  raise_driver_to(allocated += buffer_length(buffer));
  return {buffer, buffer, &release_storage, kDevice};
}

std::string readable(size_t bytes) {
  std::ostringstream text;
  text.precision(2);
  text << std::fixed;
  if (bytes <= 1024)
    text << bytes << " bytes";
  else if (bytes <= 1024 * 1024)
    text << bytes / 1024.0 << " KB";
  else if (bytes <= 1024 * 1024 * 1024)
    text << bytes / 1048576.0 << " MB";
  else
    text << bytes / 1073741824.0 << " GB";
  return text.str();
}

void check_size(size_t bytes) {
  TORCH_CHECK(bytes <= max_buffer_length(), "Invalid buffer size: ", readable(bytes));
  const auto limit = static_cast<size_t>(fraction * static_cast<double>(recommended_memory()));
  TORCH_CHECK(limit == 0 || allocated + bytes <= limit,
              "MPS backend out of memory (MPS allocated: ", readable(allocated),
              ", other allocations: 0 bytes, max allowed: ", readable(limit), "). Tried to allocate ", readable(bytes),
              " on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory "
              "allocations (may cause system failure).");
}

// The set of virtual functions differs between torch releases, hence no `override` on those that are new or may go.
class DeviceAllocator final : public at::mps::IMPSAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, kDevice};
    check_size(bytes);
    c10::DataPtr host = c10::GetCPUAllocator()->allocate(bytes);
    void* memory = host.get();
    if (modes().poison) std::memset(memory, 0xff, bytes);  // NaN in every floating type, -1 in every integer
    auto* owner = new c10::DataPtr(std::move(host));
    void* buffer = buffer_new(memory, bytes, [](void* owned) { delete static_cast<c10::DataPtr*>(owned); }, owner);
    if (modes().check) buffer_follow_writes(buffer);
    return storage_pointer(buffer);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_storage; }
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    std::memcpy(buffer_contents(destination), buffer_contents(source), bytes);
    buffer_mark_written(destination, 0, bytes);
  }

#if VMPS_TORCH_VERSION >= 213
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { empty_cache(); }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
#endif

  void emptyCache() const { empty_cache(); }
  void freeInactiveBuffers() const {}
  ssize_t getUnalignedBufferSize(const void* buffer) const { return static_cast<ssize_t>(buffer_length(buffer)); }
  c10::IntArrayRef getBufferShape(const void*) const { return {}; }
  void setBufferShape(const void*, const c10::IntArrayRef&) const {}
  id_t getBufferId(const void* buffer) const { return static_cast<id_t>(reinterpret_cast<uintptr_t>(buffer)); }
  bool isSharedBuffer(const void*) const { return true; }
  bool isSharedStorageSupported() const { return true; }
  c10::DataPtr allocScalarBufferWithValue(void* value, size_t bytes) const {
    c10::DataPtr scalar = device_allocator().allocate(bytes);
    std::memcpy(buffer_contents(scalar.get()), value, bytes);
    buffer_mark_written(scalar.get(), 0, bytes);
    return scalar;
  }
  std::string formatSize(size_t bytes) const { return readable(bytes); }
  void setLowWatermarkRatio(double) const {}
  void setHighWatermarkRatio(double ratio) const { set_memory_fraction(ratio); }
  ssize_t getLowWatermarkValue() const { return 1; }
  size_t getLowWatermarkLimit() const { return recommended_memory(); }
  size_t getHighWatermarkLimit() const { return recommended_memory(); }
  size_t getTotalAllocatedMemory() const { return driver_bytes(); }
  size_t getCurrentAllocatedMemory() const { return allocated_bytes(); }
  size_t getDriverAllocatedMemory() const { return driver_bytes(); }
  size_t getRecommendedMaxMemory() const { return recommended_memory(); }
  std::pair<const void*, uint32_t> getSharedBufferPtr(const void* buffer) const {
    buffer_mark_written(buffer, 0, buffer_length(buffer));  // what the caller does with them is not seen
    return {buffer_contents(buffer), 0};
  }
  c10::Storage getHostAliasStorage(const c10::Storage& storage) const { return writable_host_alias(storage); }
  bool recordEvents(c10::ArrayRef<const void*>) const { return true; }
  bool waitForEvents(c10::ArrayRef<const void*>) const { return true; }
};

// Pinned memory is plain host memory that is remembered, for is_pinned().
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr host = c10::GetCPUAllocator()->allocate(bytes);
    void* memory = host.get();
    {
      std::lock_guard<std::mutex> lock(mutex());
      blocks()[memory] = bytes;
    }
    auto* owner = new c10::DataPtr(std::move(host));
    return {memory, owner,
            [](void* owned) {
              auto* host = static_cast<c10::DataPtr*>(owned);
              {
                std::lock_guard<std::mutex> lock(mutex());
                blocks().erase(host->get());
              }
              delete host;
            },
            c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    std::memcpy(destination, source, bytes);
  }
  static bool holds(const void* host) {
    std::lock_guard<std::mutex> lock(mutex());
    auto next = blocks().upper_bound(host);
    if (next == blocks().begin()) return false;
    auto [start, bytes] = *std::prev(next);
    return host < static_cast<const char*>(start) + bytes;
  }

 private:
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static std::map<const void*, size_t>& blocks() {
    static auto* blocks = new std::map<const void*, size_t>;
    return *blocks;
  }
};

DeviceAllocator& instance() {
  static auto* allocator = new DeviceAllocator;
  return *allocator;
}

const bool registered = [] {
  c10::SetAllocator(c10::DeviceType::MPS, &instance());
  return true;
}();

}  // namespace

at::mps::IMPSAllocator& device_allocator() { return instance(); }

c10::Allocator& pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return *allocator;
}

bool is_pinned(const void* host) { return PinnedAllocator::holds(host); }

c10::Storage host_alias(const c10::Storage& device) {
  c10::DataPtr bytes(
      buffer_contents(device.data_ptr().get()), new c10::Storage(device),
      [](void* owned) { delete static_cast<c10::Storage*>(owned); }, c10::Device(c10::DeviceType::CPU));
  return c10::Storage(c10::Storage::use_byte_size_t(), device.nbytes(), std::move(bytes), c10::GetCPUAllocator(),
                      /*resizable=*/true);
}

c10::Storage writable_host_alias(const c10::Storage& device) {
  buffer_mark_written(device.data_ptr().get(), 0, device.nbytes());
  return host_alias(device);
}

c10::DataPtr device_alias(const c10::Storage& host) {
  if (host.nbytes() == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, kDevice};
  auto* owner = new c10::Storage(host);
  return storage_pointer(buffer_new(
      const_cast<void*>(host.data_ptr().get()), host.nbytes(),
      [](void* owned) { delete static_cast<c10::Storage*>(owned); }, owner));
}

size_t allocated_bytes() { return allocated; }
size_t driver_bytes() { return driver; }
void empty_cache() { driver = allocated.load(); }

void set_memory_fraction(double wanted) {
  TORCH_CHECK(wanted >= 0 && wanted <= 2, "invalid high watermark ratio ", wanted);
  fraction = wanted;
}

}  // namespace vmps

namespace at::mps {
IMPSAllocator* getIMPSAllocator() { return &vmps::device_allocator(); }
bool isMPSPinnedPtr(const void* data) { return vmps::is_pinned(data); }
at::Allocator* GetMPSAllocator() { return &vmps::device_allocator(); }
#if VMPS_TORCH_VERSION >= 214
c10::Allocator* getMPSPinnedAllocator() { return &vmps::pinned_allocator(); }
void* getMPSPinnedMTLBuffer(const void*) { return nullptr; }  // pinned memory is plain memory here
#endif
}  // namespace at::mps
