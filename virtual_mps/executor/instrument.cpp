#include "instrument.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <utility>

#include "pool.h"
#include "worker.h"

namespace vmps {
namespace {

constexpr uint64_t kAddress = (uint64_t{1} << VMPS_TAG_SHIFT) - 1;

std::mutex observers_mutex;  // held during an observed launch: the observers' state is of one launch
std::vector<Observer*> observers;
std::atomic<size_t> observer_count{0};

Instruments* running_instruments = nullptr;

constexpr vmps_site kNowhere = {"", 0, 1, 0};

char* tagged(void* address, unsigned tag) {
  return reinterpret_cast<char*>(reinterpret_cast<uint64_t>(address) | uint64_t{tag} << VMPS_TAG_SHIFT);
}

bool is_constant(const std::vector<vmps_parameter>& parameters, unsigned index) {
  for (const vmps_parameter& p : parameters)
    if (p.kind == VMPS_PARAMETER_BUFFER && p.index == index) return p.constant;
  return false;
}

std::string parameter_name(const std::vector<vmps_parameter>& parameters, int kind, unsigned index) {
  for (const vmps_parameter& p : parameters)
    if (p.kind == kind && p.index == index) return p.name;
  return {};
}

}  // namespace

void add_observer(Observer& observer) {
  std::lock_guard<std::mutex> lock(observers_mutex);
  observers.push_back(&observer);
  observer_count = observers.size();
}

void remove_observer(Observer& observer) {
  std::lock_guard<std::mutex> lock(observers_mutex);
  observers.erase(std::remove(observers.begin(), observers.end(), &observer), observers.end());
  observer_count = observers.size();
}

bool observed() { return observer_count != 0; }

std::string run_observed(const std::string& kernel,
                         Launch& launch,
                         const vmps_launch_args& args,
                         const std::vector<vmps_parameter>& parameters,
                         unsigned cell) {
  std::lock_guard<std::mutex> lock(observers_mutex);
  const vmps_image& image = *launch.image;
  const size_t variables = static_cast<size_t>(image.variables_end - image.variables_begin);
  Run run{kernel, launch, args.group, cell, std::vector<Region>(VMPS_VARIABLE_TAG + variables)};
  for (unsigned i = 0; i < VMPS_SLOTS; i++) {
    const vmps_binding& b = args.buffers[i];
    char* data = static_cast<char*>(b.data);
    Region& region = run.regions[VMPS_BUFFER_TAG + i];
    region = {Space::device, false,  i,      parameter_name(parameters, VMPS_PARAMETER_BUFFER, i), data, b.size,
              data,          b.size, nullptr};
    region.is_constant = is_constant(parameters, i);
    if (b.allocation) {
      region.allocation = static_cast<char*>(b.allocation);
      region.allocation_size = b.allocation_size;
      region.written = b.written;
    }
    launch.grid.buffers[i] = tagged(data, VMPS_BUFFER_TAG + i);
    run.regions[VMPS_ARGUMENT_TAG + i] = {Space::threadgroup, false, i,
                                          parameter_name(parameters, VMPS_PARAMETER_THREADGROUP, i)};
  }
  for (unsigned i = 0; i < variables; i++)
    run.regions[VMPS_VARIABLE_TAG + i] = {Space::threadgroup, true, i, image.variables_begin[i].name};

  vmps_scalar_flops = 0;
  for (Observer* observer : observers) observer->launch_begins(run);
  std::string failure;
  {
    Instruments instruments(run, observers);
    launch.instruments = &instruments;
    failure = run_grid(launch);
  }
  run.scalar_flops = vmps_scalar_flops;
  for (Observer* observer : observers) {
    const std::string verdict = observer->verdict(run);
    if (!verdict.empty()) failure += (failure.empty() ? "" : "; ") + verdict;
  }
  run.failed = !failure.empty();
  for (Observer* observer : observers) observer->launch_ends(run);
  return failure;
}

Instruments::Instruments(Run& run, const std::vector<Observer*>& watching)
    : run_(run), observers_(watching), waiting_(VMPS_MAX_LANES, {VMPS_SIMD_FUNCTION, 0, &kNowhere}) {
  running_instruments = this;
}

Instruments::~Instruments() { running_instruments = nullptr; }

Instruments* Instruments::running() { return running_instruments; }

void Instruments::threadgroup_begins(const vmps_threadgroup& threadgroup, char* memory) {
  run_.threadgroup = &threadgroup;
  if (memory != memory_) {  // the same for all threadgroups of a worker
    memory_ = memory;
    const vmps_image& image = *run_.launch.image;
    for (size_t tag = VMPS_ARGUMENT_TAG; tag < run_.regions.size(); tag++) {
      Region& region = run_.regions[tag];
      if (region.is_variable) {
        const vmps_variable& variable = image.variables_begin[region.index];
        region.begin = memory + (variable.place - image.memory_begin);
        region.size = variable.size;
      } else {
        const uint64_t argument = reinterpret_cast<uint64_t>(threadgroup.arguments[region.index]);
        region.begin = reinterpret_cast<char*>(argument & kAddress);
        region.size = run_.launch.threadgroup_memory[region.index];
      }
      region.allocation = memory;
      region.allocation_size = Worker::arena_size();
    }
  }
  for (Observer* observer : observers_) observer->threadgroup_begins(run_);
}

void* Instruments::tagged_argument(void* address, unsigned slot) {
  return address ? tagged(address, VMPS_ARGUMENT_TAG + slot) : nullptr;
}

void Instruments::threadgroup_ends() {
  for (Observer* observer : observers_) observer->threadgroup_ends(run_);
  run_.threadgroup = nullptr;
}

void Instruments::barrier_passed(const vmps_lane& any) {
  const unsigned flags = waiting_[any.in_threadgroup].mem_flags;
  for (unsigned i = 0; i < run_.threadgroup->lane_count; i++) waiting_[i].operation = VMPS_SIMD_FUNCTION;
  for (Observer* observer : observers_) observer->threadgroup_barrier(run_, flags);
}

void Instruments::served(const vmps_simdgroup& simdgroup, unsigned lanes, const vmps_lane& any) {
  Waiting& its = waiting_[any.in_threadgroup];
  const SimdgroupOperation operation{its.operation, its.mem_flags, simdgroup, lanes, *its.site};
  const unsigned first = simdgroup.lanes[0].in_threadgroup;
  for (unsigned i = 0; i < VMPS_SIMD_LANES; i++)
    if (lanes >> i & 1) waiting_[first + i].operation = VMPS_SIMD_FUNCTION;
  for (Observer* observer : observers_) observer->simdgroup_operation(run_, operation);
}

void Instruments::announce(const vmps_lane& lane, vmps_operation operation, unsigned mem_flags) {
  Waiting& its = waiting_[lane.in_threadgroup];
  its.operation = operation;
  its.mem_flags = mem_flags;
}

void Instruments::at(const vmps_lane& lane, const vmps_site& site) { waiting_[lane.in_threadgroup].site = &site; }

void Instruments::device_fence() {
  for (Observer* observer : observers_) observer->device_fence(run_);
}

void* Instruments::access(void* pointer, const vmps_site& site, uint64_t size, const vmps_lane& lane) {
  const uint64_t word = reinterpret_cast<uint64_t>(pointer);
  const uint64_t tag = word >> VMPS_TAG_SHIFT;
  if (tag == 0 || tag >= run_.regions.size()) return pointer;
  Region& region = run_.regions[tag];
  char* address = reinterpret_cast<char*>(word & kAddress);
  // In 48 bits, so that what was subtracted from a tagged pointer borrows nothing from the tag's meaning.
  const int64_t offset = static_cast<int64_t>((word - reinterpret_cast<uint64_t>(region.begin)) << 16) >> 16;
  const bool inside =
      region.begin && offset >= 0 && uint64_t(offset) <= region.size && size <= region.size - uint64_t(offset);
  const Access access{site, region, offset, size, inside, lane, std::exchange(wrapped_, nullptr)};
  for (Observer* observer : observers_) observer->access(run_, access);
  if (inside) return address;
  if (harmless_.size() < size + 2 * VMPS_SIMD_LANES) harmless_.resize(size + 2 * VMPS_SIMD_LANES);
  std::memset(harmless_.data(), 0, size);
  return harmless_.data();
}

}  // namespace vmps

