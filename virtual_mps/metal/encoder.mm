// Compute and blit encoders: checks, bindings, and the call of the executor.
#import "encoder.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>

#import "buffer.h"
#include "errors.h"
#import "library.h"
#include "modes.h"

namespace {

constexpr NSUInteger kMaxBytes = 4096;  // of setBytes
constexpr NSUInteger kThreadgroupMemoryAlignment = 16;

struct Bindings {
  vmps_launch_args arguments{};
  VMPSBuffer* buffers[VMPS_MAX_BINDINGS] = {};  // retained until something else takes the slot
  std::string bytes[VMPS_MAX_BINDINGS];

  Bindings() = default;

  // A copy that work can be deferred with: it keeps the buffers alive and has bytes of its own.
  Bindings(const Bindings& other) : arguments(other.arguments) {
    for (int i = 0; i < VMPS_MAX_BINDINGS; i++) {
      buffers[i] = [other.buffers[i] retain];
      if (buffers[i] || !arguments.buffers[i].data) continue;
      bytes[i] = other.bytes[i];
      arguments.buffers[i].data = bytes[i].data();
    }
  }

  ~Bindings() {
    for (auto* buffer : buffers) [buffer release];
  }

  void bind(NSUInteger index, VMPSBuffer* buffer, NSUInteger offset) {
    if (buffers[index] != buffer) {
      [buffer retain];
      [buffers[index] release];
      buffers[index] = buffer;
    }
    arguments.buffers[index] = {};
    if (!buffer) return;
    char* memory = static_cast<char*>(buffer->memory);
    // A plain launch tells nobody what it writes.
    if (buffer->written && !vmps::modes().check) vmps::mark_written(buffer, 0, buffer->bytes);
    arguments.buffers[index] = {memory + offset, buffer->bytes - offset, memory, buffer->bytes, buffer->written};
  }

  void bind_bytes(NSUInteger index, const void* source, NSUInteger length) {
    bind(index, nullptr, 0);
    bytes[index].assign(static_cast<const char*>(source), length);
    arguments.buffers[index] = {bytes[index].data(), length};
  }
};

void launch(const VMPSPipeline* pipeline, const vmps_launch_args& arguments) {
  char* message = nullptr;
  if (vmps_launch(pipeline->kernel, &arguments, &message) != 0) throw std::runtime_error(vmps::take_error(message));
}

std::string dimensions(MTLSize size) {
  return std::to_string(size.width) + "x" + std::to_string(size.height) + "x" + std::to_string(size.depth);
}

void store(uint32_t (&to)[3], MTLSize from, const char* method) {
  const NSUInteger values[3] = {from.width, from.height, from.depth};
  for (int i = 0; i < 3; i++) {
    if (values[i] > UINT32_MAX) vmps::assertion_failed(method, "a grid dimension exceeds 32 bits: " + dimensions(from));
    to[i] = static_cast<uint32_t>(values[i]);
  }
}

}  // namespace

@interface VMPSEncoder : NSObject <MTLCommandEncoder> {
 @public
  VMPSCommandBuffer* target;
  bool ended;
  NSString* name;
}
@end

@implementation VMPSEncoder
- (void)open:(const char*)method {
  if (ended) vmps::assertion_failed(method, "the encoder was used after endEncoding");
}
- (id<MTLDevice>)device {
  return MTLCreateSystemDefaultDevice();
}
- (NSString*)label {
  return name;
}
- (void)setLabel:(NSString*)label {
  [name autorelease];
  name = [label copy];
}
- (void)endEncoding {
  [self open:"MTLCommandEncoder endEncoding"];
  ended = true;
  target->open_encoder = nil;
}
- (void)insertDebugSignpost:(NSString*)string {
}
- (void)pushDebugGroup:(NSString*)string {
}
- (void)popDebugGroup {
}
- (void)dealloc {
  if (!ended) {
    *target->broken = "Command encoder released without endEncoding";
    target->open_encoder = nil;
  }
  [target release];
  [name release];
  [super dealloc];
}
@end

@interface VMPSComputeEncoder : VMPSEncoder <MTLComputeCommandEncoder> {
 @public
  Bindings* bindings;
  VMPSPipeline* pipeline;
  MTLDispatchType type;
}
@end

@implementation VMPSComputeEncoder
@synthesize dispatchType = type;

static void check_index(const char* method, NSUInteger index) {
  if (index >= VMPS_MAX_BINDINGS) vmps::assertion_failed(method, "index(" + std::to_string(index) + ") must be < 31");
}

