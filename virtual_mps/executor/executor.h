// The C interface between the Metal framework and what compiles and executes shaders.
//
// libvmps_executor.so is built, and cached by the hash of its sources, by the Python function
// `virtual_mps.compiler.build_runtime()`, which returns its path. Link against it or open it; nothing here depends on
// torch, Objective-C or the C++ ABI.
//
// A library is a Metal source with its options. Its compiled form lives in a disk cache named by content, which several
// processes may fill at once. What the cache lacks is made by `python -m virtual_mps.compiler` in a child process, so
// `import virtual_mps` must stay cheap (no torch).
//
// Every function that can fail takes `char** error`: on failure it returns NULL (or -1) and stores a message, which the
// caller releases with vmps_free. Messages are UTF-8 and end without a newline. Nothing here throws, aborts or prints.
// All functions may be called from any thread.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define VMPS_API __attribute__((visibility("default")))

enum {
  VMPS_MAX_BINDINGS = 31,                   // slots of [[buffer(n)]], and of [[threadgroup(n)]]
  VMPS_SIMD_WIDTH = 32,                     // threadExecutionWidth
  VMPS_MAX_THREADS_PER_THREADGROUP = 1024,  // of a kernel without [[max_total_threads_per_threadgroup(n)]]
  VMPS_MAX_THREADGROUP_MEMORY = 32 * 1024,  // bytes, declared in the kernel plus set by the host
};

typedef struct vmps_library vmps_library;
typedef struct vmps_kernel vmps_kernel;

VMPS_API void vmps_free(void* memory);

// How to reach the compiler. NULL keeps what holds already; the defaults are
//   python            $VIRTUAL_MPS_PYTHON, else "python3"
//   python_path       put before the child's PYTHONPATH; the folder that holds the virtual_mps package
//   cache_directory   $VIRTUAL_MPS_CACHE, else $XDG_CACHE_HOME/virtual_mps, else ~/.cache/virtual_mps
VMPS_API void vmps_configure(const char* python, const char* python_path, const char* cache_directory);

// ---- libraries ------------------------------------------------------------------------------------------------------

typedef struct {
  const char* const* defines;  // "NAME" or "NAME=VALUE": MTLCompileOptions.preprocessorMacros
  size_t define_count;
  int fast_math;         // 0: safe math (no assumption about NaN, infinity, signed zero, association)
  int language_version;  // 301 for MSL 3.1; 0: the newest known
  int preprocessed;      // the text is what `python -m virtual_mps.compiler preprocess` wrote: a metallib's content
} vmps_compile_options;

// Reads a source text as Metal's runtime compiler does: no local #include is resolved, and messages name
// "program_source:LINE:COLUMN". `options` may be NULL. Only reads and preprocesses: kernels are compiled when asked
// for. (A file with local includes goes through `python -m virtual_mps.compiler preprocess IN -o OUT [-I DIR] [-D
// NAME=VALUE]` first, as `metal -c` would; its messages keep naming IN.)
VMPS_API vmps_library* vmps_library_create(const char* source,
                                           size_t length,
                                           const vmps_compile_options* options,
                                           char** error);
VMPS_API void vmps_library_destroy(vmps_library* library);

// JSON, owned by the library:
// {"kernels": {"NAME": {"parameters": [{"kind": "buffer" | "threadgroup" | "builtin", "index": 0, "name": "x",
//                                       "attribute": "thread_position_in_grid" (builtin only),
//                                       "address_space": "device" | "constant" (buffer only),
//                                       "function_constant": "has_w" (present only if that constant is true)}],
//                       "max_total_threads_per_threadgroup": 1024}},
//  "function_constants": {"NAME": {"index": 20, "type": "bool"}}}
VMPS_API const char* vmps_library_table(const vmps_library* library);

// ---- kernels --------------------------------------------------------------------------------------------------------

typedef struct {
  const char* name;  // NULL: by index
  uint32_t index;
  const void* value;
  size_t size;  // bytes at value
} vmps_constant;

