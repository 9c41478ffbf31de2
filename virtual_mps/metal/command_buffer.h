#pragma once
#import <Metal/Metal.h>

#include <functional>
#include <string>
#include <vector>

@interface VMPSCommandBuffer : NSObject <MTLCommandBuffer> {
 @public
  id<MTLCommandQueue> queue;
  id open_encoder;  // not retained: an encoder retains its command buffer
  std::vector<std::function<void()>>* work;
  std::vector<MTLCommandBufferHandler>* scheduled_handlers;
  std::vector<MTLCommandBufferHandler>* completed_handlers;
  std::string* broken;  // what went wrong where nothing could be thrown
  MTLCommandBufferStatus state;
  NSError* failure;
  NSString* name;
  double start, end;
}
@end

namespace vmps {

double seconds_now();
id<MTLCommandQueue> new_command_queue();

// Runs a piece of encoded work now, or, in deferred mode, keeps it until the command buffer is committed.
void run_or_defer(VMPSCommandBuffer* buffer, std::function<void()> work);

}  // namespace vmps
