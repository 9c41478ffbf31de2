// How PyTorch reaches the device: hooks, device guard and events.
#include <ATen/core/Generator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/mps/MPSGeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <mutex>
#include <new>
#include <unordered_map>

#include "../metal/device_limits.h"
#include "generator.h"
#include "memory.h"
#include "stream.h"

namespace vmps {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using Clock = std::chrono::steady_clock;

// Recording commits the stream, as on a Mac, and committed work has run by then: an event is a point in time.
struct Event {
  Clock::time_point recorded;
  bool timing = true;
};

double milliseconds(const Event& from, const Event& to) {
  TORCH_CHECK(from.timing && to.timing, "Event is not created with enable_timing=True");
  TORCH_CHECK(from.recorded.time_since_epoch().count() && to.recorded.time_since_epoch().count(),
              "Both events must be recorded before calculating elapsed time.");
  return std::chrono::duration<double, std::milli>(to.recorded - from.recorded).count();
}

void record(Event& event) {
  commit();
  event.recorded = Clock::now();
}

class Events {
 public:
  uint32_t acquire(bool timing) {
    std::lock_guard<std::mutex> lock(mutex_);
    events_[++last_] = {{}, timing};
    return last_;
  }
  void release(uint32_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    events_.erase(id);
  }
  Event& operator[](uint32_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    return events_.at(id);
  }

 private:
  std::mutex mutex_;
  uint32_t last_ = 0;
  std::unordered_map<uint32_t, Event> events_;  // references survive insertions
};

Events& events() {
  static auto* events = new Events;
  return *events;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::MPS;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return static_type; }
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.is_mps(), "Expected a MPS device, but got ", device);
  }
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, kDevice); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    vmps::record(*static_cast<Event*>(*event));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { synchronize(); }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    return milliseconds(*static_cast<Event*>(from), *static_cast<Event*>(to));
  }
  void synchronizeStream(const Stream&) const override { synchronize(); }
  void synchronizeDevice(const DeviceIndex) const override { synchronize(); }
};

C10_REGISTER_GUARD_IMPL(MPS, Guard)

// PyTorch looks its hooks up under this very name. No `override` where the set of virtuals differs between releases.
struct MPSHooks final : at::MPSHooksInterface {
  MPSHooks() = default;
  explicit MPSHooks(const at::MPSHooksArgs&) {}  // how PyTorch before 2.13 makes it

  void init() const override {}
  bool hasMPS() const override { return true; }
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool isOnMacOSorNewer(unsigned major, unsigned minor) const override {
    constexpr unsigned kMajor = 15, kMinor = 0;
    return major < kMajor || (major == kMajor && minor <= kMinor);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::mps::detail::createMPSGenerator(); }
  c10::Allocator* getMPSDeviceAllocator() const override { return &device_allocator(); }
  void deviceSynchronize() const override { synchronize(); }
  void commitStream() const override { commit(); }
  void* getCommandBuffer() const override { return command_buffer(); }
  void* getDispatchQueue() const override { return dispatch_queue(); }
  void emptyCache() const override { empty_cache(); }
  size_t getCurrentAllocatedMemory() const override { return allocated_bytes(); }
  size_t getDriverAllocatedMemory() const override { return driver_bytes(); }
  size_t getRecommendedMaxMemory() const override { return recommended_memory(); }
  size_t getMaxBufferLength() const { return max_buffer_length(); }
  void setMemoryFraction(double fraction) const override { set_memory_fraction(fraction); }
  void profilerStartTrace(const std::string&, bool) const override {}
  void profilerStopTrace() const override {}
  uint32_t acquireEvent(bool timing) const override { return events().acquire(timing); }
  void releaseEvent(uint32_t id) const override { events().release(id); }
  void recordEvent(uint32_t id) const override { record(events()[id]); }
  void waitForEvent(uint32_t) const override {}
  void synchronizeEvent(uint32_t) const override { synchronize(); }
  bool queryEvent(uint32_t) const override { return true; }
  double elapsedTimeOfEvents(uint32_t from, uint32_t to) const override {
    return milliseconds(events()[from], events()[to]);
  }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const { return 1; }
  void setCurrentDevice(DeviceIndex) const {}
  DeviceIndex getCurrentDevice() const { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const { return 0; }
  bool isPinnedPtr(const void* host) const override { return is_pinned(host); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  Device getDeviceFromPtr(void*) const override { return kDevice; }
};

using at::MPSHooksArgs;
using at::MPSHooksInterface;
using at::MPSHooksRegistry;
using at::RegistererMPSHooksRegistry;
REGISTER_MPS_HOOKS(MPSHooks)

// PyTorch makes its hooks objects on first use and keeps them. They have no data, so one that was made too early can be
// replaced where it lies.
template <class Hooks, class Base>
void replace_hooks(const Base& existing) {
  static_assert(sizeof(Hooks) == sizeof(void*) && sizeof(Base) == sizeof(void*), "hooks have no data of their own");
  new (const_cast<void*>(static_cast<const void*>(&existing))) Hooks();
}

const bool hooks_in_place = [] {
  const auto& mps = at::detail::getMPSHooks();
  if (!mps.hasMPS()) replace_hooks<MPSHooks>(mps);
  // PyPI's default wheel is built with CUDA, and PyTorch refuses to have two accelerators.
  const auto& cuda = at::detail::getCUDAHooks();
  if (cuda.isBuilt()) replace_hooks<at::CUDAHooksInterface>(cuda);
  return true;
}();

}  // namespace
}  // namespace vmps
