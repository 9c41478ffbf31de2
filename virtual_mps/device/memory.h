// Device memory: host memory whose DataPtr points at the id<MTLBuffer> that owns it, as on a Mac.
#pragma once
#include <ATen/mps/MPSAllocatorInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

namespace vmps {

inline const c10::Device kDevice(c10::DeviceType::MPS, 0);

at::mps::IMPSAllocator& device_allocator();
c10::Allocator& pinned_allocator();
bool is_pinned(const void* host);

// A CPU storage on the bytes of a device storage, and the reverse. Each keeps the other's memory alive; nothing is
// copied.
c10::Storage host_alias(const c10::Storage& device);
// The same for a caller that may write to it at any time.
c10::Storage writable_host_alias(const c10::Storage& device);
c10::DataPtr device_alias(const c10::Storage& host);

size_t allocated_bytes();  // what live tensors hold
size_t driver_bytes();     // what was ever held since the cache was last emptied: the real allocator keeps it
void empty_cache();
void set_memory_fraction(double fraction);  // of the recommended memory; 0: no limit

}  // namespace vmps