- (void)setComputePipelineState:(id<MTLComputePipelineState>)state {
  [self open:"MTLComputeCommandEncoder setComputePipelineState:"];
  if (!state)
    vmps::assertion_failed("MTLComputeCommandEncoder setComputePipelineState:", "computePipeline must not be nil");
  [(id)state retain];
  [pipeline release];
  pipeline = (VMPSPipeline*)state;
}
- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index {
  constexpr auto method = "MTLComputeCommandEncoder setBuffer:offset:atIndex:";
  [self open:method];
  check_index(method, index);
  VMPSBuffer* checked = buffer ? vmps::checked_buffer(buffer, method) : nullptr;
  if (checked && offset > checked->bytes)
    vmps::assertion_failed(method, "offset(" + std::to_string(offset) + ") must be <= [buffer length](" +
                                       std::to_string(checked->bytes) + ")");
  bindings->bind(index, checked, offset);
}
- (void)setBufferOffset:(NSUInteger)offset atIndex:(NSUInteger)index {
  constexpr auto method = "MTLComputeCommandEncoder setBufferOffset:atIndex:";
  check_index(method, index);
  if (!bindings->buffers[index]) vmps::assertion_failed(method, "no buffer is bound at index " + std::to_string(index));
  [self setBuffer:bindings->buffers[index] offset:offset atIndex:index];
}
- (void)setBuffers:(const id<MTLBuffer>[])buffers offsets:(const NSUInteger[])offsets withRange:(NSRange)range {
  for (NSUInteger i = 0; i < range.length; i++)
    [self setBuffer:buffers[i] offset:offsets[i] atIndex:range.location + i];
}
- (void)setBytes:(const void*)bytes length:(NSUInteger)length atIndex:(NSUInteger)index {
  constexpr auto method = "MTLComputeCommandEncoder setBytes:length:atIndex:";
  [self open:method];
  check_index(method, index);
  if (!bytes || length == 0) vmps::validation_failed(method, "bytes must not be NULL and length must be > 0");
  if (length > kMaxBytes) vmps::validation_failed(method, "length(" + std::to_string(length) + ") must be <= 4096");
  bindings->bind_bytes(index, bytes, length);
}
- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index {
  constexpr auto method = "MTLComputeCommandEncoder setThreadgroupMemoryLength:atIndex:";
  [self open:method];
  check_index(method, index);
  const NSUInteger excess = length % kThreadgroupMemoryAlignment;
  if (excess) {
    vmps::validation_failed(method, "length(" + std::to_string(length) + ") must be a multiple of 16");
    length += kThreadgroupMemoryAlignment - excess;
  }
  bindings->arguments.threadgroup_memory[index] = static_cast<uint32_t>(length);
}

- (void)checkThreads:(MTLSize)group method:(const char*)method {
  [self open:method];
  if (!pipeline) vmps::assertion_failed(method, "no compute pipeline state is set");
  const NSUInteger threads = group.width * group.height * group.depth;
  if (threads == 0 || threads > pipeline->max_threads)
    vmps::assertion_failed(method, std::string(vmps_kernel_name(pipeline->kernel)) + ": threadsPerThreadgroup " +
                                       dimensions(group) + " = " + std::to_string(threads) + " must be 1.." +
                                       std::to_string(pipeline->max_threads));
}

// In a plain run a kernel may be given fewer slots than it declares, as long as it does not touch them.
- (void)checkBindings:(const char*)method {
  NSUInteger memory = pipeline.staticThreadgroupMemoryLength;
  for (size_t i = 0; i < pipeline->parameter_count; i++) {
    const vmps_parameter& parameter = pipeline->parameters[i];
    const bool is_buffer = parameter.kind == VMPS_PARAMETER_BUFFER;
    const uint32_t length = bindings->arguments.threadgroup_memory[parameter.index];
    if (!is_buffer) memory += length;
    if (is_buffer ? !bindings->arguments.buffers[parameter.index].data : !length)
      vmps::validation_failed(method, std::string("Compute Function(") + vmps_kernel_name(pipeline->kernel) +
                                          "): missing " + (is_buffer ? "Buffer" : "Threadgroup Memory") +
                                          " binding at index " + std::to_string(parameter.index) + " for " +
                                          parameter.name);
  }
  if (memory > VMPS_MAX_THREADGROUP_MEMORY)
    vmps::assertion_failed(method, "threadgroup memory of " + std::string(vmps_kernel_name(pipeline->kernel)) + ", " +
                                       std::to_string(memory) + " bytes, must be <= 32768");
}

- (void)launch {
  if (!vmps::modes().deferred) {
    const double start = vmps::seconds_now();
    launch(pipeline, bindings->arguments);
    if (target->start == 0) target->start = start;
    target->end = vmps::seconds_now();
    return;
  }
  auto kept = std::make_shared<Bindings>(*bindings);
  auto kernel = std::shared_ptr<VMPSPipeline>([pipeline retain], [](VMPSPipeline* used) { [used release]; });
  vmps::run_or_defer(target, [=] { ::launch(kernel.get(), kept->arguments); });
}

