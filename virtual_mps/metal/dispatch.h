#pragma once
#include <dispatch/dispatch.h>

#include <string>

namespace vmps {
const std::string& bytes_of(dispatch_data_t data);
bool on_queue(dispatch_queue_t queue);  // is the calling thread inside a block of this queue?
}  // namespace vmps
