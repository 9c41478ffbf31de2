// Calls of the Metal API, right and wrong, by name. Nothing here knows where it runs.
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>
#include <torch/library.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace {

id<MTLDevice> device() {
  static id<MTLDevice> device = MTLCreateSystemDefaultDevice();
  return device;
}

id<MTLCommandQueue> queue() {
  static id<MTLCommandQueue> queue = [device() newCommandQueue];
  return queue;
}

NSString* const kSource = @R"metal(
#include <metal_stdlib>
using namespace metal;

constant int kScale [[function_constant(0)]];
constant bool kHasBias [[function_constant(1)]];
constant float kNamed [[function_constant(2)]];

kernel void scale(device float* x [[buffer(0)]], constant float& a [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) {
  x[i] *= a;
}
kernel void constants(device float* x [[buffer(0)]], device const float* bias [[buffer(1), function_constant(kHasBias)]],
                      uint i [[thread_position_in_grid]]) {
  x[i] = x[i] * kScale + (is_function_constant_defined(kNamed) ? kNamed : 0.0f);
  if (kHasBias) x[i] += bias[i];
}
kernel void shared(device float* x [[buffer(0)]], threadgroup float* memory [[threadgroup(0)]],
                   uint i [[thread_position_in_threadgroup]], uint n [[threads_per_threadgroup]]) {
  memory[i] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  x[i] = memory[n - 1 - i];
}
kernel void positions(device uint* out [[buffer(0)]], constant uint& width [[buffer(1)]],
                      uint2 p [[thread_position_in_grid]], uint2 group [[threadgroup_position_in_grid]]) {
  out[p.y * width + p.x] = p.x + 100 * p.y + 10000 * group.x;
}
[[max_total_threads_per_threadgroup(64)]] kernel void small(device float* x [[buffer(0)]]) {}
)metal";

id<MTLLibrary> library() {
  static id<MTLLibrary> library = [] {
    NSError* error = nil;
    id<MTLLibrary> compiled = [device() newLibraryWithSource:kSource options:nil error:&error];
    TORCH_CHECK(compiled, error.localizedDescription.UTF8String);
    return compiled;
  }();
  return library;
}

id<MTLComputePipelineState> pipeline(NSString* name, MTLFunctionConstantValues* values = nil) {
  NSError* error = nil;
  id<MTLFunction> function = values ? [library() newFunctionWithName:name constantValues:values error:&error]
                                    : [library() newFunctionWithName:name];
  TORCH_CHECK(function, "no function ", name.UTF8String);
  id<MTLComputePipelineState> state = [device() newComputePipelineStateWithFunction:function error:&error];
  TORCH_CHECK(state, error.localizedDescription.UTF8String);
  return state;
}

id<MTLBuffer> floats(std::vector<float> values) {
  return [device() newBufferWithBytes:values.data()
                               length:values.size() * sizeof(float)
                              options:MTLResourceStorageModeShared];
}

std::vector<double> read(id<MTLBuffer> buffer) {
  const auto* values = static_cast<const float*>(buffer.contents);
  return {values, values + buffer.length / sizeof(float)};
}

using Encode = std::function<void(id<MTLComputeCommandEncoder>)>;

id<MTLCommandBuffer> run(const Encode& encode) {
  id<MTLCommandBuffer> buffer = [queue() commandBuffer];
  id<MTLComputeCommandEncoder> encoder = [buffer computeCommandEncoder];
  encode(encoder);
  [encoder endEncoding];
  [buffer commit];
  [buffer waitUntilCompleted];
  return buffer;
}

MTLSize line(NSUInteger n) { return MTLSizeMake(n, 1, 1); }

