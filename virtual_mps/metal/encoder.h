#pragma once
#import "command_buffer.h"

namespace vmps {

id new_compute_encoder(VMPSCommandBuffer* buffer, MTLDispatchType type);
id new_blit_encoder(VMPSCommandBuffer* buffer);

}  // namespace vmps
