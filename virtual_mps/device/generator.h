#pragma once
#include <ATen/core/Generator.h>

namespace vmps {

const at::Generator& default_generator();

// A CPU generator for one draw of a CPU kernel on behalf of an mps generator. Each call gives the next one of a
// sequence that the mps generator's seed determines, so the CPU's own generator is not involved.
at::Generator generator_for_draw(const at::Generator& mps);

}  // namespace vmps
