#include "metal.h"

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSStream.h>
#include <dlfcn.h>

#include <exception>
#include <map>
#include <mutex>

#include "geometry.h"

namespace torch_metalk {
namespace {

// Everything made once per process; guarded, since several threads may call operators.
std::mutex cache_mutex;
std::map<std::string, id<MTLLibrary>> libraries;
std::map<std::string, id<MTLComputePipelineState>> pipelines;

NSString* text(const std::string& s) { return [NSString stringWithUTF8String:s.c_str()]; }

std::string text(NSError* error) { return error ? error.localizedDescription.UTF8String : "unknown error"; }

// The folder that holds the shaders: beside this very library.
std::string shader_folder() {
  Dl_info info;
  TORCH_CHECK(dladdr(reinterpret_cast<const void*>(&shader_folder), &info),
              "torch_metalk: cannot find its own library");
  const std::string path = info.dli_fname;
  return path.substr(0, path.rfind('/')) + "/_shaders/";
}

MTLCompileOptions* safe_math_options() {
  MTLCompileOptions* options = [[MTLCompileOptions alloc] init];
  options.languageVersion = MTLLanguageVersion3_1;
  // Metal's default may assume that there is no NaN and no infinity.
#if defined(__MAC_OS_X_VERSION_MAX_ALLOWED) && __MAC_OS_X_VERSION_MAX_ALLOWED >= 150000
  if (@available(macOS 15.0, *)) {
    options.mathMode = MTLMathModeSafe;
    return options;
  }
#endif
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wdeprecated-declarations"
  options.fastMathEnabled = NO;
#pragma clang diagnostic pop
  return options;
}

id<MTLLibrary> make_library(const std::string& name) {
  id<MTLDevice> device = at::mps::MPSDevice::getInstance()->device();
  NSError* error = nil;
  const std::string prebuilt = shader_folder() + name + ".metallib";
  if ([[NSFileManager defaultManager] fileExistsAtPath:text(prebuilt)]) {
    id<MTLLibrary> library = [device newLibraryWithURL:[NSURL fileURLWithPath:text(prebuilt)] error:&error];
    TORCH_CHECK(library, "torch_metalk: cannot load ", prebuilt, ": ", text(error));
    return library;
  }
  const std::string path = shader_folder() + name + ".metal";
  NSString* source = [NSString stringWithContentsOfFile:text(path) encoding:NSUTF8StringEncoding error:&error];
  TORCH_CHECK(source, "torch_metalk: cannot read ", path, ": ", text(error));
  id<MTLLibrary> library = [device newLibraryWithSource:source options:safe_math_options() error:&error];
  TORCH_CHECK(library, "torch_metalk: Metal does not compile ", path, ": ", text(error));
  return library;
}

id<MTLComputePipelineState> pipeline(const Launch& launch) {
  if (launch.pipeline) {
    return (__bridge id<MTLComputePipelineState>)launch.pipeline;
  }
  std::string key = launch.kernel;
  for (bool constant : launch.constants) {
    key += constant ? '1' : '0';
  }
  std::lock_guard<std::mutex> guard(cache_mutex);
  if (auto found = pipelines.find(key); found != pipelines.end()) {
    return found->second;
  }
  id<MTLLibrary> __strong& library = libraries[launch.library];
  if (library == nil) {
    library = make_library(launch.library);
  }
  MTLFunctionConstantValues* values = [[MTLFunctionConstantValues alloc] init];
  for (size_t i = 0; i < launch.constants.size(); ++i) {
    const bool constant = launch.constants[i];
    [values setConstantValue:&constant type:MTLDataTypeBool atIndex:i];
  }
  NSError* error = nil;
  id<MTLFunction> function = [library newFunctionWithName:text(launch.kernel) constantValues:values error:&error];
  TORCH_CHECK(function, "torch_metalk: no kernel ", launch.kernel, " in ", launch.library, ": ", text(error));
  id<MTLComputePipelineState> state = [library.device newComputePipelineStateWithFunction:function error:&error];
  TORCH_CHECK(state, "torch_metalk: no pipeline for ", launch.kernel, ": ", text(error));
  return pipelines[key] = state;
}

id<MTLBuffer> buffer_of(const at::Tensor& tensor) { return __builtin_bit_cast(id<MTLBuffer>, tensor.storage().data()); }

NSUInteger byte_offset(const at::Tensor& tensor) { return tensor.storage_offset() * tensor.element_size(); }

// Runs `work` on the stream's queue. A C++ exception must not cross dispatch_sync.
template <typename Work>
void on_queue(at::mps::MPSStream* stream, const Work& work) {
  __block std::exception_ptr failure;
  const Work* what = &work;
  dispatch_sync(stream->queue(), ^{
    try {
      (*what)();
    } catch (...) {
      failure = std::current_exception();
    }
  });
  if (failure) {
    std::rethrow_exception(failure);
  }
}

void bind(id<MTLComputeCommandEncoder> encoder, const Argument& argument, NSUInteger slot) {
  if (argument.bytes()) {
    [encoder setBytes:argument.bytes() length:argument.size() atIndex:slot];
    return;
  }
  const at::Tensor* tensor = argument.tensor();
  const bool absent = tensor == nullptr || !tensor->defined();
  // An absent optional is bound as nil: the stream's encoder still holds what an earlier operator bound here.
  [encoder setBuffer:absent ? nil : buffer_of(*tensor) offset:absent ? 0 : byte_offset(*tensor) atIndex:slot];
}

}  // namespace

void dispatch(const Launch& launch, std::initializer_list<Argument> arguments) {
  TORCH_CHECK(arguments.size() <= kMaxSlots, launch.kernel, ": ", arguments.size(), " arguments, Metal has ",
              kMaxSlots);
  for (const Argument& argument : arguments) {
    TORCH_CHECK(argument.size() <= kMaxBytes, launch.kernel, ": ", argument.size(), " bytes in one argument");
  }
  @autoreleasepool {
    id<MTLComputePipelineState> state = pipeline(launch);
    TORCH_CHECK(launch.threads <= state.maxTotalThreadsPerThreadgroup, launch.kernel, ": ", launch.threads,
                " threads, its pipeline takes ", state.maxTotalThreadsPerThreadgroup);
    at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
    on_queue(stream, [&] {
      id<MTLComputeCommandEncoder> encoder = stream->commandEncoder();
      [encoder setComputePipelineState:state];
      NSUInteger slot = 0;
      for (const Argument& argument : arguments) {
        bind(encoder, argument, slot++);
      }
      if (launch.threadgroup_bytes) {
        [encoder setThreadgroupMemoryLength:launch.threadgroup_bytes atIndex:0];
      }
      if (launch.after_previous) {
        [encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];
      }
      const auto& groups = launch.threadgroups;
      [encoder dispatchThreadgroups:MTLSizeMake(groups[0], groups[1], groups[2])
              threadsPerThreadgroup:MTLSizeMake(launch.threads, 1, 1)];
    });
  }
}

void commit(bool wait) {
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  on_queue(stream, [&] { stream->synchronize(wait ? at::mps::SyncType::COMMIT_AND_WAIT : at::mps::SyncType::COMMIT); });
}

bool buffers_are_shared = true;

void* host_memory(const at::Tensor& tensor) {
  id<MTLBuffer> buffer = buffer_of(tensor);
  if (!buffers_are_shared || buffer == nil || buffer.storageMode == MTLStorageModePrivate) {
    return nullptr;
  }
  return static_cast<char*>(buffer.contents) + byte_offset(tensor);
}

uint32_t max_threads(Launch& launch) {
  @autoreleasepool {
    launch.pipeline = nullptr;
    id<MTLComputePipelineState> state = pipeline(launch);
    // The cache of pipelines keeps it.
    launch.pipeline = (__bridge const void*)state;
    return static_cast<uint32_t>(state.maxTotalThreadsPerThreadgroup);
  }
}

void choose_row_kernel(Launch& launch, const std::string& stem, const std::string& types, int64_t columns) {
  const size_t two_vectors = launch.constants.size();
  launch.constants.push_back(false);
  launch.kernel = stem + "_single_row" + types;
  for (int64_t vectors : {1, 2}) {
    launch.constants[two_vectors] = vectors == 2;
    launch.threads = row_threads(columns, vectors, max_threads(launch));
    if (launch.threads) {
      return;
    }
  }
  launch.kernel = stem + "_looped" + types;
  launch.constants[two_vectors] = false;
  const uint32_t most = max_threads(launch);
  launch.threads = whole_simdgroups(most, most, most);
}

std::string device_name() { return at::mps::MPSDevice::getInstance()->device().name.UTF8String; }

bool& is_large_chip() {
  static bool large = [] {
    const std::string name = device_name();
    return name.find("Max") != std::string::npos || name.find("Ultra") != std::string::npos;
  }();
  return large;
}

const char* metal_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float";
    case at::kHalf:
      return "half";
    case at::kBFloat16:
      return "bfloat";
    default:
      TORCH_CHECK_TYPE(false, "torch_metalk: no kernels for ", dtype, "; accepted: float32, float16, bfloat16");
  }
}

}  // namespace torch_metalk
