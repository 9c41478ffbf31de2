// What the executor and a compiled kernel share. Included by both sides: plain C++ there, address-space C++ here, so it
// uses built-in types only.
#pragma once

extern "C" {

enum vmps_limits : unsigned {
  VMPS_ABI_VERSION = 3,
  VMPS_SLOTS = 31,
  VMPS_SIMD_LANES = 32,
  VMPS_MAX_LANES = 1024,
  // A power of two, and every stack is aligned to it: a lane finds itself from its stack pointer.
  VMPS_STACK_SIZE = 64 * 1024,
};

struct vmps_simdgroup;
struct vmps_threadgroup;

struct __attribute__((aligned(64))) vmps_lane {  // one Metal thread
  void* stack_pointer;
  unsigned serve;  // lanes for which this one carries out a simdgroup function; 0 when it was served
  unsigned in_simdgroup, in_threadgroup;
  unsigned position[3];  // thread_position_in_threadgroup
  vmps_simdgroup* simdgroup;
  vmps_threadgroup* group;
  const void* site;  // the call it waits in
};

struct vmps_simdgroup {
  vmps_lane* lanes;
  unsigned alive, in_function, at_barrier;  // masks of lanes
  unsigned diverged;                        // lanes wait in different simdgroup functions
  const void* site;                         // of the first lane that came to wait in a simdgroup function
  void* operand[VMPS_SIMD_LANES];           // published by lanes that wait in a simdgroup function
  float matrix[4][64];  // operands and result of a multiplication whose matrices are spread over the lanes
};

struct vmps_grid {
  void* buffers[VMPS_SLOTS];
  unsigned threadgroups[3], threads[3], threads_per_threadgroup[3];
};

struct vmps_threadgroup {
  const vmps_grid* grid;
  vmps_lane* lanes;
  char* memory;                   // of the variables declared in the kernel
  void* arguments[VMPS_SLOTS];    // [[threadgroup(n)]]
  unsigned position[3], size[3];  // size: less than threads_per_threadgroup at the edge of a grid of threads
  unsigned lane_count, simdgroup_count;
};

// Returns the lanes whose simdgroup function the caller has to carry out, or 0 once another lane has done so.
// Lanes are told apart by the call they wait in, so the compiler must neither move or copy it across lane-dependent
// branches (convergent) nor make one call of two (nomerge).
unsigned vmps_wait_simdgroup(vmps_lane*) __attribute__((convergent, nomerge));
void vmps_wait_threadgroup(vmps_lane*) __attribute__((convergent, nomerge));
// d = a b + c on row-major 8x8 matrices; d may be c.
void vmps_multiply_accumulate_8x8(float* d, const float* a, const float* b, const float* c);

struct vmps_image_parameter {
  int kind;  // vmps_parameter.kind, or -1: none of the host's business
  unsigned index;
  const char* name;
  int constant;  // of a buffer: in `constant`, not in `device`
};

// ---- instrumented kernels -------------------------------------------------------------------------------------------
//
// For checked mode and counters, a kernel is compiled a second way. Its pointers to buffers and threadgroup memory
// carry a tag in their top bits: which argument or variable they were made from, however they are computed on. Before
// each access it hands the pointer to the executor, which gives the address to use instead.

enum vmps_tag : unsigned {
  VMPS_TAG_SHIFT = 48,
  VMPS_BUFFER_TAG = 1,                                 // + n for [[buffer(n)]]
  VMPS_ARGUMENT_TAG = VMPS_BUFFER_TAG + VMPS_SLOTS,    // + n for [[threadgroup(n)]]
  VMPS_VARIABLE_TAG = VMPS_ARGUMENT_TAG + VMPS_SLOTS,  // + n for the kernel's n-th threadgroup variable
};

// A copy reads what is only stored elsewhere, such as a structure with its padding. C10 marks a wait in a function of
// namespace c10::metal, PyTorch's own headers.
enum vmps_access_kind : unsigned short { VMPS_READ = 1, VMPS_WRITE = 2, VMPS_ATOMIC = 4, VMPS_COPY = 8, VMPS_C10 = 16 };

struct vmps_site {       // an access, or a call that waits, in the code of a kernel
  const char* location;  // "FILE:LINE", and ", called at FILE:LINE" for what was inlined; "" if it is not known
  unsigned size;         // bytes; 0 if it is known only at run time
  unsigned short alignment, kind;
};

enum vmps_operation : unsigned {
  VMPS_SIMD_FUNCTION,  // what a lane waits in unless it announces something else
  VMPS_SIMD_VOTE,      // asks which lanes are here, so it may well be called by some of them
  VMPS_QUAD_FUNCTION,
  VMPS_SIMDGROUP_BARRIER,
  VMPS_THREADGROUP_BARRIER,
  VMPS_MATRIX_LOAD,
  VMPS_MATRIX_STORE,
  VMPS_MATRIX_MULTIPLY,
};

struct __attribute__((aligned(32))) vmps_variable {  // in threadgroup memory
  const char* name;
  const char* place;  // see vmps_image.memory_begin
  unsigned long size;
};

// Gives the address to use for `pointer`: its own without the tag, or, if that is out of bounds, one that does no harm.
void* vmps_access(void* pointer, const vmps_site* site);
void* vmps_access_range(void* pointer, const vmps_site* site, unsigned long size);
// The index of the next access wrapped round in the 32 bits it was computed in, at `site` or on the way from there.
void vmps_index_wrapped(const vmps_site* site);
// What the next vmps_wait_... of this lane is for, and with which mem_flags.
void vmps_announce(unsigned operation, unsigned mem_flags);
void vmps_at(const vmps_site* site);  // the lane comes to wait
void vmps_device_fence();
extern unsigned long vmps_scalar_flops;

struct vmps_image {  // what a kernel's shared object exports, under the name vmps_kernel_image
  unsigned abi_version;
  void (*run)(vmps_threadgroup*, unsigned first_lane, unsigned end_lane);
  const char *memory_begin, *memory_end;  // link-time layout of the kernel's threadgroup variables
  const vmps_image_parameter* parameters;
  unsigned parameter_count, max_threads;
  const unsigned* waits;
  const vmps_variable *variables_begin, *variables_end;  // none unless instrumented
};
}
