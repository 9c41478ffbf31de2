// GeGLU, forward and backward (Shazeer, arXiv:2002.05202), with GELU by tanh or exact.
#include <metal_stdlib>

#include "gated.h"

INSTANTIATE_GATED("geglu_tanh", float, GELUTanh)
INSTANTIATE_GATED("geglu_tanh", half, GELUTanh)
INSTANTIATE_GATED("geglu_tanh", bfloat, GELUTanh)
INSTANTIATE_GATED("geglu_none", float, GELUExact)
INSTANTIATE_GATED("geglu_none", half, GELUExact)
INSTANTIATE_GATED("geglu_none", bfloat, GELUExact)
