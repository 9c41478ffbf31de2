// Calls a kernel function for a range of lanes. The compiler writes down only what each parameter is; the types come
// from the function itself, so every form of template instantiation works.
#pragma once
#include "lane.h"

namespace vmps {
enum class source {
  buffer,
  threadgroup_memory,
  thread_position_in_grid,
  threadgroup_position_in_grid,
  thread_position_in_threadgroup,
  thread_index_in_threadgroup,
  thread_index_in_simdgroup,
  simdgroup_index_in_threadgroup,
  thread_index_in_quadgroup,
  quadgroup_index_in_threadgroup,
  threads_per_grid,
  threadgroups_per_grid,
  threads_per_threadgroup,
  dispatch_threads_per_threadgroup,
  threads_per_simdgroup,
  thread_execution_width,
  simdgroups_per_threadgroup,
  dispatch_simdgroups_per_threadgroup,
  quadgroups_per_threadgroup,
  dispatch_quadgroups_per_threadgroup,
  grid_origin,
  absent,  // its function constant is false
};
struct parameter {
  source from;
  unsigned slot;
};

template <class T>
struct from_three {
  static VMPS_INLINE T get(const unsigned v[3]) { return T(v[0]); }
};
template <class T, int N>
struct from_three<metal::vec<T, N>> {
  static VMPS_INLINE metal::vec<T, N> get(const unsigned v[3]) {
    metal::vec<T, N> r;
    for (int i = 0; i < N; i++) r[i] = T(v[i]);
    return r;
  }
};

VMPS_INLINE unsigned product(const unsigned v[3]) { return v[0] * v[1] * v[2]; }

VMPS_INLINE unsigned builtin(source from, const vmps_lane& lane, int d) {
  const vmps_threadgroup& group = *lane.group;
  const vmps_grid& grid = *group.grid;
  switch (from) {
    case source::thread_position_in_grid:
      return group.position[d] * grid.threads_per_threadgroup[d] + lane.position[d];
    case source::threadgroup_position_in_grid:
      return group.position[d];
    case source::thread_position_in_threadgroup:
      return lane.position[d];
    case source::thread_index_in_threadgroup:
      return lane.in_threadgroup;
    case source::thread_index_in_simdgroup:
      return lane.in_simdgroup;
    case source::simdgroup_index_in_threadgroup:
      return lane.in_threadgroup / 32;
    case source::thread_index_in_quadgroup:
      return lane.in_threadgroup % 4;
    case source::quadgroup_index_in_threadgroup:
      return lane.in_threadgroup / 4;
    case source::threads_per_grid:
      return grid.threads[d];
    case source::threadgroups_per_grid:
      return grid.threadgroups[d];
    case source::threads_per_threadgroup:
      return group.size[d];
    case source::dispatch_threads_per_threadgroup:
      return grid.threads_per_threadgroup[d];
    case source::threads_per_simdgroup:
    case source::thread_execution_width:
      return 32;
    case source::simdgroups_per_threadgroup:
      return group.simdgroup_count;
    case source::dispatch_simdgroups_per_threadgroup:
      return (product(grid.threads_per_threadgroup) + 31) / 32;
    case source::quadgroups_per_threadgroup:
      return (group.lane_count + 3) / 4;
    case source::dispatch_quadgroups_per_threadgroup:
      return (product(grid.threads_per_threadgroup) + 3) / 4;
    default:
      return 0;
  }
}

template <class A>
struct argument {
  static VMPS_INLINE A get(parameter p, const vmps_lane& lane) {
    unsigned v[3];
    for (int d = 0; d < 3; d++) v[d] = builtin(p.from, lane, d);
    return from_three<__remove_cv(A)>::get(v);
  }
};
VMPS_INLINE void* memory_of(parameter p, const vmps_lane& lane) {
  if (p.from == source::buffer) return lane.group->grid->buffers[p.slot];
  if (p.from == source::threadgroup_memory) return lane.group->arguments[p.slot];
  return nullptr;
}
#define VMPS_MEMORY_ARGUMENT(space)                                                                               \
  template <class T>                                                                                              \
  struct argument<space T*> {                                                                                     \
    static VMPS_INLINE space T* get(parameter p, const vmps_lane& lane) { return (space T*)memory_of(p, lane); }  \
  };                                                                                                              \
  template <class T>                                                                                              \
  struct argument<space T&> {                                                                                     \
    static VMPS_INLINE space T& get(parameter p, const vmps_lane& lane) { return *(space T*)memory_of(p, lane); } \
  };
VMPS_MEMORY_ARGUMENT(device)
VMPS_MEMORY_ARGUMENT(constant)
VMPS_MEMORY_ARGUMENT(threadgroup)
#undef VMPS_MEMORY_ARGUMENT

template <unsigned long...>
struct indices {};
template <class T, T... I>
using as_indices = indices<I...>;

template <class... A, unsigned long... I>
VMPS_INLINE void run(void (*function)(A...),
                     const parameter* parameters,
                     vmps_threadgroup* group,
                     unsigned first,
                     unsigned end,
                     indices<I...>) {
  for (unsigned i = first; i < end; i++) {
    vmps_lane& lane = group->lanes[i];
    self() = &lane;
    function(argument<A>::get(parameters[I], lane)...);
  }
}
template <class... A>
VMPS_INLINE void run(
    void (*function)(A...), const parameter* parameters, vmps_threadgroup* group, unsigned first, unsigned end) {
  run(function, parameters, group, first, end, __make_integer_seq<as_indices, unsigned long, sizeof...(A)>());
}
}  // namespace vmps

// Written by the compiler into the assembly, once it is known what the optimiser left.
extern "C" const unsigned vmps_kernel_waits __attribute__((visibility("hidden")));

#define VMPS_KERNEL(max_threads, ...)                                                                \
  static void vmps_run(vmps_threadgroup* group, unsigned first, unsigned end) {                      \
    vmps::run(__VA_ARGS__, vmps_parameters, group, first, end);                                      \
  }                                                                                                  \
  extern "C" __attribute__((visibility("default")))                                                  \
  const vmps_image vmps_kernel_image = {VMPS_ABI_VERSION,                                            \
                                        vmps_run,                                                    \
                                        __start_vmps_threadgroup,                                    \
                                        __stop_vmps_threadgroup,                                     \
                                        vmps_image_parameters,                                       \
                                        sizeof vmps_image_parameters / sizeof(vmps_image_parameter), \
                                        max_threads,                                                 \
                                        &vmps_kernel_waits,                                          \
                                        __start_vmps_variables,                                      \
                                        __stop_vmps_variables};