void encode_scale(id<MTLComputeCommandEncoder> encoder, id<MTLBuffer> x, NSUInteger threads = 4, NSUInteger group = 4) {
  const float a = 2;
  [encoder setComputePipelineState:pipeline(@"scale")];
  [encoder setBuffer:x offset:0 atIndex:0];
  [encoder setBytes:&a length:sizeof a atIndex:1];
  [encoder dispatchThreads:line(threads) threadsPerThreadgroup:line(group)];
}

// Two dispatches of which the second needs what the first wrote.
std::vector<double> scale_twice(MTLDispatchType type, bool with_barrier) {
  id<MTLBuffer> x = floats({1, 2, 3, 4});
  id<MTLCommandBuffer> buffer = [queue() commandBuffer];
  id<MTLComputeCommandEncoder> encoder = [buffer computeCommandEncoderWithDispatchType:type];
  encode_scale(encoder, x);
  if (with_barrier) [encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];
  encode_scale(encoder, x);
  [encoder endEncoding];
  [buffer commit];
  [buffer waitUntilCompleted];
  return read(x);
}

std::map<std::string, std::function<std::vector<double>()>> right_uses() {
  return {
      {"serial_dispatches", [] { return scale_twice(MTLDispatchTypeSerial, false); }},
      {"concurrent_dispatches", [] { return scale_twice(MTLDispatchTypeConcurrent, true); }},
      {"concurrent_dispatches_without_barrier", [] { return scale_twice(MTLDispatchTypeConcurrent, false); }},
      {"scale",
       [] {
         id<MTLBuffer> x = floats({1, 2, 3, 4});
         run([=](id<MTLComputeCommandEncoder> encoder) { encode_scale(encoder, x); });
         return read(x);
       }},
      {"nonuniform_edge",
       [] {
         id<MTLBuffer> x = floats({1, 1, 1, 1, 1, 1});
         run([=](id<MTLComputeCommandEncoder> encoder) { encode_scale(encoder, x, 5, 4); });
         return read(x);
       }},
      {"threadgroups",
       [] {
         id<MTLBuffer> x = floats({1, 2, 3, 4, 5, 6, 7, 8});
         run([=](id<MTLComputeCommandEncoder> encoder) {
           [encoder setComputePipelineState:pipeline(@"shared")];
           [encoder setBuffer:x offset:4 * sizeof(float) atIndex:0];
           [encoder setThreadgroupMemoryLength:4 * sizeof(float) atIndex:0];
           [encoder dispatchThreadgroups:line(1) threadsPerThreadgroup:line(4)];
         });
         return read(x);
       }},
      {"grid_2d",
       [] {
         constexpr NSUInteger width = 5, height = 3;
         id<MTLBuffer> out = [device() newBufferWithLength:width * height * sizeof(uint32_t) options:0];
         const uint32_t w = width;
         run([=](id<MTLComputeCommandEncoder> encoder) {
           [encoder setComputePipelineState:pipeline(@"positions")];
           [encoder setBuffer:out offset:0 atIndex:0];
           [encoder setBytes:&w length:sizeof w atIndex:1];
           [encoder dispatchThreads:MTLSizeMake(width, height, 1) threadsPerThreadgroup:MTLSizeMake(4, 2, 1)];
         });
         const auto* values = static_cast<const uint32_t*>(out.contents);
         return std::vector<double>(values, values + width * height);
       }},
      {"function_constants",
       [] {
         const int scale = 3;
         const bool has_bias = true;
         const float named = 0.5;
         MTLFunctionConstantValues* values = [[MTLFunctionConstantValues new] autorelease];
         [values setConstantValue:&scale type:MTLDataTypeInt atIndex:0];
         [values setConstantValue:&has_bias type:MTLDataTypeBool atIndex:1];
         [values setConstantValue:&named type:MTLDataTypeFloat withName:@"kNamed"];
         id<MTLBuffer> x = floats({1, 2}), bias = floats({10, 20});
         run([=](id<MTLComputeCommandEncoder> encoder) {
           [encoder setComputePipelineState:pipeline(@"constants", values)];
           const id<MTLBuffer> buffers[] = {x, bias};
           const NSUInteger offsets[] = {0, 0};
           [encoder setBuffers:buffers offsets:offsets withRange:NSMakeRange(0, 2)];
           [encoder dispatchThreads:line(2) threadsPerThreadgroup:line(2)];
         });
         return read(x);
       }},
      {"absent_by_function_constant",
       [] {
         const int scale = 3;
         const bool has_bias = false;
         MTLFunctionConstantValues* values = [[MTLFunctionConstantValues new] autorelease];
         [values setConstantValue:&scale type:MTLDataTypeInt atIndex:0];
         [values setConstantValue:&has_bias type:MTLDataTypeBool atIndex:1];
         id<MTLBuffer> x = floats({1, 2});
         run([=](id<MTLComputeCommandEncoder> encoder) {
           [encoder setComputePipelineState:pipeline(@"constants", values)];
           [encoder setBuffer:x offset:0 atIndex:0];
           [encoder dispatchThreads:line(2) threadsPerThreadgroup:line(2)];
         });
         return read(x);
       }},
      {"blit",
       [] {
         id<MTLBuffer> from = floats({1, 2, 3}), to = floats({0, 0, 0, 0});
         id<MTLCommandBuffer> buffer = [queue() commandBuffer];
         id<MTLBlitCommandEncoder> blit = [buffer blitCommandEncoder];
         [blit fillBuffer:to range:NSMakeRange(12, 4) value:0];
         [blit copyFromBuffer:from sourceOffset:4 toBuffer:to destinationOffset:0 size:8];
         [blit endEncoding];
         [buffer commit];
         [buffer waitUntilCompleted];
         return read(to);
       }},
      {"several_encoders_in_turn",
       [] {
         id<MTLBuffer> x = floats({1, 1, 1, 1});
         id<MTLCommandBuffer> buffer = [queue() commandBuffer];
         for (int i = 0; i < 3; i++) {
           id<MTLComputeCommandEncoder> encoder = [buffer computeCommandEncoder];
           encode_scale(encoder, x);
           [encoder endEncoding];
         }
         [buffer commit];
         [buffer waitUntilCompleted];
         return read(x);
       }},
      {"times_status_and_handlers",
       [] {
         id<MTLBuffer> x = floats(std::vector<float>(1024, 1));
         __block double handled = 0;
         id<MTLCommandBuffer> buffer = [queue() commandBuffer];
         id<MTLComputeCommandEncoder> encoder = [buffer computeCommandEncoder];
         encode_scale(encoder, x, 1024, 64);
         [encoder endEncoding];
         [buffer addCompletedHandler:^(id<MTLCommandBuffer> done) {
           handled = done.status == MTLCommandBufferStatusCompleted;
         }];
         const double before = buffer.status;
         [buffer commit];
         [buffer waitUntilCompleted];
         return std::vector<double>{before, double(buffer.status), handled, double(buffer.error == nil),
                                    double(buffer.GPUEndTime > buffer.GPUStartTime && buffer.GPUStartTime > 0)};
       }},
      {"events",
       [] {
         id<MTLSharedEvent> event = [device() newSharedEvent];
         id<MTLCommandBuffer> buffer = [queue() commandBuffer];
         [buffer encodeSignalEvent:event value:7];
         [buffer encodeWaitForEvent:event value:7];
         [buffer commit];
         [buffer waitUntilCompleted];
         return std::vector<double>{double(event.signaledValue)};
       }},
      {"pipeline_limits",
       [] {
         id<MTLComputePipelineState> scale = pipeline(@"scale"), small = pipeline(@"small");
         MTLComputePipelineDescriptor* descriptor = [[MTLComputePipelineDescriptor new] autorelease];
         descriptor.computeFunction = [library() newFunctionWithName:@"scale"];
         descriptor.maxTotalThreadsPerThreadgroup = 128;
         id<MTLComputePipelineState> limited = [device() newComputePipelineStateWithDescriptor:descriptor
                                                                                       options:MTLPipelineOptionNone
                                                                                    reflection:nil
                                                                                         error:nil];
         return std::vector<double>{double(scale.maxTotalThreadsPerThreadgroup), double(scale.threadExecutionWidth),
                                    double(scale.staticThreadgroupMemoryLength),
                                    double(small.maxTotalThreadsPerThreadgroup),
                                    double(limited.maxTotalThreadsPerThreadgroup)};
       }},
      {"device_facts",
       [] {
         NSArray* all = MTLCopyAllDevices();
         return std::vector<double>{double(all.count == 1 && [all objectAtIndex:0] == device()),
                                    double([device() supportsFamily:MTLGPUFamilyApple7]),
                                    double([device() supportsFamily:MTLGPUFamilyMetal3]),
                                    double([device() supportsFamily:MTLGPUFamilyMetal4]),
                                    double(device().maxThreadgroupMemoryLength),
                                    double(device().maxThreadsPerThreadgroup.width),
                                    double(device().hasUnifiedMemory)};
       }},
      {"allocated_size",
       [] {
         const NSUInteger before = device().currentAllocatedSize;
         id<MTLBuffer> buffer = [device() newBufferWithLength:4096 options:0];
         const NSUInteger with = device().currentAllocatedSize;
         [buffer release];
         return std::vector<double>{double(with - before), double(device().currentAllocatedSize - before)};
       }},
      {"no_copy",
       [] {
         void* pages = nullptr;
         TORCH_CHECK(posix_memalign(&pages, 16384, 16384) == 0);
         __block int freed = 0;
         id<MTLBuffer> buffer = [device() newBufferWithBytesNoCopy:pages
                                                            length:16384
                                                           options:0
                                                       deallocator:^(void* memory, NSUInteger) {
                                                         free(memory);
                                                         freed++;
                                                       }];
         const bool same = buffer.contents == pages;
         [buffer release];
         id<MTLBuffer> misaligned = [device() newBufferWithBytesNoCopy:(char*)pages + 8
                                                                length:16384
                                                               options:0
                                                           deallocator:nil];
         return std::vector<double>{double(same), double(freed), double(misaligned == nil)};
       }},
      {"global_queue",
       [] {
         dispatch_queue_t global = dispatch_get_global_queue(QOS_CLASS_DEFAULT, 0);
         dispatch_semaphore_t done = dispatch_semaphore_create(0);
         __block double nested = 0;
         dispatch_async(global, ^{
           dispatch_sync(global, ^{
             nested = 1;
           });
           dispatch_semaphore_signal(done);
         });
         dispatch_semaphore_wait(done, DISPATCH_TIME_FOREVER);
         return std::vector<double>{nested};
       }},
      {"private_memory_has_no_contents",
       [] {
         id<MTLBuffer> buffer = [device() newBufferWithLength:16 options:MTLResourceStorageModePrivate];
         return std::vector<double>{double(buffer.contents == nullptr), double(buffer.length),
                                    double(buffer.storageMode == MTLStorageModePrivate)};
       }},
      {"missing_function",
       [] {
         NSError* error = nil;
         MTLFunctionConstantValues* none = [[MTLFunctionConstantValues new] autorelease];
         id<MTLFunction> function = [library() newFunctionWithName:@"nope" constantValues:none error:&error];
         return std::vector<double>{double(function == nil), double(error.code),
                                    double([error.localizedDescription rangeOfString:@"nope"].length)};
       }},
      {"compile_error",
       [] {
         NSError* error = nil;
         id<MTLLibrary> broken = [device() newLibraryWithSource:@"kernel void f() { nonsense; }"
                                                        options:nil
                                                          error:&error];
         return std::vector<double>{double(broken == nil), double([error.domain isEqual:MTLLibraryErrorDomain])};
       }},
      {"preprocessor_macros",
       [] {
         MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
         options.preprocessorMacros = @{@"VALUE" : @(42), @"TYPE" : @"float"};
         options.mathMode = MTLMathModeSafe;
         options.languageVersion = MTLLanguageVersion3_1;
         NSError* error = nil;
         id<MTLLibrary> compiled = [device() newLibraryWithSource:@"kernel void f(device TYPE* x) { x[0] = VALUE; }"
                                                          options:options
                                                            error:&error];
         TORCH_CHECK(compiled, error.localizedDescription.UTF8String);
         id<MTLComputePipelineState> state =
             [device() newComputePipelineStateWithFunction:[compiled newFunctionWithName:@"f"] error:&error];
         id<MTLBuffer> x = floats({0});
         run([=](id<MTLComputeCommandEncoder> encoder) {
           [encoder setComputePipelineState:state];
           [encoder setBuffer:x offset:0 atIndex:0];
           [encoder dispatchThreads:line(1) threadsPerThreadgroup:line(1)];
         });
         return read(x);
       }},
  };
}

