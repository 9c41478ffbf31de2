// Command queues and command buffers. Work runs on the thread that encodes it, or, in deferred mode, on the one that
// commits.
#import "command_buffer.h"

#import <MetalPerformanceShaders/MetalPerformanceShaders.h>

#include <ctime>

#import "encoder.h"
#include "errors.h"
#import "library.h"
#include "modes.h"

NSString* const MTLCommandBufferErrorDomain = @"MTLCommandBufferErrorDomain";

namespace vmps {

double seconds_now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

void run_or_defer(VMPSCommandBuffer* buffer, std::function<void()> work) {
  if (modes().deferred) {
    buffer->work->push_back(std::move(work));
    return;
  }
  const double start = seconds_now();
  work();
  if (buffer->start == 0) buffer->start = start;
  buffer->end = seconds_now();
}

}  // namespace vmps

@interface VMPSCommandQueue : NSObject <MTLCommandQueue>
@end

@implementation VMPSCommandQueue
@synthesize label;
- (id<MTLDevice>)device {
  return MTLCreateSystemDefaultDevice();
}
- (id<MTLCommandBuffer>)commandBuffer {
  VMPSCommandBuffer* buffer = [VMPSCommandBuffer new];
  buffer->queue = [self retain];
  return [buffer autorelease];
}
- (id<MTLCommandBuffer>)commandBufferWithDescriptor:(MTLCommandBufferDescriptor*)descriptor {
  return [self commandBuffer];
}
- (id<MTLCommandBuffer>)commandBufferWithUnretainedReferences {
  return [self commandBuffer];
}
- (void)dealloc {
  [label release];
  [super dealloc];
}
@end

id<MTLCommandQueue> vmps::new_command_queue() { return [VMPSCommandQueue new]; }

@implementation MTLCommandBufferDescriptor
@synthesize retainedReferences, errorOptions;
- (instancetype)init {
  self = [super init];
  if (self) retainedReferences = YES;
  return self;
}
- (id)copyWithZone:(NSZone*)zone {
  MTLCommandBufferDescriptor* copy = [[MTLCommandBufferDescriptor allocWithZone:zone] init];
  copy.retainedReferences = retainedReferences;
  copy.errorOptions = errorOptions;
  return copy;
}
@end

@implementation VMPSCommandBuffer
@synthesize label = name, commandQueue = queue, status = state, error = failure, GPUStartTime = start, GPUEndTime = end;
- (instancetype)init {
  self = [super init];
  if (self) {
    work = new std::vector<std::function<void()>>;
    scheduled_handlers = new std::vector<MTLCommandBufferHandler>;
    completed_handlers = new std::vector<MTLCommandBufferHandler>;
    broken = new std::string;
  }
  return self;
}
- (void)dealloc {
  for (auto handler : *scheduled_handlers) [handler release];
  for (auto handler : *completed_handlers) [handler release];
  delete work;
  delete scheduled_handlers;
  delete completed_handlers;
  delete broken;
  [failure release];
  [name release];
  [queue release];
  [super dealloc];
}
- (id<MTLDevice>)device {
  return MTLCreateSystemDefaultDevice();
}
- (BOOL)retainedReferences {
  return YES;
}
- (CFTimeInterval)kernelStartTime {
  return start;
}
- (CFTimeInterval)kernelEndTime {
  return end;
}
- (void)checkEncodable:(const char*)method {
  if (state >= MTLCommandBufferStatusCommitted)
    vmps::assertion_failed(method, "_status < MTLCommandBufferStatusCommitted: the command buffer was committed");
  if (open_encoder) vmps::assertion_failed(method, "A command encoder is already encoding to this command buffer");
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
  return [self computeCommandEncoderWithDispatchType:MTLDispatchTypeSerial];
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)type {
  [self checkEncodable:"MTLCommandBuffer computeCommandEncoder"];
  return (id<MTLComputeCommandEncoder>)(open_encoder = [vmps::new_compute_encoder(self, type) autorelease]);
}
- (id<MTLBlitCommandEncoder>)blitCommandEncoder {
  [self checkEncodable:"MTLCommandBuffer blitCommandEncoder"];
  return (id<MTLBlitCommandEncoder>)(open_encoder = [vmps::new_blit_encoder(self) autorelease]);
}
- (void)encodeSignalEvent:(id<MTLEvent>)event value:(uint64_t)value {
  [self checkEncodable:"MTLCommandBuffer encodeSignalEvent:value:"];
  auto signal = (id<MTLSharedEvent>)event;
  [signal retain];
  vmps::run_or_defer(self, [=] {
    signal.signaledValue = value;
    [signal release];
  });
}
- (void)encodeWaitForEvent:(id<MTLEvent>)event value:(uint64_t)value {
  [self checkEncodable:"MTLCommandBuffer encodeWaitForEvent:value:"];
  auto awaited = (id<MTLSharedEvent>)event;
  [awaited retain];
  vmps::run_or_defer(self, [=] {
    const bool reached = awaited.signaledValue >= value;
    [awaited release];
    if (!reached)
      throw vmps::MetalAssertion("a command buffer waits for an event value that nothing committed before it signals");
  });
}
- (void)addScheduledHandler:(MTLCommandBufferHandler)block {
  if (state >= MTLCommandBufferStatusCommitted)
    vmps::assertion_failed("MTLCommandBuffer addScheduledHandler:", "Scheduled handler provided after commit call");
  scheduled_handlers->push_back([block copy]);
}
- (void)addCompletedHandler:(MTLCommandBufferHandler)block {
  if (state >= MTLCommandBufferStatusCommitted)
    vmps::assertion_failed("MTLCommandBuffer addCompletedHandler:", "Completed handler provided after commit call");
  completed_handlers->push_back([block copy]);
}
- (void)enqueue {
  if (state == MTLCommandBufferStatusNotEnqueued) state = MTLCommandBufferStatusEnqueued;
}
- (void)runDeferredWork {
  if (work->empty()) return;
  start = start ? start : vmps::seconds_now();
  for (auto& piece : *work) piece();
  end = vmps::seconds_now();
}
- (void)commit {
  if (state >= MTLCommandBufferStatusCommitted)
    vmps::assertion_failed("MTLCommandBuffer commit", "commit an already committed command buffer");
  if (open_encoder) vmps::assertion_failed("MTLCommandBuffer commit", "commit command buffer with uncommitted encoder");
  if (!broken->empty()) vmps::assertion_failed("MTLCommandBuffer commit", *broken);
  state = MTLCommandBufferStatusScheduled;
  for (auto handler : *scheduled_handlers) handler(self);
  std::string message;
  try {
    [self runDeferredWork];
    state = MTLCommandBufferStatusCompleted;
  } catch (const std::exception& error) {
    message = error.what();
    state = MTLCommandBufferStatusError;
    failure = [vmps::metal_error(MTLCommandBufferErrorDomain, MTLCommandBufferErrorInternal, message) retain];
  }
  work->clear();
  for (auto handler : *completed_handlers) handler(self);
  if (state == MTLCommandBufferStatusError) throw std::runtime_error(message);
}
- (void)waitUntilScheduled {
  [self waitUntilCompleted];
}
- (void)waitUntilCompleted {
  if (state < MTLCommandBufferStatusCommitted)
    vmps::assertion_failed("MTLCommandBuffer waitUntilCompleted",
                           "the command buffer was not committed, so this would wait for ever");
}
@end

