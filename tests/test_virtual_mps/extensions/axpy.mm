// y += a * x, written in each of the ways in which a Mac's extension reaches the GPU. Nothing here knows where it runs.
#include <ATen/mps/MPSStream.h>
#include <ATen/native/mps/OperationUtils.h>
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>
#include <torch/library.h>
#include <torch/mps.h>

static const char* kSource = R"metal(
#include <metal_stdlib>
using namespace metal;

kernel void axpy(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                 constant float& a [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  y[i] += a * x[i];
}
)metal";

static void check(const at::Tensor& x, const at::Tensor& y) {
  TORCH_CHECK(x.device().is_mps() && y.device().is_mps(), "axpy: x and y must be on mps");
  TORCH_CHECK(x.is_contiguous() && y.is_contiguous() && x.numel() == y.numel(), "axpy: x and y must match");
}

static id<MTLComputePipelineState> pipeline() {
  static id<MTLComputePipelineState> state = [] {
    NSError* error = nil;
    id<MTLDevice> device = MTLCreateSystemDefaultDevice();
    id<MTLLibrary> library = [device newLibraryWithSource:[NSString stringWithUTF8String:kSource]
                                                  options:nil
                                                    error:&error];
    TORCH_CHECK(library, error.localizedDescription.UTF8String);
    return [device newComputePipelineStateWithFunction:[library newFunctionWithName:@"axpy"] error:&error];
  }();
  return state;
}

static void encode(id<MTLComputeCommandEncoder> encoder, const at::Tensor& x, const at::Tensor& y, float a) {
  [encoder setComputePipelineState:pipeline()];
  [encoder setBuffer:__builtin_bit_cast(id<MTLBuffer>, x.storage().data())
              offset:x.storage_offset() * x.element_size()
             atIndex:0];
  [encoder setBuffer:__builtin_bit_cast(id<MTLBuffer>, y.storage().data())
              offset:y.storage_offset() * y.element_size()
             atIndex:1];
  [encoder setBytes:&a length:sizeof a atIndex:2];
  [encoder dispatchThreads:MTLSizeMake(x.numel(), 1, 1) threadsPerThreadgroup:MTLSizeMake(64, 1, 1)];
}

// The stream's own encoder, inside the stream's queue.
static void axpy_stream(const at::Tensor& x, at::Tensor y, double a) {
  check(x, y);
  @autoreleasepool {
    at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
    dispatch_sync(stream->queue(), ^{
      encode(stream->commandEncoder(), x, y, a);
    });
  }
}

// PyTorch's documented C++ API, with an encoder of one's own.
static void axpy_command_buffer(const at::Tensor& x, at::Tensor y, double a) {
  check(x, y);
  @autoreleasepool {
    id<MTLCommandBuffer> buffer = torch::mps::get_command_buffer();
    TORCH_CHECK(buffer, "Failed to retrieve command buffer reference");
    dispatch_sync(torch::mps::get_dispatch_queue(), ^() {
      id<MTLComputeCommandEncoder> encoder = [buffer computeCommandEncoder];
      encode(encoder, x, y, a);
      [encoder endEncoding];
      torch::mps::commit();
    });
  }
}

// PyTorch's internal helpers.
static at::native::mps::MetalShaderLibrary& library() {
  static at::native::mps::DynamicMetalShaderLibrary library(kSource);
  return library;
}

static void axpy_set_args(const at::Tensor& x, at::Tensor y, double a) {
  check(x, y);
  using namespace at::native::mps;
  auto state = library().getPipelineStateForFunc("axpy");
  auto* stream = getCurrentMPSStream();
  dispatch_sync_with_rethrow(stream->queue(), ^() {
    @autoreleasepool {
      auto encoder = stream->commandEncoder();
      [encoder setComputePipelineState:state];
      getMPSProfiler().beginProfileKernel(state, "axpy", {x, y});
      mtl_setArgs(encoder, x, y, a);
      mtl_dispatch1DJob(encoder, state, x.numel());
      getMPSProfiler().endProfileKernel(state);
      TORCH_CHECK(a != 666, "raised inside the block");
    }
  });
}

static void axpy_kernel_function(const at::Tensor& x, at::Tensor y, double a) {
  check(x, y);
  auto kernel = library().getKernelFunction("axpy");
  kernel->runCommandBlock([&] {
    kernel->startEncoding();
    kernel->setArg(0, x);
    kernel->setArg(1, y);
    kernel->setArg(2, static_cast<float>(a));
    kernel->dispatch(x.numel());
  });
}

// A command queue of one's own, and a result that the host reads from the buffer.
static double first_through_own_queue(const at::Tensor& x, at::Tensor y, double a, bool commit) {
  check(x, y);
  torch::mps::synchronize();
  @autoreleasepool {
    static id<MTLCommandQueue> queue = [MTLCreateSystemDefaultDevice() newCommandQueue];
    id<MTLCommandBuffer> buffer = [queue commandBuffer];
    id<MTLComputeCommandEncoder> encoder = [buffer computeCommandEncoder];
    encode(encoder, x, y, a);
    [encoder endEncoding];
    if (commit) {
      [buffer commit];
      [buffer waitUntilCompleted];
    }
    return static_cast<const float*>([__builtin_bit_cast(id<MTLBuffer>, y.storage().data()) contents])[0];
  }
}

// A mistake: ATen ops wait for the queue that the block occupies.
static void stock_op_inside_block(at::Tensor x) {
  auto* stream = at::mps::getCurrentMPSStream();
  dispatch_sync(stream->queue(), ^{
    x.mul_(2);
  });
}

TORCH_LIBRARY(axpy, m) {
  m.def("stock_op_inside_block(Tensor(a!) x) -> ()", [](at::Tensor x) { stock_op_inside_block(x); });
  m.def("stream(Tensor x, Tensor(a!) y, float a) -> ()", &axpy_stream);
  m.def("command_buffer(Tensor x, Tensor(a!) y, float a) -> ()", &axpy_command_buffer);
  m.def("set_args(Tensor x, Tensor(a!) y, float a) -> ()", &axpy_set_args);
  m.def("kernel_function(Tensor x, Tensor(a!) y, float a) -> ()", &axpy_kernel_function);
  m.def("first_through_own_queue(Tensor x, Tensor(a!) y, float a, bool commit) -> float", &first_through_own_queue);
}