std::map<std::string, std::function<void()>> wrong_uses() {
  return {
      {"second_encoder",
       [] {
         id<MTLCommandBuffer> buffer = [queue() commandBuffer];
         id<MTLComputeCommandEncoder> first = [buffer computeCommandEncoder];
         (void)first;
         [buffer computeCommandEncoder];
       }},
      {"encoder_after_commit",
       [] {
         id<MTLCommandBuffer> buffer = [queue() commandBuffer];
         [buffer commit];
         [buffer computeCommandEncoder];
       }},
      {"encode_after_end",
       [] {
         id<MTLComputeCommandEncoder> encoder = [[queue() commandBuffer] computeCommandEncoder];
         [encoder endEncoding];
         encode_scale(encoder, floats({1, 1, 1, 1}));
       }},
      {"commit_with_open_encoder",
       [] {
         id<MTLCommandBuffer> buffer = [queue() commandBuffer];
         [buffer computeCommandEncoder];
         [buffer commit];
       }},
      {"commit_twice",
       [] {
         id<MTLCommandBuffer> buffer = [queue() commandBuffer];
         [buffer commit];
         [buffer commit];
       }},
      {"wait_before_commit", [] { [[queue() commandBuffer] waitUntilCompleted]; }},
      {"handler_after_commit",
       [] {
         id<MTLCommandBuffer> buffer = [queue() commandBuffer];
         [buffer commit];
         [buffer addCompletedHandler:^(id<MTLCommandBuffer>){
         }];
       }},
      {"encoder_dropped",
       [] {
         id<MTLCommandBuffer> buffer = [queue() commandBuffer];
         @autoreleasepool {
           [buffer computeCommandEncoder];
         }
         [buffer commit];
       }},
      {"no_pipeline",
       [] {
         run([](id<MTLComputeCommandEncoder> encoder) {
           [encoder dispatchThreads:line(1) threadsPerThreadgroup:line(1)];
         });
       }},
      {"too_many_threads",
       [] { run([](id<MTLComputeCommandEncoder> encoder) { encode_scale(encoder, floats({1}), 2048, 2048); }); }},
      {"more_threads_than_the_kernel_allows",
       [] {
         run([](id<MTLComputeCommandEncoder> encoder) {
           [encoder setComputePipelineState:pipeline(@"small")];
           [encoder setBuffer:floats({1}) offset:0 atIndex:0];
           [encoder dispatchThreads:line(128) threadsPerThreadgroup:line(128)];
         });
       }},
      {"no_threads",
       [] { run([](id<MTLComputeCommandEncoder> encoder) { encode_scale(encoder, floats({1}), 1, 0); }); }},
      {"too_much_threadgroup_memory",
       [] {
         run([](id<MTLComputeCommandEncoder> encoder) {
           [encoder setComputePipelineState:pipeline(@"shared")];
           [encoder setBuffer:floats({1}) offset:0 atIndex:0];
           [encoder setThreadgroupMemoryLength:32768 + 16 atIndex:0];
           [encoder dispatchThreadgroups:line(1) threadsPerThreadgroup:line(1)];
         });
       }},
      {"index_31",
       [] { run([](id<MTLComputeCommandEncoder> encoder) { [encoder setBuffer:nil offset:0 atIndex:31]; }); }},
      {"offset_past_the_end",
       [] { run([](id<MTLComputeCommandEncoder> encoder) { [encoder setBuffer:floats({1}) offset:8 atIndex:0]; }); }},
      {"host_pointer_as_buffer",
       [] {
         static float values[64] = {1, 2, 3};
         run([](id<MTLComputeCommandEncoder> encoder) {
           [encoder setBuffer:(id<MTLBuffer>)(void*)values offset:0 atIndex:0];
         });
       }},
      {"blit_out_of_range",
       [] {
         id<MTLBlitCommandEncoder> blit = [[queue() commandBuffer] blitCommandEncoder];
         [blit fillBuffer:floats({1}) range:NSMakeRange(0, 8) value:1];
       }},
      // What only API validation refuses.
      {"unbound_buffer",
       [] {
         run([](id<MTLComputeCommandEncoder> encoder) {
           [encoder setComputePipelineState:pipeline(@"small")];
           [encoder dispatchThreads:line(1) threadsPerThreadgroup:line(1)];
         });
       }},
      {"set_bytes_of_5000",
       [] {
         const std::vector<char> bytes(5000);
         run([&](id<MTLComputeCommandEncoder> encoder) { [encoder setBytes:bytes.data() length:5000 atIndex:0]; });
       }},
      {"threadgroup_length_of_20",
       [] { run([](id<MTLComputeCommandEncoder> encoder) { [encoder setThreadgroupMemoryLength:20 atIndex:0]; }); }},
      {"exception_in_dispatch_sync",
       [] {
         dispatch_queue_t serial = dispatch_queue_create("test", DISPATCH_QUEUE_SERIAL);
         dispatch_sync(serial, ^{
           TORCH_CHECK(false, "thrown inside");
         });
       }},
      {"exception_in_dispatch_async",
       [] {
         dispatch_queue_t serial = dispatch_queue_create("test", DISPATCH_QUEUE_SERIAL);
         dispatch_async(serial, ^{
           TORCH_CHECK(false, "thrown inside");
         });
         dispatch_sync(serial, ^{
                       });
       }},
      {"dispatch_sync_on_the_same_queue",
       [] {
         dispatch_queue_t serial = dispatch_queue_create("test", DISPATCH_QUEUE_SERIAL);
         dispatch_sync(serial, ^{
           dispatch_sync(serial, ^{
                         });
         });
       }},
  };
}

