#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace vmps {

// Gives every aten op that PyTorch's MPS backend could run a kernel on the MPS and SparseMPS keys: the CPU's, on the
// tensors' own memory. `dense` and `sparse` are the ops that have a kernel on a Mac; strict mode refuses the others.
void register_stock_ops(const std::vector<std::string>& dense, const std::vector<std::string>& sparse);

uint64_t stock_op_calls();  // since the process started

}  // namespace vmps
