// SwiGLU, forward and backward (Shazeer, arXiv:2002.05202).
#include <metal_stdlib>

#include "gated.h"

INSTANTIATE_GATED("swiglu", float, SiLU)
INSTANTIATE_GATED("swiglu", half, SiLU)
INSTANTIATE_GATED("swiglu", bfloat, SiLU)
