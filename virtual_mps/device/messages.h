// PyTorch's own words on a Mac, where more than one place says them.
#pragma once

namespace vmps {

inline constexpr const char* kNoFloat64 =
    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. Please use float32 "
    "instead.";
inline constexpr const char* kNoComplex128 =
    "Trying to convert ComplexDouble to the MPS backend but it does not have support for that dtype.";

}  // namespace vmps
