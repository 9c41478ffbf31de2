// <metal_uniform> and <metal_logging>: what changes no result here.
#pragma once
#include "address_spaces.h"

namespace metal {
// A value that is the same in all threads.
template <class T>
using uniform = T;
template <class T>
constexpr VMPS_INLINE T make_uniform(T v) {
  return v;
}

// A log that nobody reads.
struct os_log {
  template <class... A>
  constexpr os_log(A...) {}
  template <class... A>
  void log(A...) const {}
  template <class... A>
  void log_debug(A...) const {}
  template <class... A>
  void log_info(A...) const {}
  template <class... A>
  void log_error(A...) const {}
  template <class... A>
  void log_fault(A...) const {}
};
constant os_log os_log_default;
}  // namespace metal
