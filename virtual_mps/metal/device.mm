#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#import "buffer.h"
#include "buffer_c.h"
#import "command_buffer.h"
#include "device_limits.h"
#include "dispatch.h"
#import "library.h"

namespace {

bool read_file(const char* path, std::string* bytes) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  *bytes = text.str();
  return file.good();
}

id<MTLBuffer> buffer_on(void* memory, NSUInteger length, MTLResourceOptions options) {
  auto buffer = (id<MTLBuffer>)vmps::buffer_new(memory, length, std::free, memory);
  vmps::set_options(buffer, options);
  return buffer;
}

}  // namespace

@interface VMPSSharedEvent : NSObject <MTLSharedEvent>
@end

@implementation VMPSSharedEvent
@synthesize label, signaledValue;
- (id<MTLDevice>)device {
  return MTLCreateSystemDefaultDevice();
}
- (void)dealloc {
  [label release];
  [super dealloc];
}
@end

@interface VMPSDevice : NSObject <MTLDevice>
@end

@implementation VMPSDevice
- (NSString*)name {
  return @"Virtual MPS";
}
- (uint64_t)registryID {
  return 1;
}
- (MTLSize)maxThreadsPerThreadgroup {
  return MTLSizeMake(VMPS_MAX_THREADS_PER_THREADGROUP, VMPS_MAX_THREADS_PER_THREADGROUP,
                     VMPS_MAX_THREADS_PER_THREADGROUP);
}
- (NSUInteger)maxThreadgroupMemoryLength {
  return VMPS_MAX_THREADGROUP_MEMORY;
}
- (NSUInteger)maxBufferLength {
  return vmps::max_buffer_length();
}
- (uint64_t)recommendedMaxWorkingSetSize {
  return vmps::recommended_memory();
}
- (NSUInteger)currentAllocatedSize {
  return vmps::all_buffer_bytes();
}
- (BOOL)hasUnifiedMemory {
  return YES;
}
- (BOOL)supportsFamily:(MTLGPUFamily)family {
  // An M2's: Apple 8 and what it includes, no more, so that code paths for later chips are not taken by mistake.
  return (family >= MTLGPUFamilyApple1 && family <= MTLGPUFamilyApple8) || family == MTLGPUFamilyMac1 ||
         family == MTLGPUFamilyMac2 || (family >= MTLGPUFamilyCommon1 && family <= MTLGPUFamilyCommon3) ||
         family == MTLGPUFamilyMetal3;
}
- (id<MTLCommandQueue>)newCommandQueue {
  return vmps::new_command_queue();
}
- (id<MTLCommandQueue>)newCommandQueueWithMaxCommandBufferCount:(NSUInteger)count {
  return vmps::new_command_queue();
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options {
  if (length == 0 || length > vmps::max_buffer_length()) return nil;
  void* memory = std::calloc(1, length);
  return memory ? buffer_on(memory, length, options) : nil;
}
- (id<MTLBuffer>)newBufferWithBytes:(const void*)pointer length:(NSUInteger)length options:(MTLResourceOptions)options {
  id<MTLBuffer> buffer = [self newBufferWithLength:length options:options];
  if (buffer) std::memcpy(vmps::buffer_contents((const void*)buffer), pointer, length);
  return buffer;
}
- (id<MTLBuffer>)newBufferWithBytesNoCopy:(void*)pointer
                                   length:(NSUInteger)length
                                  options:(MTLResourceOptions)options
                              deallocator:(void (^)(void* pointer, NSUInteger length))deallocator {
  const auto page = static_cast<NSUInteger>(sysconf(_SC_PAGESIZE));
  if (reinterpret_cast<uintptr_t>(pointer) % page || length % page) return nil;  // Metal wants whole pages
  struct Owner {
    void (^deallocator)(void*, NSUInteger);
    void* pointer;
    NSUInteger length;
  };
  auto* owner = new Owner{[deallocator copy], pointer, length};
  auto release = [](void* context) {
    auto* owner = static_cast<Owner*>(context);
    if (owner->deallocator) owner->deallocator(owner->pointer, owner->length);
    [owner->deallocator release];
    delete owner;
  };
  auto buffer = (id<MTLBuffer>)vmps::buffer_new(pointer, length, release, owner);
  vmps::set_options(buffer, options);
  return buffer;
}
- (id<MTLLibrary>)newLibraryWithFile:(NSString*)path error:(NSError**)error {
  std::string bytes;
  if (!read_file(path.UTF8String, &bytes)) {
    if (error)
      *error = vmps::metal_error(MTLLibraryErrorDomain, MTLLibraryErrorFileNotFound,
                                 "library not found: " + std::string(path.UTF8String));
    return nil;
  }
  return vmps::library_from_metallib(bytes, error);
}
- (id<MTLLibrary>)newLibraryWithURL:(NSURL*)url error:(NSError**)error {
  return [self newLibraryWithFile:url.path error:error];
}
- (id<MTLLibrary>)newLibraryWithData:(dispatch_data_t)data error:(NSError**)error {
  return vmps::library_from_metallib(vmps::bytes_of(data), error);
}
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source options:(MTLCompileOptions*)options error:(NSError**)error {
  std::vector<std::string> defines;
  for (NSString* name in options.preprocessorMacros)
    defines.push_back(std::string(name.UTF8String) + "=" +
                      [[[options.preprocessorMacros objectForKey:name] description] UTF8String]);
  std::vector<const char*> pointers;
  for (auto& define : defines) pointers.push_back(define.c_str());
  vmps_compile_options wanted{};
  wanted.defines = pointers.data();
  wanted.define_count = pointers.size();
  wanted.fast_math = !options || options.mathMode != MTLMathModeSafe;
  wanted.language_version = (options.languageVersion >> 16) * 100 + (options.languageVersion & 0xffff);
  return vmps::library_from_sources({source.UTF8String}, wanted, error);
}
- (void)newLibraryWithSource:(NSString*)source
                     options:(MTLCompileOptions*)options
           completionHandler:(MTLNewLibraryCompletionHandler)handler {
  NSError* error = nil;
  id<MTLLibrary> library = [self newLibraryWithSource:source options:options error:&error];
  handler(library, error);
  [library release];
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function error:(NSError**)error {
  return vmps::pipeline_for(function, 0, nil, error);
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithDescriptor:(MTLComputePipelineDescriptor*)descriptor
                                                             options:(MTLPipelineOption)options
                                                          reflection:
                                                              (MTLAutoreleasedComputePipelineReflection*)reflection
                                                               error:(NSError**)error {
  return vmps::pipeline_for(descriptor.computeFunction, descriptor.maxTotalThreadsPerThreadgroup, descriptor.label,
                            error);
}
- (id<MTLSharedEvent>)newSharedEvent {
  return [VMPSSharedEvent new];
}
@end

extern "C" id<MTLDevice> MTLCreateSystemDefaultDevice(void) {
  static VMPSDevice* device = [VMPSDevice new];
  return device;
}

extern "C" NSArray* MTLCopyAllDevices(void) {
  return [[NSArray alloc] initWithObjects:MTLCreateSystemDefaultDevice(), nil];
}
