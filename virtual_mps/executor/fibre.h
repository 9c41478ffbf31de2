// Switching between the stacks of lanes: by hand on x86-64, by Boost.Context elsewhere (VMPS_BOOST_FIBRES asks for it
// on x86-64 too).
#pragma once

#include "kernel_abi.h"

#if !defined(__x86_64__) && !defined(VMPS_BOOST_FIBRES)
#define VMPS_BOOST_FIBRES
#endif

#ifdef VMPS_BOOST_FIBRES
#include <boost/context/detail/fcontext.hpp>
#endif

extern "C" {
// Continues `to` and leaves `from` to be continued later. vmps_wait_simdgroup and vmps_wait_threadgroup are switches
// too: they ask one of the two functions below where to go.
void vmps_switch(vmps_lane* from, vmps_lane* to);

// A lane comes to wait in the call that returns to `site`. Returns the lane to continue with, which may be the same.
vmps_lane* vmps_arrive_in_simdgroup(vmps_lane* lane, const void* site);
vmps_lane* vmps_arrive_in_threadgroup(vmps_lane* lane, const void* site);
}

namespace vmps {

#ifdef VMPS_BOOST_FIBRES

template <void (*body)()>
void begin_fibre(boost::context::detail::transfer_t from) {
  static_cast<vmps_lane*>(from.data)->stack_pointer = from.fctx;
  body();
}

// A context that runs `body`, which must not return, on the stack below `top` (aligned to 64).
template <void (*body)()>
void* make_fibre(char* top) {
  constexpr size_t kAtLeast = 4096;  // only checked, never used
  return boost::context::detail::make_fcontext(top, kAtLeast, begin_fibre<body>);
}

#else

template <void (*body)()>
void* make_fibre(char* top) {
  void** p = reinterpret_cast<void**>(top);
  *--p = nullptr;  // where a return address would be: aligns the stack as after a call
  *--p = reinterpret_cast<void*>(body);
  for (int saved_register = 0; saved_register < 6; saved_register++) *--p = nullptr;
  return p;
}

#endif

}  // namespace vmps
