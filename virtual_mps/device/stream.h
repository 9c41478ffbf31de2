// The MPS stream, for code that is not Objective-C.
#pragma once

namespace vmps {

void commit();
void synchronize();
void* command_buffer();  // id<MTLCommandBuffer>
void* dispatch_queue();  // dispatch_queue_t

// Called before a stock op touches memory from the host: on a Mac such an op is encoded behind what is on the stream.
void before_stock_op();

}  // namespace vmps