extern "C" {

VMPS_API unsigned long vmps_scalar_flops = 0;

VMPS_API void* vmps_access(void* pointer, const vmps_site* site) {
  vmps::Instruments* instruments = vmps::Instruments::running();
  return instruments->access(pointer, *site, site->size, vmps::Worker::current_lane(__builtin_frame_address(0)));
}

VMPS_API void* vmps_access_range(void* pointer, const vmps_site* site, unsigned long size) {
  vmps::Instruments* instruments = vmps::Instruments::running();
  return instruments->access(pointer, *site, size, vmps::Worker::current_lane(__builtin_frame_address(0)));
}

VMPS_API void vmps_index_wrapped(const vmps_site* site) { vmps::Instruments::running()->index_wrapped(*site); }

VMPS_API void vmps_announce(unsigned operation, unsigned mem_flags) {
  vmps::Instruments::running()->announce(vmps::Worker::current_lane(__builtin_frame_address(0)),
                                         static_cast<vmps_operation>(operation), mem_flags);
}

VMPS_API void vmps_device_fence() { vmps::Instruments::running()->device_fence(); }

VMPS_API void vmps_at(const vmps_site* site) {
  vmps::Instruments::running()->at(vmps::Worker::current_lane(__builtin_frame_address(0)), *site);
}
}
