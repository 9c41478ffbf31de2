// PyTorch's own words on a Mac, where more than one place says them.
#pragma once

namespace vmps {

inline constexpr const char* kNoFloat64 =
    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. Please use float32 "
    "instead.";

}  // namespace vmps