std::vector<double> use(std::string name) {
  @autoreleasepool {
    return right_uses().at(name)();
  }
}

void misuse(std::string name) {
  @autoreleasepool {
    wrong_uses().at(name)();
  }
}

// Order and exclusion of dispatch queues: `async` pieces of work behind each other, then one waited for.
std::vector<int64_t> queue_order(int64_t count) {
  auto* order = new std::vector<int64_t>;
  dispatch_queue_t serial = dispatch_queue_create("order", DISPATCH_QUEUE_SERIAL);
  for (int64_t i = 0; i < count; i++)
    dispatch_async(serial, ^{
      order->push_back(i);
    });
  dispatch_sync(serial, ^{
    order->push_back(-1);
  });
  dispatch_semaphore_t done = dispatch_semaphore_create(0);
  dispatch_async(serial, ^{
    order->push_back(-2);
    dispatch_semaphore_signal(done);
  });
  dispatch_semaphore_wait(done, DISPATCH_TIME_FOREVER);
  const bool timed_out = dispatch_semaphore_wait(done, dispatch_time(DISPATCH_TIME_NOW, 1000000)) != 0;
  static dispatch_once_t once;
  __block int runs = 0;
  for (int i = 0; i < 2; i++)
    dispatch_once(&once, ^{
      runs++;
    });
  order->push_back(timed_out);
  order->push_back(runs);
  std::vector<int64_t> result = *order;
  delete order;
  return result;
}

