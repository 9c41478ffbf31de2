#pragma once
#import <Metal/Metal.h>

// Host memory as an id<MTLBuffer>. Instance variables are public: the encoder reads them once for each binding.
@interface VMPSBuffer : NSObject <MTLBuffer> {
 @public
  void* memory;
  NSUInteger bytes;
  void (*release_memory)(void* context);
  void* context;
  MTLResourceOptions options;
  NSString* name;
  unsigned char* written;  // see vmps_binding; null: all of it
}
@end

namespace vmps {

// The address of a buffer that [setBuffer:] got; throws for an object that is none, such as a CPU tensor's data.
VMPSBuffer* checked_buffer(id<MTLBuffer> buffer, const char* method);

// The bytes were written, by something other than a kernel.
void mark_written(VMPSBuffer* buffer, size_t offset, size_t length);

inline void set_options(id<MTLBuffer> buffer, MTLResourceOptions options) { ((VMPSBuffer*)buffer)->options = options; }

}  // namespace vmps
