// at::native::mps::MetalShaderLibrary and MetalKernelFunction.
#include <ATen/core/TensorBase.h>
#include <ATen/mps/MPSStream.h>
#include <ATen/native/mps/MetalShaderLibrary.h>

#include <cstdlib>

#include "../metal/buffer_c.h"
#include "version.h"

namespace at::mps {
void dispatch_sync_with_rethrow(dispatch_queue_t queue, void (^block)());
}

namespace at::native::mps {

using at::mps::getCurrentMPSStream;

namespace {

id<MTLDevice> device() { return MTLCreateSystemDefaultDevice(); }

NSString* text(const std::string& string) { return [NSString stringWithUTF8String:string.c_str()]; }

std::string reason(NSError* error) { return error ? error.localizedDescription.UTF8String : "no reason given"; }

MTLLibrary_t checked(MTLLibrary_t library, NSError* error) {
  TORCH_CHECK(library, "Failed to create metal library, error: ", reason(error));
  return library;
}

MTLSize size_of(c10::ArrayRef<uint64_t> sizes) {
  return MTLSizeMake(sizes[0], sizes.size() > 1 ? sizes[1] : 1, sizes.size() > 2 ? sizes[2] : 1);
}

// What PyTorch compiles its shaders with.
MTLCompileOptions* default_options() {
  MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
  const char* fast = std::getenv("PYTORCH_MPS_FAST_MATH");
  options.languageVersion = MTLLanguageVersion3_1;
  options.mathMode = fast && std::atoi(fast) ? MTLMathModeFast : MTLMathModeSafe;
  return options;
}

}  // namespace

void* get_tensor_gpu_address(const at::TensorBase& tensor) {
  return static_cast<char*>(vmps::buffer_contents(tensor.storage().data())) +
         tensor.storage_offset() * tensor.element_size();
}

MetalKernelFunction::MetalKernelFunction(MTLComputePipelineState_t pipeline, MTLFunction_t function)
    : cps([pipeline retain]), func([function retain]) {}

MetalKernelFunction::~MetalKernelFunction() {
  [cps release];
  [func release];
}

uint64_t MetalKernelFunction::getMaxThreadsPerThreadgroup() const { return cps.maxTotalThreadsPerThreadgroup; }
uint64_t MetalKernelFunction::getThreadExecutionWidth() const { return cps.threadExecutionWidth; }
uint64_t MetalKernelFunction::getStaticThreadGroupMemoryLength() const { return cps.staticThreadgroupMemoryLength; }

void MetalKernelFunction::runCommandBlock(std::function<void(void)> run) {
  at::mps::dispatch_sync_with_rethrow(getCurrentMPSStream()->queue(), ^{
    @autoreleasepool {
      run();
    }
  });
}

void MetalKernelFunction::startEncoding() {
  encoder = getCurrentMPSStream()->commandEncoder();
  [encoder setComputePipelineState:cps];
}

void MetalKernelFunction::setArg(unsigned index, const at::TensorBase& tensor) {
  TORCH_CHECK(tensor.device().type() == at::kMPS, "Tensor must be on MPS device");
  [encoder setBuffer:__builtin_bit_cast(id<MTLBuffer>, tensor.storage().data())
              offset:tensor.storage_offset() * tensor.element_size()
             atIndex:index];
}

void MetalKernelFunction::setArg(unsigned index, const void* bytes, uint64_t size) {
  TORCH_CHECK(size > 0, "Size must be greater than 0");
  [encoder setBytes:bytes length:size atIndex:index];
}

void MetalKernelFunction::dispatch(uint64_t length, std::optional<uint64_t> group_size) {
  const uint64_t most = getMaxThreadsPerThreadgroup();
  [encoder dispatchThreads:MTLSizeMake(length, 1, 1)
      threadsPerThreadgroup:MTLSizeMake(group_size.value_or(std::min(std::max<uint64_t>(length, 1), most)), 1, 1)];
}

void MetalKernelFunction::dispatch(c10::ArrayRef<uint64_t> length, c10::OptionalArrayRef<uint64_t> group_size) {
  TORCH_CHECK(!length.empty() && length.size() < 4, "Dispatch dimensions must be less than 3 and non-empty");
  TORCH_CHECK(!group_size || group_size->size() == length.size(),
              "size and group_size must have same number of dimensions");
  const MTLSize group = group_size ? size_of(*group_size) : MTLSizeMake(getMaxThreadsPerThreadgroup(), 1, 1);
  [encoder dispatchThreads:size_of(length) threadsPerThreadgroup:group];
}

MetalShaderLibrary::~MetalShaderLibrary() {
  for (auto& [name, pair] : cplMap) {
    [pair.first release];
    [pair.second release];
  }
  [library release];
}

MTLLibrary_t MetalShaderLibrary::compileLibrary(const std::string& source) {
  @autoreleasepool {
    NSError* error = nil;
    MTLCompileOptions* options = compile_options ? compile_options : default_options();
    return checked([device() newLibraryWithSource:text(source) options:options error:&error], error);
  }
}

MTLLibrary_t MetalShaderLibrary::getLibrary() {
  if (C10_UNLIKELY(!library)) {
    TORCH_INTERNAL_ASSERT(nparams == 0);
    library = compileLibrary(shaderSource);
  }
  return library;
}

MTLLibrary_t MetalShaderLibrary::getLibrary(const std::initializer_list<std::string>& params) {
  TORCH_INTERNAL_ASSERT(nparams == params.size());
  std::string key, source = shaderSource;
  int position = 0;
  for (auto& param : params) {
    key += ":" + param;
    // fmt's positional arguments, which is how PyTorch writes such templates: {0}, {1}, ...
    const std::string hole = "{" + std::to_string(position++) + "}";
    for (size_t at = source.find(hole); at != std::string::npos; at = source.find(hole, at + param.size()))
      source.replace(at, hole.size(), param);
  }
  auto& compiled = libMap[key];
  if (!compiled) compiled = compileLibrary(source);
  return compiled;
}

std::pair<MTLComputePipelineState_t, MTLFunction_t> MetalShaderLibrary::getLibraryPipelineState(
    MTLLibrary_t from, const std::string& name) {
  const std::string key = std::to_string(reinterpret_cast<uintptr_t>(from)) + ":" + name;
  auto known = cplMap.find(key);
  if (known != cplMap.end()) return known->second;
  id<MTLFunction> function = [from newFunctionWithName:text(name)];
  TORCH_CHECK(function, "Failed to create function state object for: ", name);
  NSError* error = nil;
  auto pipeline = [device() newComputePipelineStateWithFunction:function error:&error];
  TORCH_CHECK(pipeline, "Failed to created pipeline state object, error: ", reason(error));
  return cplMap[key] = {pipeline, function};
}

std::vector<std::string> MetalShaderLibrary::getFunctionNames() {
  @autoreleasepool {
    std::vector<std::string> names;
    for (NSString* name in getLibrary().functionNames) names.emplace_back(name.UTF8String);
    return names;
  }
}

std::shared_ptr<MetalKernelFunction> MetalShaderLibrary::getKernelFunction(const std::string& name) {
  @autoreleasepool {
    auto [pipeline, function] = getLibraryPipelineState(getLibrary(), name);
    return std::make_shared<MetalKernelFunction>(pipeline, function);
  }
}

MetalKernelFunction* MetalShaderLibrary::getCachedKernelFunctionPtr(const std::string& name) {
  auto& kernel = kernelCache[name];
  if (!kernel) {
    @autoreleasepool {
      auto [pipeline, function] = getLibraryPipelineState(getLibrary(), name);
      kernel = std::make_unique<MetalKernelFunction>(pipeline, function);
    }
  }
  return kernel.get();
}

DynamicMetalShaderLibrary::~DynamicMetalShaderLibrary() = default;

#if VMPS_TORCH_VERSION >= 213
bool MetalShaderLibrary::hasFunction(const std::string& name) {
  if (!functionNamesPopulated) {
    for (auto& known : getFunctionNames()) functionNames.insert(known);
    functionNamesPopulated = true;
  }
  return functionNames.count(name) != 0;
}

PrecompiledMetalShaderLibrary::PrecompiledMetalShaderLibrary(std::vector<uint8_t> bytes) : MetalShaderLibrary("") {
  NSError* error = nil;
  dispatch_data_t data = dispatch_data_create(bytes.data(), bytes.size(), nullptr, DISPATCH_DATA_DESTRUCTOR_DEFAULT);
  id<MTLLibrary> loaded = [device() newLibraryWithData:data error:&error];
  dispatch_release(data);
  library = checked(loaded, error);
}

PrecompiledMetalShaderLibrary::PrecompiledMetalShaderLibrary(const std::string& path) : MetalShaderLibrary("") {
  NSError* error = nil;
  library = checked([device() newLibraryWithURL:[NSURL fileURLWithPath:text(path)] error:&error], error);
}

PrecompiledMetalShaderLibrary::~PrecompiledMetalShaderLibrary() = default;
#endif

}  // namespace at::native::mps
