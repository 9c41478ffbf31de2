// What instrumented kernels do, resolved once, for those who watch: checks and counters.
//
// While an observer is registered, every launch of the process runs the instrumented variant of its kernel, on the
// launching thread, one launch after another. An access arrives as a tagged pointer (kernel_abi.h); its tag names a
// Region, and observers get the access as a place in that region. Nothing else of a kernel arrives: what has no tag is
// the lane's own memory, or a variable of the program.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "executor.h"
#include "kernel_abi.h"

namespace vmps {

struct Launch;
class Worker;

enum class Space { device, threadgroup };

struct Region {  // a buffer as it is bound, or a piece of threadgroup memory
  Space space;
  bool is_variable;  // declared in the kernel, as opposed to set by the host
  unsigned index;    // of [[buffer(n)]], [[threadgroup(n)]], or of the variable
  std::string name;  // of the parameter or variable; empty if the kernel has no such parameter
  char* begin;       // null: nothing is bound
  size_t size;       // bytes that may be accessed: to the end of the buffer, or of the variable
  // The buffer that it is a part of; all of threadgroup memory.
  char* allocation;
  size_t allocation_size;
  unsigned char* written;    // of the allocation: see vmps_binding
  bool is_constant = false;  // a parameter in `constant`, not in `device`
};

struct Access {
  const vmps_site& site;
  Region& region;
  int64_t offset;  // bytes from region.begin; anything, unless inside
  uint64_t size;
  bool inside;
  const vmps_lane& lane;
  const vmps_site* wrapped;  // where the index may have wrapped round in 32 bits, if it did; else null

  bool reads() const { return site.kind & VMPS_READ; }
  bool writes() const { return site.kind & VMPS_WRITE; }
  bool is_atomic() const { return site.kind & VMPS_ATOMIC; }
  bool is_copy() const { return site.kind & VMPS_COPY; }
  char* address() const { return region.begin + offset; }
};

struct SimdgroupOperation {  // a simdgroup function, barrier or matrix operation, once for all lanes that take part
  vmps_operation operation;
  unsigned mem_flags;  // of a barrier
  const vmps_simdgroup& simdgroup;
  unsigned lanes;  // that take part; alive in `simdgroup` are all that could
  const vmps_site& site;
};

// One instrumented launch.
struct Run {
  const std::string& kernel;
  const Launch& launch;
  unsigned group;  // launches with the same number that is not 0 are ordered by nothing: see vmps_launch_args
  unsigned cell;   // every access covers whole pieces of this many bytes, a power of two
  std::vector<Region> regions;                    // by tag; threadgroup memory only once a threadgroup runs
  const vmps_threadgroup* threadgroup = nullptr;  // the one that runs
  uint64_t scalar_flops = 0;                      // since the launch began; up to date when it ends
  bool failed = false;                            // likewise
};

class Observer {
 public:
  virtual ~Observer() = default;
  virtual void launch_begins(Run&) {}
  virtual void launch_ends(Run&) {}  // however it ended
  virtual void threadgroup_begins(Run&) {}
  virtual void threadgroup_ends(Run&) {}
  virtual void access(Run&, const Access&) {}
  virtual void threadgroup_barrier(Run&, unsigned /*mem_flags*/) {}  // all its threads have come
  virtual void simdgroup_operation(Run&, const SimdgroupOperation&) {}
  virtual void device_fence(Run&) {}  // atomic_thread_fence of device memory with the scope of the device, by a lane
  // Asked at the end of a launch: why it fails, or nothing.
  virtual std::string verdict(Run&) { return {}; }
};

// Takes effect with the next launch. The observer must outlive its registration.
void add_observer(Observer& observer);
void remove_observer(Observer& observer);
bool observed();  // is there any?

// The rest is the executor's own.

// Runs all threadgroups of `launch`, whose image is an instrumented one. Returns the first failure, or nothing.
std::string run_observed(const std::string& kernel,
                         Launch& launch,
                         const vmps_launch_args& args,
                         const std::vector<vmps_parameter>& parameters,
                         unsigned cell);

// The part of a launch's instrumentation that a worker talks to.
class Instruments {
 public:
  Instruments(Run& run, const std::vector<Observer*>& observers);
  ~Instruments();

  void threadgroup_begins(const vmps_threadgroup& threadgroup, char* memory);
  void threadgroup_ends();
  void barrier_passed(const vmps_lane& any);
  void served(const vmps_simdgroup& simdgroup, unsigned lanes, const vmps_lane& any);
  const char* where(const vmps_lane& lane) const { return waiting_[lane.in_threadgroup].site->location; }

  void* access(void* pointer, const vmps_site& site, uint64_t size, const vmps_lane& lane);
  void announce(const vmps_lane& lane, vmps_operation operation, unsigned mem_flags);
  void at(const vmps_lane& lane, const vmps_site& site);
  void device_fence();
  void index_wrapped(const vmps_site& site) { wrapped_ = &site; }

  static Instruments* running();
  static void* tagged_argument(void* address, unsigned slot);

 private:
  struct Waiting {  // what a lane waits in, or is about to
    vmps_operation operation;
    unsigned mem_flags;
    const vmps_site* site;
  };

  Run& run_;
  const std::vector<Observer*>& observers_;
  char* memory_ = nullptr;
  const vmps_site* wrapped_ = nullptr;  // of the access to come
  std::vector<Waiting> waiting_;
  std::vector<char> harmless_;  // where accesses out of bounds go
};

}  // namespace vmps