// PyTorch's stream encodes into one of these: a command buffer that goes on after a commit, in a new root buffer.
@interface MPSCommandBuffer () {
  id<MTLCommandBuffer> root;
}
@end

@implementation MPSCommandBuffer
@synthesize label;
+ (instancetype)commandBufferFromCommandQueue:(id<MTLCommandQueue>)commandQueue {
  return [[[self alloc] initWithCommandBuffer:[commandQueue commandBuffer]] autorelease];
}
+ (instancetype)commandBufferWithCommandBuffer:(id<MTLCommandBuffer>)commandBuffer {
  return [[[self alloc] initWithCommandBuffer:commandBuffer] autorelease];
}
- (instancetype)initWithCommandBuffer:(id<MTLCommandBuffer>)commandBuffer {
  self = [super init];
  if (self) root = [commandBuffer retain];
  return self;
}
- (void)dealloc {
  [root release];
  [label release];
  [super dealloc];
}
- (id<MTLCommandBuffer>)commandBuffer {
  return root;
}
- (id<MTLCommandBuffer>)rootCommandBuffer {
  return root;
}
- (void)commitAndContinue {
  id<MTLCommandBuffer> committed = [root autorelease];
  root = [[committed.commandQueue commandBuffer] retain];
  [committed commit];
}
- (id<MTLDevice>)device {
  return root.device;
}
- (id<MTLCommandQueue>)commandQueue {
  return root.commandQueue;
}
- (BOOL)retainedReferences {
  return root.retainedReferences;
}
- (CFTimeInterval)kernelStartTime {
  return root.kernelStartTime;
}
- (CFTimeInterval)kernelEndTime {
  return root.kernelEndTime;
}
- (CFTimeInterval)GPUStartTime {
  return root.GPUStartTime;
}
- (CFTimeInterval)GPUEndTime {
  return root.GPUEndTime;
}
- (MTLCommandBufferStatus)status {
  return root.status;
}
- (NSError*)error {
  return root.error;
}
- (void)enqueue {
  [root enqueue];
}
- (void)commit {
  [root commit];
}
- (void)addScheduledHandler:(MTLCommandBufferHandler)block {
  [root addScheduledHandler:block];
}
- (void)addCompletedHandler:(MTLCommandBufferHandler)block {
  [root addCompletedHandler:block];
}
- (void)waitUntilScheduled {
  [root waitUntilScheduled];
}
- (void)waitUntilCompleted {
  [root waitUntilCompleted];
}
- (id<MTLBlitCommandEncoder>)blitCommandEncoder {
  return [root blitCommandEncoder];
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
  return [root computeCommandEncoder];
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)dispatchType {
  return [root computeCommandEncoderWithDispatchType:dispatchType];
}
- (void)encodeSignalEvent:(id<MTLEvent>)event value:(uint64_t)value {
  [root encodeSignalEvent:event value:value];
}
- (void)encodeWaitForEvent:(id<MTLEvent>)event value:(uint64_t)value {
  [root encodeWaitForEvent:event value:value];
}
@end