// Compiles (or finds in the cache) one kernel for one set of function constants, and loads it. Constants that the
// library does not declare are ignored; so are later values for a constant given twice.
VMPS_API vmps_kernel* vmps_kernel_create(
    const vmps_library* library, const char* name, const vmps_constant* constants, size_t constant_count, char** error);
VMPS_API void vmps_kernel_destroy(vmps_kernel* kernel);

enum { VMPS_PARAMETER_BUFFER = 0, VMPS_PARAMETER_THREADGROUP = 1 };
typedef struct {
  int kind;
  uint32_t index;
  const char* name;
  int constant;  // of a buffer: in `constant`, not in `device`
} vmps_parameter;

// The slots this kernel takes; a parameter whose function constant is false or not set is not among them.
VMPS_API size_t vmps_kernel_parameters(const vmps_kernel* kernel, const vmps_parameter** parameters);
VMPS_API const char* vmps_kernel_name(const vmps_kernel* kernel);
VMPS_API uint32_t vmps_kernel_max_threads(const vmps_kernel* kernel);                // maxTotalThreadsPerThreadgroup
VMPS_API uint32_t vmps_kernel_static_threadgroup_memory(const vmps_kernel* kernel);  // staticThreadgroupMemoryLength
VMPS_API int vmps_kernel_waits(const vmps_kernel* kernel);  // has barriers or simdgroup functions: runs on fibres

// ---- launching ------------------------------------------------------------------------------------------------------

typedef struct {
  void* data;   // NULL: nothing bound
  size_t size;  // bytes from data to the end of the buffer; checked only while the launch is observed
  // The buffer that `data` lies in, and one bit for each of its bytes (the lowest bit first) that says whether it was
  // written since it was allocated, and room for 32 more. May be NULL: `data` is a buffer of its own; everything was
  // written.
  void* allocation;
  size_t allocation_size;
  unsigned char* written;
} vmps_binding;

typedef struct {
  vmps_binding buffers[VMPS_MAX_BINDINGS];         // setBuffer (offset already added) and setBytes
  uint32_t threadgroup_memory[VMPS_MAX_BINDINGS];  // setThreadgroupMemoryLength
  uint32_t threadgroups[3];                        // dispatchThreadgroups; all 0: see threads
  uint32_t threads[3];                             // dispatchThreads: edge threadgroups are cut
  uint32_t threads_per_threadgroup[3];
  // Launches that follow each other with the same number, which is not 0, are dispatches of a concurrent encoder with
  // no memory barrier between them. They still run one after another; checked mode looks for races among them.
  uint32_t group;
} vmps_launch_args;

// Checked mode, on or off: a launch in which a kernel did what it must not fails, with all that was found. Returns what
// held before.
VMPS_API int vmps_set_check(int on);

// Lanes and threadgroups run one after another in an order made from this number; 0: in the usual order, on all cores.
// Returns what held before.
VMPS_API uint64_t vmps_set_seed(uint64_t seed);

// The kernels launched since the last call, each once: lines of library folder, tab, name. Free it with vmps_free.
VMPS_API char* vmps_take_launched(void);

// Runs the kernel to its end on the calling thread and the pool ($VIRTUAL_MPS_THREADS, default: one a core, at most
// 16). Reads `args` only until it returns. Returns 0, or -1 for a geometry the kernel cannot run with and for errors
// found while running, such as a barrier that not all threads of a threadgroup reach; the rest of the grid is then not
// run.
VMPS_API int vmps_launch(const vmps_kernel* kernel, const vmps_launch_args* args, char** error);

// ---- counting -------------------------------------------------------------------------------------------------------

// Between the two calls every launch of the process that ends well is counted, by each of those who count. The end
// gives a JSON list of kernels, in the order of their first launches, which the caller releases with vmps_free. What
// its numbers are is told in virtual_mps/counters.py.
typedef struct vmps_count vmps_count;
VMPS_API vmps_count* vmps_count_begin(void);
VMPS_API char* vmps_count_end(vmps_count* count);

#ifdef __cplusplus
}
#endif