// A host read of a buffer before and after the commit that fills it.
std::vector<double> read_before_and_after_commit() {
  @autoreleasepool {
    id<MTLBuffer> x = floats({1, 1, 1, 1});
    id<MTLCommandBuffer> buffer = [queue() commandBuffer];
    id<MTLComputeCommandEncoder> encoder = [buffer computeCommandEncoder];
    encode_scale(encoder, x);
    [encoder endEncoding];
    const double before = read(x)[0];
    [buffer commit];
    [buffer waitUntilCompleted];
    return {before, read(x)[0]};
  }
}

// Bytes and buffers that are gone, on the caller's side, when the work runs.
std::vector<double> arguments_outlive_the_caller() {
  @autoreleasepool {
    id<MTLBuffer> x = floats({1, 1, 1, 1});
    id<MTLCommandBuffer> buffer = [queue() commandBuffer];
    id<MTLComputeCommandEncoder> encoder = [buffer computeCommandEncoder];
    [encoder setComputePipelineState:pipeline(@"scale")];
    [encoder setBuffer:x offset:0 atIndex:0];
    for (float a : {2.0f, 3.0f}) {
      [encoder setBytes:&a length:sizeof a atIndex:1];
      [encoder dispatchThreads:line(4) threadsPerThreadgroup:line(4)];
    }
    id<MTLBuffer> gone = floats({100, 100, 100, 100});
    [encoder setBuffer:gone offset:0 atIndex:0];
    [encoder dispatchThreads:line(4) threadsPerThreadgroup:line(4)];
    [gone release];
    [encoder setBuffer:x offset:0 atIndex:0];
    [encoder endEncoding];
    [buffer commit];
    [buffer waitUntilCompleted];
    return read(x);
  }
}

