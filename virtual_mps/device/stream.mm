// at::mps::MPSStream and MPSDevice, which PyTorch declares in its headers and defines only on a Mac.
#include "stream.h"

#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSStream.h>

#include <array>
#include <atomic>
#include <exception>

#include "../metal/dispatch.h"
#include "../metal/modes.h"
#include "memory.h"
#include "version.h"

namespace at::mps {

void dispatch_sync_with_rethrow(dispatch_queue_t queue, void (^block)()) {
  __block std::exception_ptr thrown;
  dispatch_sync(queue, ^{
    try {
      block();
    } catch (...) {
      thrown = std::current_exception();
    }
  });
  if (thrown) std::rethrow_exception(thrown);
}

MPSStream::MPSStream(Stream stream) : _stream(stream) {
  _commandQueue = [MTLCreateSystemDefaultDevice() newCommandQueue];
  _serialQueue = dispatch_queue_create("metal gpu stream", DISPATCH_QUEUE_SERIAL);
}

MPSStream::~MPSStream() = default;

MPSCommandBuffer_t MPSStream::commandBuffer() {
  if (!_commandBuffer) _commandBuffer = [[MPSCommandBuffer commandBufferFromCommandQueue:_commandQueue] retain];
  return _commandBuffer;
}

MTLComputeCommandEncoder_t MPSStream::commandEncoder() {
  if (!_commandEncoder) _commandEncoder = [[commandBuffer() computeCommandEncoder] retain];
  return _commandEncoder;
}

void MPSStream::endKernelCoalescing() {
  if (!_commandEncoder) return;
  [_commandEncoder endEncoding];
  [_commandEncoder release];
  _commandEncoder = nil;
}

void MPSStream::synchronize(SyncType type) {
  @autoreleasepool {
    endKernelCoalescing();
    switch (type) {
      case SyncType::NONE:
      case SyncType::COMMIT_ADAPTIVE:  // commits under memory pressure, of which there is none
        break;
      case SyncType::COMMIT:
        commit();
        break;
      case SyncType::COMMIT_AND_CONTINUE:
        commitAndContinue();
        break;
      case SyncType::COMMIT_AND_WAIT:
        commitAndWait();
        break;
    }
  }
}

void MPSStream::commit() { commitAndContinue(); }

void MPSStream::commitAndContinue() {
  if (_commandBuffer) [_commandBuffer commitAndContinue];
}

void MPSStream::commitAndWait() {
  if (!_commandBuffer) return;
  // Given up first: a commit that throws must not leave a used-up buffer on the stream.
  MPSCommandBuffer* buffer = [_commandBuffer autorelease];
  _commandBuffer = nil;
  [buffer commit];
  [buffer waitUntilCompleted];
}

void MPSStream::flush() { commitAndWait(); }

void MPSStream::copy(MTLBuffer_t source,
                     MTLBuffer_t destination,
                     size_t length,
                     size_t source_offset,
                     size_t destination_offset,
                     uint64_t,
                     SyncType type) {
  dispatch_sync_with_rethrow(_serialQueue, ^{
    @autoreleasepool {
      endKernelCoalescing();
      id<MTLBlitCommandEncoder> blit = [commandBuffer() blitCommandEncoder];
      [blit copyFromBuffer:source
               sourceOffset:source_offset
                   toBuffer:destination
          destinationOffset:destination_offset
                       size:length];
      [blit endEncoding];
      synchronize(type);
    }
  });
}

void MPSStream::copy_and_sync(MTLBuffer_t source,
                              MTLBuffer_t destination,
                              size_t length,
                              size_t source_offset,
                              size_t destination_offset,
                              bool non_blocking,
                              uint64_t profile) {
  copy(source, destination, length, source_offset, destination_offset, profile,
       non_blocking ? SyncType::COMMIT : SyncType::COMMIT_AND_WAIT);
}

void MPSStream::addCompletedHandler(MTLCommandBufferHandler block) {
  dispatch_sync_with_rethrow(_serialQueue, ^{
    [commandBuffer() addCompletedHandler:block];
  });
}

MTLDevice_t MPSStream::device() const { return MTLCreateSystemDefaultDevice(); }

namespace {

MPSStream* new_stream(c10::StreamId id) { return new MPSStream(Stream(Stream::UNSAFE, vmps::kDevice, id)); }

thread_local MPSStream* current_stream = nullptr;

}  // namespace

MPSStream* getDefaultMPSStream() {
  static auto* stream = new_stream(0);
  return stream;
}

MPSStream* getCurrentMPSStream() { return current_stream ? current_stream : getDefaultMPSStream(); }
MPSStream* MPSStreamImpl::getInstance() { return getDefaultMPSStream(); }

#if VMPS_TORCH_VERSION >= 214
namespace {

constexpr size_t kStreams = 32;
std::atomic<size_t> streams_taken{0};

MPSStream* pool_stream(size_t index) {
  static auto* streams = [] {
    auto* all = new std::array<MPSStream*, kStreams>;
    for (size_t i = 0; i < kStreams; i++) (*all)[i] = new_stream(static_cast<c10::StreamId>(i + 1));
    return all;
  }();
  return (*streams)[index];
}

}  // namespace

void setCurrentMPSStream(MPSStream* stream) { current_stream = stream; }
MPSStream* getStreamFromPool() { return pool_stream(streams_taken++ % kStreams); }

void synchronizeAllMPSStreams(SyncType type) {
  getDefaultMPSStream()->synchronize(type);
  for (size_t i = 0; i < std::min(streams_taken.load(), kStreams); i++) pool_stream(i)->synchronize(type);
}
#endif

MPSDevice::MPSDevice() : _mtl_device(MTLCreateSystemDefaultDevice()) {}
MPSDevice::~MPSDevice() = default;

MPSDevice* MPSDevice::getInstance() {
  static auto* device = new MPSDevice;
  return device;
}

std::string MPSDevice::getName() const { return _mtl_device.name.UTF8String; }
unsigned MPSDevice::getCoreCount() const { return 1; }

// macOS 15.0, and an M2 (Apple family 8). The names of the versions differ between releases, their order does not.
bool MPSDevice::isMacOS13Plus(MacOSVersion version) const {
  constexpr auto kMacOS15_0 = static_cast<MacOSVersion>(1);
  return version <= kMacOS15_0;
}

bool is_available() { return true; }

#if VMPS_TORCH_VERSION >= 214
bool is_macos_at_least(MacOSVersion version) { return MPSDevice::getInstance()->isMacOS13Plus(version); }
bool has_mpp() { return false; }
#else
bool is_macos_13_or_newer(MacOSVersion version) { return MPSDevice::getInstance()->isMacOS13Plus(version); }
#endif

#if VMPS_TORCH_VERSION >= 213
bool is_apple_family_or_newer(AppleGPUFamily family) { return family <= AppleGPUFamily::APPLE_8_PLUS; }
#endif

}  // namespace at::mps

