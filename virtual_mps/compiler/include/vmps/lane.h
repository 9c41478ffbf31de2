// The running lane, threadgroup variables, and barriers.
#pragma once
#include "kernel_abi.h"
#include "math.h"

// Bounds of the section that the kernel's threadgroup variables are linked into; null where it has none.
extern "C" char __start_vmps_threadgroup[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_vmps_threadgroup[] __attribute__((weak, visibility("hidden")));
// The same of what instrumented kernels tell about them.
extern "C" const vmps_variable __start_vmps_variables[] __attribute__((weak, visibility("hidden")));
extern "C" const vmps_variable __stop_vmps_variables[] __attribute__((weak, visibility("hidden")));

namespace vmps {
// The top word of a lane's stack holds the lane.
VMPS_INLINE vmps_lane*& self() {
  return *(vmps_lane**)(((ulong)__builtin_frame_address(0) | (VMPS_STACK_SIZE - 1)) - 7);
}

template <ulong N>
struct variable_name {
  char text[N];
  constexpr variable_name(const char (&given)[N]) {
    for (ulong i = 0; i < N; i++) text[i] = given[i];
  }
};

// Tells instrumented code what the wait that follows is for.
VMPS_INLINE void announce(vmps_operation operation, uint mem_flags = 0) {
#ifdef VMPS_INSTRUMENTED
  vmps_announce(operation, mem_flags);
#endif
}

// Gives a threadgroup variable its place at link time. Nothing is stored in `place`: its offset in the section is the
// variable's offset in the memory of each threadgroup. Variables of branches that function constants rule out vanish
// with them, as on the GPU.
template <int Id, variable_name Name, class T, ulong Alignment = alignof(T)>
struct threadgroup_variable {
  alignas(T) alignas(Alignment) __attribute__((section("vmps_threadgroup"))) static inline char place[sizeof(T)] = {};
#ifdef VMPS_INSTRUMENTED
  __attribute__((section("vmps_variables"))) static inline const vmps_variable description = {Name.text, place,
                                                                                              sizeof(T)};
  static VMPS_INLINE ulong tag() {
    return ((ulong)&description - (ulong)__start_vmps_variables) / sizeof(vmps_variable) + VMPS_VARIABLE_TAG;
  }
#else
  static VMPS_INLINE ulong tag() { return 0; }
#endif
  static VMPS_INLINE threadgroup T& get() {
    return *(threadgroup T*)((ulong)(self()->group->memory + (place - __start_vmps_threadgroup)) |
                             tag() << VMPS_TAG_SHIFT);
  }
};
}  // namespace vmps

namespace metal {
enum class mem_flags {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
};
VMPS_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
VMPS_INLINE constexpr mem_flags operator&(mem_flags a, mem_flags b) { return mem_flags(int(a) & int(b)); }

VMPS_INLINE void threadgroup_barrier(mem_flags flags) {
  vmps::announce(VMPS_THREADGROUP_BARRIER, uint(flags));
  vmps_wait_threadgroup(vmps::self());
}
}  // namespace metal