std::vector<double> load_metallib(std::string path, std::string kernel) {
  @autoreleasepool {
    NSError* error = nil;
    NSURL* url = [NSURL fileURLWithPath:[NSString stringWithUTF8String:path.c_str()]];
    id<MTLLibrary> loaded = [device() newLibraryWithURL:url error:&error];
    TORCH_CHECK(loaded, error.localizedDescription.UTF8String);
    id<MTLFunction> function = [loaded newFunctionWithName:[NSString stringWithUTF8String:kernel.c_str()]];
    TORCH_CHECK(function, "no function ", kernel);
    id<MTLComputePipelineState> state = [device() newComputePipelineStateWithFunction:function error:&error];
    TORCH_CHECK(state, error.localizedDescription.UTF8String);
    id<MTLBuffer> x = floats({1, 2});
    run([=](id<MTLComputeCommandEncoder> encoder) {
      [encoder setComputePipelineState:state];
      [encoder setBuffer:x offset:0 atIndex:0];
      [encoder dispatchThreads:line(2) threadsPerThreadgroup:line(2)];
    });
    return read(x);
  }
}

}  // namespace

TORCH_LIBRARY(framework, m) {
  m.def("use(str name) -> float[]", [](std::string name) { return use(name); });
  m.def("misuse(str name) -> ()", [](std::string name) { misuse(name); });
  m.def("queue_order(int count) -> int[]", &queue_order);
  m.def("read_before_and_after_commit() -> float[]", &read_before_and_after_commit);
  m.def("arguments_outlive_the_caller() -> float[]", &arguments_outlive_the_caller);
  m.def("load_metallib(str path, str kernel) -> float[]", &load_metallib);
}