namespace vmps {

namespace {
using at::mps::SyncType;
at::mps::MPSStream* stream() { return at::mps::getDefaultMPSStream(); }
}  // namespace

namespace {

// On the stream's queue, so that no other thread is encoding; or at once, if the caller already is a block of that
// queue, as in PyTorch's tutorial, which calls torch::mps::commit() there.
void submit(SyncType type) {
  if (on_queue(stream()->queue())) return stream()->synchronize(type);
  at::mps::dispatch_sync_with_rethrow(stream()->queue(), ^{
    stream()->synchronize(type);
  });
}

}  // namespace

void commit() { submit(SyncType::COMMIT); }

void synchronize() {
  submit(SyncType::COMMIT_AND_WAIT);
#if VMPS_TORCH_VERSION >= 214
  at::mps::synchronizeAllMPSStreams(SyncType::COMMIT_AND_WAIT);
#endif
}

void* command_buffer() {
  stream()->endKernelCoalescing();  // the caller is about to make an encoder of its own
  return stream()->commandBuffer();
}

void* dispatch_queue() { return stream()->queue(); }

void before_stock_op() {
  dispatch_queue_t queue = stream()->queue();
  if (on_queue(queue))
    dispatch_sync(queue, ^{
                  });  // fails, with the message that this is a deadlock on a Mac
  if (modes().deferred) synchronize();
}

}  // namespace vmps
