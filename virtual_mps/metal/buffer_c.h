// MTLBuffer for code that is not Objective-C: the allocator makes one for each storage.
#pragma once
#include <cstddef>

namespace vmps {

// A new id<MTLBuffer>, owned by the caller, on `memory`. When it is deallocated it calls release(context).
void* buffer_new(void* memory, size_t bytes, void (*release)(void* context), void* context);
void buffer_release(void* buffer);
void* buffer_contents(const void* buffer);  // nullptr for nullptr
size_t buffer_length(const void* buffer);
// From now on the buffer knows which of its bytes were written: none so far.
void buffer_follow_writes(void* buffer);
// They were, by something other than a kernel. For nullptr, and for a buffer that does not follow, nothing happens.
void buffer_mark_written(const void* buffer, size_t offset, size_t length);
size_t all_buffer_bytes();  // of the buffers that exist now

}  // namespace vmps
