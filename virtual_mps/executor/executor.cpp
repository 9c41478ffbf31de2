// The C interface.
#include "executor.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "compiler_process.h"
#include "faults.h"
#include "kernel_abi.h"
#include "pool.h"
#include "sha256.h"

namespace fs = std::filesystem;
using vmps::Error;

struct vmps_library {
  fs::path directory;
  std::string table;
};

// A kernel's shared object.
struct LoadedObject {
  void* handle = nullptr;
  const vmps_image* image = nullptr;
  uint32_t static_memory = 0;
  unsigned cell = 0;  // of an instrumented one: see Run
};

struct vmps_kernel {
  std::string name;
  fs::path library;
  std::string key;  // of its constants
  std::vector<std::string> constants;
  std::vector<vmps_parameter> parameters;
  uint32_t max_threads, static_memory;
  bool waits;
  // Made when it is needed: launches are observed always or never, as a rule.
  mutable std::mutex objects_mutex;
  mutable LoadedObject plain, instrumented;
  mutable std::atomic<uint64_t> noted{0};  // the round of launches that it is noted in
};

namespace {

static_assert(unsigned{VMPS_SLOTS} == unsigned{VMPS_MAX_BINDINGS} &&
              unsigned{VMPS_SIMD_LANES} == unsigned{VMPS_SIMD_WIDTH});

// Runs `body`; an exception becomes *error and `failure`.
template <class Result, class Body>
Result guarded(char** error, Result failure, Body body) {
  std::string message;
  try {
    return body();
  } catch (const std::exception& e) {
    message = e.what();
  } catch (...) {
    message = "unknown error";
  }
  if (error) *error = strdup(message.c_str());
  return failure;
}

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string hexadecimal(const void* bytes, size_t size) {
  std::string text;
  for (size_t i = 0; i < size; i++) {
    const unsigned char byte = static_cast<const unsigned char*>(bytes)[i];
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

void check_geometry(const vmps_kernel& kernel, const vmps_launch_args& args) {
  const std::string subject = "kernel '" + kernel.name + "': ";
  const uint32_t* t = args.threads_per_threadgroup;
  const std::string shape =
      "(" + std::to_string(t[0]) + ", " + std::to_string(t[1]) + ", " + std::to_string(t[2]) + ")";
  if (!t[0] || !t[1] || !t[2]) throw Error(subject + "threads per threadgroup " + shape + " must not be 0");
  const uint64_t threads = uint64_t{t[0]} * t[1] * t[2];
  const uint32_t most = kernel.max_threads;
  if (t[0] > most || t[1] > most || threads > most)
    throw Error(subject + "threads per threadgroup " + shape + ": at most " + std::to_string(most) + " in all");
}

void check_memory(const vmps_kernel& kernel, const vmps_launch_args& args) {
  const std::string subject = "kernel '" + kernel.name + "': ";
  uint64_t set = 0;
  for (uint32_t bytes : args.threadgroup_memory) set += bytes;
  const uint32_t declared = kernel.static_memory;
  if (declared + set > VMPS_MAX_THREADGROUP_MEMORY)
    throw Error(subject + "threadgroup memory of " + std::to_string(declared) + " bytes declared and " +
                std::to_string(set) + " set by the host: at most " + std::to_string(VMPS_MAX_THREADGROUP_MEMORY) +
                " in all");
  for (const vmps_parameter& p : kernel.parameters)
    if (p.kind == VMPS_PARAMETER_THREADGROUP && !args.threadgroup_memory[p.index])
      throw Error(subject + "no length was set for '" + p.name + "' at threadgroup(" + std::to_string(p.index) + ")");
}

vmps::Launch make_launch(const vmps_kernel& kernel, const LoadedObject& object, const vmps_launch_args& args) {
  vmps::Launch launch = {};
  for (unsigned i = 0; i < VMPS_SLOTS; i++) launch.grid.buffers[i] = args.buffers[i].data;
  for (int d = 0; d < 3; d++) {
    const uint32_t size = args.threads_per_threadgroup[d];
    const bool whole = args.threadgroups[0] || args.threadgroups[1] || args.threadgroups[2];
    launch.grid.threads_per_threadgroup[d] = size;
    launch.grid.threadgroups[d] =
        whole ? args.threadgroups[d] : static_cast<uint32_t>((uint64_t{args.threads[d]} + size - 1) / size);
    const uint64_t threads = whole ? uint64_t{args.threadgroups[d]} * size : args.threads[d];
    if (threads > UINT32_MAX)
      throw Error("kernel '" + kernel.name + "': a grid of " + std::to_string(threads) + " threads in one dimension");
    launch.grid.threads[d] = static_cast<uint32_t>(threads);
  }
  std::memcpy(launch.threadgroup_memory, args.threadgroup_memory, sizeof launch.threadgroup_memory);
  launch.static_memory = object.static_memory;
  launch.image = object.image;
  launch.waits = *object.image->waits;
  return launch;
}

LoadedObject load_object(const vmps_kernel& kernel, bool instrumented) {
  const std::string variant = instrumented ? "instrumented" : "";
  const fs::path path = kernel.library / (vmps::sha256({kernel.name, kernel.key, variant}) + ".so");
  if (!fs::exists(path)) {
    std::vector<std::string> arguments = {"kernel",   "--library",   kernel.library.string(),
                                          "--output", path.string(), std::string("--name=") + kernel.name};
    if (instrumented) arguments.push_back("--instrumented");
    arguments.insert(arguments.end(), kernel.constants.begin(), kernel.constants.end());
    vmps::call_compiler(arguments);
  }
  LoadedObject object;
  object.handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!object.handle) throw Error("kernel '" + kernel.name + "': " + dlerror());
  object.image = static_cast<const vmps_image*>(dlsym(object.handle, "vmps_kernel_image"));
  if (!object.image || object.image->abi_version != VMPS_ABI_VERSION) {
    dlclose(object.handle);
    throw Error(path.string() + " is not a kernel of this version");
  }
  object.static_memory = static_cast<uint32_t>(object.image->memory_end - object.image->memory_begin);
  if (instrumented) object.cell = *static_cast<const unsigned*>(dlsym(object.handle, "vmps_kernel_cell"));
  return object;
}

const LoadedObject& object_of(const vmps_kernel& kernel, bool instrumented) {
  std::lock_guard<std::mutex> lock(kernel.objects_mutex);
  LoadedObject& object = instrumented ? kernel.instrumented : kernel.plain;
  if (!object.handle) object = load_object(kernel, instrumented);
  return object;
}

// A mutant (see compiler/mutation.py) is a library of its own, beside the original.
std::string mutant_suffix() {
  const char* mutant = std::getenv("VIRTUAL_MPS_MUTANT");
  if (!mutant || !*mutant) return "";
  const std::string text = mutant;
  return "." + text.substr(0, text.find(' '));
}

std::mutex launched_mutex;
std::set<std::string> launched;  // since they were taken
std::atomic<uint64_t> launched_round{1};

void note_launch(const vmps_kernel& kernel) {
  const uint64_t round = launched_round;
  if (kernel.noted == round) return;
  kernel.noted = round;
  std::lock_guard<std::mutex> lock(launched_mutex);
  launched.insert(kernel.library.string() + '\t' + kernel.name);
}

std::atomic<uint64_t> seed{0};

std::string run(const vmps_kernel& kernel, const vmps_launch_args& args) {
  const bool observed = vmps::observed();
  const LoadedObject& object = object_of(kernel, observed);
  vmps::Launch launch = make_launch(kernel, object, args);
  const uint64_t chosen = seed;
  vmps::Order order(chosen);
  if (chosen) launch.order = &order;
  std::string failure =
      observed ? vmps::run_observed(kernel.name, launch, args, kernel.parameters, object.cell) : vmps::run_grid(launch);
  if (!failure.empty() && chosen) failure += " (in the order of seed " + std::to_string(chosen) + ")";
  return failure;
}

}  // namespace

extern "C" {

void vmps_free(void* memory) { std::free(memory); }

void vmps_configure(const char* python, const char* python_path, const char* cache_directory) {
  vmps::configure(python, python_path, cache_directory);
}

vmps_library* vmps_library_create(const char* source,
                                  size_t length,
                                  const vmps_compile_options* options,
                                  char** error) {
  return guarded<vmps_library*>(error, nullptr, [&] {
    static const vmps_compile_options kDefaults = {};
    if (!options) options = &kDefaults;
    std::vector<std::string> arguments = {"library", "--language", std::to_string(options->language_version)};
    if (options->fast_math) arguments.push_back("--fast-math");
    if (options->preprocessed) arguments.push_back("--preprocessed");
    for (size_t i = 0; i < options->define_count; i++)
      arguments.push_back(std::string("--define=") + options->defines[i]);

    std::string flags;
    for (const std::string& argument : arguments) flags += argument + '\0';
    const std::string_view text(source, length);
    const fs::path directory = fs::path(vmps::cache_directory()) / (vmps::sha256({flags, text}) + mutant_suffix());
    const fs::path table = directory / "table.json";
    if (!fs::exists(table)) {
      vmps::ScratchSource scratch(text);
      arguments.insert(arguments.end(), {"--source", scratch.path(), "--output", directory.string()});
      vmps::call_compiler(arguments);
    }
    return new vmps_library{directory, read_file(table)};
  });
}

void vmps_library_destroy(vmps_library* library) { delete library; }

const char* vmps_library_table(const vmps_library* library) { return library->table.c_str(); }

vmps_kernel* vmps_kernel_create(const vmps_library* library,
                                const char* name,
                                const vmps_constant* constants,
                                size_t constant_count,
                                char** error) {
  return guarded<vmps_kernel*>(error, nullptr, [&] {
    auto kernel = std::make_unique<vmps_kernel>();
    kernel->name = name;
    kernel->library = library->directory;
    for (size_t i = 0; i < constant_count; i++) {
      const vmps_constant& c = constants[i];
      kernel->constants.push_back("--constant=" + (c.name ? std::string(c.name) : std::to_string(c.index)) + "=" +
                                  hexadecimal(c.value, c.size));
      kernel->key += kernel->constants.back() + '\0';
    }
    const LoadedObject& object = object_of(*kernel, vmps::observed());
    const vmps_image& image = *object.image;
    kernel->max_threads = image.max_threads;
    kernel->static_memory = object.static_memory;
    kernel->waits = *image.waits;
    if (kernel->static_memory > VMPS_MAX_THREADGROUP_MEMORY)
      throw Error("kernel '" + kernel->name + "': Threadgroup memory size (" + std::to_string(kernel->static_memory) +
                  ") exceeds the maximum threadgroup memory allowed (" + std::to_string(VMPS_MAX_THREADGROUP_MEMORY) +
                  ")");
    for (unsigned i = 0; i < image.parameter_count; i++) {
      const vmps_image_parameter& p = image.parameters[i];
      if (p.kind >= 0) kernel->parameters.push_back({p.kind, p.index, p.name, p.constant});
    }
    return kernel.release();
  });
}

void vmps_kernel_destroy(vmps_kernel* kernel) {
  if (!kernel) return;
  for (const LoadedObject* object : {&kernel->plain, &kernel->instrumented})
    if (object->handle) dlclose(object->handle);
  delete kernel;
}

size_t vmps_kernel_parameters(const vmps_kernel* kernel, const vmps_parameter** parameters) {
  *parameters = kernel->parameters.data();
  return kernel->parameters.size();
}
const char* vmps_kernel_name(const vmps_kernel* kernel) { return kernel->name.c_str(); }
uint32_t vmps_kernel_max_threads(const vmps_kernel* kernel) { return kernel->max_threads; }
uint32_t vmps_kernel_static_threadgroup_memory(const vmps_kernel* kernel) { return kernel->static_memory; }
int vmps_kernel_waits(const vmps_kernel* kernel) { return kernel->waits; }

int vmps_set_check(int on) {
  static std::mutex mutex;
  static vmps::Check* check = nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  const bool before = check;
  if (on && !check) {
    vmps::add_observer(*(check = new vmps::Check));
  } else if (!on && check) {
    vmps::remove_observer(*check);
    delete check;
    check = nullptr;
  }
  return before;
}

char* vmps_take_launched(void) {
  std::lock_guard<std::mutex> lock(launched_mutex);
  std::string lines;
  for (const std::string& line : launched) lines += line + '\n';
  launched.clear();
  launched_round++;
  return strdup(lines.c_str());
}

uint64_t vmps_set_seed(uint64_t wanted) { return seed.exchange(wanted); }

int vmps_launch(const vmps_kernel* kernel, const vmps_launch_args* args, char** error) {
  return guarded<int>(error, -1, [&] {
    check_geometry(*kernel, *args);
    check_memory(*kernel, *args);
    vmps::catch_faults();
    note_launch(*kernel);
    const std::string failure = run(*kernel, *args);
    if (!failure.empty()) throw Error("kernel '" + kernel->name + "', " + failure);
    return 0;
  });
}
}