- (void)dispatchThreads:(MTLSize)threads threadsPerThreadgroup:(MTLSize)group {
  constexpr auto method = "MTLComputeCommandEncoder dispatchThreads:threadsPerThreadgroup:";
  [self checkThreads:group method:method];
  [self checkBindings:method];
  auto& arguments = bindings->arguments;
  store(arguments.threads, threads, method);
  store(arguments.threads_per_threadgroup, group, method);
  std::memset(arguments.threadgroups, 0, sizeof arguments.threadgroups);
  if (threads.width && threads.height && threads.depth) [self launch];
}
- (void)dispatchThreadgroups:(MTLSize)groups threadsPerThreadgroup:(MTLSize)group {
  constexpr auto method = "MTLComputeCommandEncoder dispatchThreadgroups:threadsPerThreadgroup:";
  [self checkThreads:group method:method];
  [self checkBindings:method];
  auto& arguments = bindings->arguments;
  store(arguments.threadgroups, groups, method);
  store(arguments.threads_per_threadgroup, group, method);
  std::memset(arguments.threads, 0, sizeof arguments.threads);
  if (groups.width && groups.height && groups.depth) [self launch];
}
// Dispatches run one after the other, whatever the dispatch type: there is nothing for a barrier to wait for. It is
// checked mode that looks for races among those that no barrier separates.
- (void)separateDispatches {
  static std::atomic<uint32_t> groups{0};
  if (type != MTLDispatchTypeConcurrent) return;
  uint32_t& group = bindings->arguments.group;
  while ((group = ++groups) == 0) {
  }
}
- (void)memoryBarrierWithScope:(MTLBarrierScope)scope {
  [self open:"MTLComputeCommandEncoder memoryBarrierWithScope:"];
  if (scope & MTLBarrierScopeBuffers) [self separateDispatches];
}
- (void)memoryBarrierWithResources:(const id<MTLResource>[])resources count:(NSUInteger)count {
  [self open:"MTLComputeCommandEncoder memoryBarrierWithResources:count:"];
  [self separateDispatches];
}
- (void)useResource:(id<MTLResource>)resource usage:(MTLResourceUsage)usage {
  [self open:"MTLComputeCommandEncoder useResource:usage:"];
}
- (void)dealloc {
  [pipeline release];
  delete bindings;
  [super dealloc];
}
@end

@interface VMPSBlitEncoder : VMPSEncoder <MTLBlitCommandEncoder>
@end

@implementation VMPSBlitEncoder
static VMPSBuffer* checked_range(id<MTLBuffer> buffer, NSUInteger start, NSUInteger length, const char* method) {
  VMPSBuffer* checked = buffer ? vmps::checked_buffer(buffer, method) : nullptr;
  if (!checked || start > checked->bytes || length > checked->bytes - start)
    vmps::assertion_failed(
        method, "bytes " + std::to_string(start) + "+" + std::to_string(length) + " are not within the buffer");
  return checked;
}

- (void)copyFromBuffer:(id<MTLBuffer>)source
          sourceOffset:(NSUInteger)source_offset
              toBuffer:(id<MTLBuffer>)destination
     destinationOffset:(NSUInteger)destination_offset
                  size:(NSUInteger)size {
  constexpr auto method = "MTLBlitCommandEncoder copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:";
  [self open:method];
  auto* from = [checked_range(source, source_offset, size, method) retain];
  auto* to = [checked_range(destination, destination_offset, size, method) retain];
  vmps::run_or_defer(target, [=] {
    std::memmove(static_cast<char*>(to->memory) + destination_offset,
                 static_cast<const char*>(from->memory) + source_offset, size);
    vmps::mark_written(to, destination_offset, size);
    [from release];
    [to release];
  });
}
- (void)fillBuffer:(id<MTLBuffer>)buffer range:(NSRange)range value:(uint8_t)value {
  constexpr auto method = "MTLBlitCommandEncoder fillBuffer:range:value:";
  [self open:method];
  auto* to = [checked_range(buffer, range.location, range.length, method) retain];
  vmps::run_or_defer(target, [=] {
    std::memset(static_cast<char*>(to->memory) + range.location, value, range.length);
    vmps::mark_written(to, range.location, range.length);
    [to release];
  });
}
- (void)synchronizeResource:(id<MTLResource>)resource {
  [self open:"MTLBlitCommandEncoder synchronizeResource:"];
}
@end

namespace vmps {

id new_compute_encoder(VMPSCommandBuffer* buffer, MTLDispatchType type) {
  VMPSComputeEncoder* encoder = [VMPSComputeEncoder new];
  encoder->target = [buffer retain];
  encoder->bindings = new Bindings;
  encoder->type = type;
  [encoder separateDispatches];
  return encoder;
}

id new_blit_encoder(VMPSCommandBuffer* buffer) {
  VMPSBlitEncoder* encoder = [VMPSBlitEncoder new];
  encoder->target = [buffer retain];
  return encoder;
}

}  // namespace vmps
