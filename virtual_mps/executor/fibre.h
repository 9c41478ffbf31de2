// Switching between stacks: by hand on x86-64, by Boost.Context elsewhere (VMPS_BOOST_FIBRES asks for it on x86-64
// too).
#pragma once

#include <cstdint>

#if !defined(__x86_64__) && !defined(VMPS_BOOST_FIBRES)
#define VMPS_BOOST_FIBRES
#endif

#ifdef VMPS_BOOST_FIBRES
#include <boost/context/detail/fcontext.hpp>
#endif

// Saves the running context in *save and continues `to`.
extern "C" void vmps_switch(void** save, void* to);

namespace vmps {

#ifdef VMPS_BOOST_FIBRES

template <void (*body)()>
void begin_fibre(boost::context::detail::transfer_t from) {
  *static_cast<void**>(from.data) = from.fctx;
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
