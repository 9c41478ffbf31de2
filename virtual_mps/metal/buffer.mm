#import "buffer.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "buffer_c.h"
#include "errors.h"

static std::atomic<size_t> live_bytes{0};

@implementation VMPSBuffer
- (void*)contents {
  if (self.storageMode == MTLStorageModePrivate) return nullptr;
  vmps::mark_written(self, 0, bytes);  // what the caller does with them is not seen
  return memory;
}
- (NSUInteger)length {
  return bytes;
}
- (NSUInteger)allocatedSize {
  return bytes;
}
- (uint64_t)gpuAddress {
  return reinterpret_cast<uint64_t>(memory);
}
- (id<MTLDevice>)device {
  return MTLCreateSystemDefaultDevice();
}
- (MTLResourceOptions)resourceOptions {
  return options;
}
- (MTLCPUCacheMode)cpuCacheMode {
  return static_cast<MTLCPUCacheMode>(options & 0xf);
}
- (MTLStorageMode)storageMode {
  return static_cast<MTLStorageMode>(options >> 4 & 0xf);
}
- (MTLHazardTrackingMode)hazardTrackingMode {
  return static_cast<MTLHazardTrackingMode>(options >> 8 & 0x3);
}
- (MTLPurgeableState)setPurgeableState:(MTLPurgeableState)state {
  return MTLPurgeableStateNonVolatile;
}
- (void)didModifyRange:(NSRange)range {
}
- (NSString*)label {
  return name;
}
- (void)setLabel:(NSString*)label {
  [name autorelease];
  name = [label copy];
}
- (void)dealloc {
  live_bytes -= bytes;
  [name release];
  std::free(written);
  if (release_memory) release_memory(context);
  [super dealloc];
}
@end

namespace vmps {

VMPSBuffer* checked_buffer(id<MTLBuffer> buffer, const char* method) {
  // The pointer may be a CPU tensor's data, which is no object at all: nothing may be sent to it before this check.
  static Class cls = [VMPSBuffer class];
  if (*reinterpret_cast<Class*>(buffer) != cls)
    assertion_failed(method, "the argument is not an MTLBuffer; is it the data of a CPU tensor?");
  return (VMPSBuffer*)buffer;
}

void* buffer_new(void* memory, size_t bytes, void (*release)(void*), void* context) {
  VMPSBuffer* buffer = [VMPSBuffer alloc];
  live_bytes += bytes;
  buffer->memory = memory;
  buffer->bytes = bytes;
  buffer->release_memory = release;
  buffer->context = context;
  return buffer;
}

void mark_written(VMPSBuffer* buffer, size_t offset, size_t length) {
  unsigned char* map = buffer->written;
  if (!map || !length) return;
  size_t at = offset;
  const size_t end = offset + length;
  for (; at < end && at % 8; at++) map[at / 8] |= static_cast<unsigned char>(1 << at % 8);
  if (at < end) std::memset(map + at / 8, 0xff, (end - at) / 8);
  for (at += (end - at) / 8 * 8; at < end; at++) map[at / 8] |= static_cast<unsigned char>(1 << at % 8);
}

void buffer_follow_writes(void* buffer) {
  auto* followed = static_cast<VMPSBuffer*>(buffer);
  followed->written = static_cast<unsigned char*>(std::calloc(1, followed->bytes / 8 + sizeof(uint32_t)));
}

void buffer_mark_written(const void* buffer, size_t offset, size_t length) {
  if (buffer) mark_written(static_cast<VMPSBuffer*>(const_cast<void*>(buffer)), offset, length);
}

void buffer_release(void* buffer) { [static_cast<VMPSBuffer*>(buffer) release]; }

void* buffer_contents(const void* buffer) {
  return buffer ? static_cast<VMPSBuffer*>(const_cast<void*>(buffer))->memory : nullptr;
}

size_t all_buffer_bytes() { return live_bytes; }

size_t buffer_length(const void* buffer) {
  return buffer ? static_cast<VMPSBuffer*>(const_cast<void*>(buffer))->bytes : 0;
}

}  // namespace vmps
