// The C interface.
#include "executor.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

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

struct vmps_kernel {
  std::string name;
  void* object;
  const vmps_image* image;
  std::vector<vmps_parameter> parameters;
  uint32_t static_memory;
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
  if (t[0] > kernel.image->max_threads || t[1] > kernel.image->max_threads || threads > kernel.image->max_threads)
    throw Error(subject + "threads per threadgroup " + shape + ": at most " +
                std::to_string(kernel.image->max_threads) + " in all");
}

void check_memory(const vmps_kernel& kernel, const vmps_launch_args& args) {
  const std::string subject = "kernel '" + kernel.name + "': ";
  uint64_t set = 0;
  for (uint32_t bytes : args.threadgroup_memory) set += bytes;
  if (kernel.static_memory + set > VMPS_MAX_THREADGROUP_MEMORY)
    throw Error(subject + "threadgroup memory of " + std::to_string(kernel.static_memory) + " bytes declared and " +
                std::to_string(set) + " set by the host: at most " + std::to_string(VMPS_MAX_THREADGROUP_MEMORY) +
                " in all");
  for (const vmps_parameter& p : kernel.parameters)
    if (p.kind == VMPS_PARAMETER_THREADGROUP && !args.threadgroup_memory[p.index])
      throw Error(subject + "no length was set for '" + p.name + "' at threadgroup(" + std::to_string(p.index) + ")");
}

vmps::Launch make_launch(const vmps_kernel& kernel, const vmps_launch_args& args) {
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
  launch.static_memory = kernel.static_memory;
  launch.image = kernel.image;
  launch.waits = *kernel.image->waits;
  return launch;
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
    const fs::path directory = fs::path(vmps::cache_directory()) / vmps::sha256({flags, text});
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
    std::vector<std::string> arguments;
    std::string key;
    for (size_t i = 0; i < constant_count; i++) {
      const vmps_constant& c = constants[i];
      arguments.push_back("--constant=" + (c.name ? std::string(c.name) : std::to_string(c.index)) + "=" +
                          hexadecimal(c.value, c.size));
      key += arguments.back() + '\0';
    }
    const fs::path object = library->directory / (vmps::sha256({name, key}) + ".so");
    if (!fs::exists(object)) {
      arguments.insert(arguments.begin(), {"kernel", "--library", library->directory.string(), "--output",
                                           object.string(), std::string("--name=") + name});
      vmps::call_compiler(arguments);
    }

    void* handle = dlopen(object.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) throw Error(std::string("kernel '") + name + "': " + dlerror());
    const auto* image = static_cast<const vmps_image*>(dlsym(handle, "vmps_kernel_image"));
    if (!image || image->abi_version != VMPS_ABI_VERSION) {
      dlclose(handle);
      throw Error(object.string() + " is not a kernel of this version");
    }
    auto* kernel = new vmps_kernel{name, handle, image, {}, 0};
    kernel->static_memory = static_cast<uint32_t>(image->memory_end - image->memory_begin);
    for (unsigned i = 0; i < image->parameter_count; i++)
      if (image->parameters[i].kind >= 0)
        kernel->parameters.push_back(
            {image->parameters[i].kind, image->parameters[i].index, image->parameters[i].name});
    return kernel;
  });
}

void vmps_kernel_destroy(vmps_kernel* kernel) {
  if (!kernel) return;
  dlclose(kernel->object);
  delete kernel;
}

size_t vmps_kernel_parameters(const vmps_kernel* kernel, const vmps_parameter** parameters) {
  *parameters = kernel->parameters.data();
  return kernel->parameters.size();
}
const char* vmps_kernel_name(const vmps_kernel* kernel) { return kernel->name.c_str(); }
uint32_t vmps_kernel_max_threads(const vmps_kernel* kernel) { return kernel->image->max_threads; }
uint32_t vmps_kernel_static_threadgroup_memory(const vmps_kernel* kernel) { return kernel->static_memory; }
int vmps_kernel_waits(const vmps_kernel* kernel) { return static_cast<int>(*kernel->image->waits); }

int vmps_launch(const vmps_kernel* kernel, const vmps_launch_args* args, char** error) {
  return guarded<int>(error, -1, [&] {
    check_geometry(*kernel, *args);
    check_memory(*kernel, *args);
    vmps::catch_faults();
    const std::string failure = vmps::run_grid(make_launch(*kernel, *args));
    if (!failure.empty()) throw Error("kernel '" + kernel->name + "', " + failure);
    return 0;
  });
}
}
