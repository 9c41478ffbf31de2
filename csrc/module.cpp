// The Python module: importing it registers the MPS kernels. What it offers by itself is for tests.
#include <torch/extension.h>

#include "rms_norm.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def(
      "rms_norm_geometry",
      [](int64_t columns, uint32_t max_threads) {
        const auto geometry = torch_metalk::rms_norm_geometry(columns, max_threads);
        return std::make_tuple(geometry.looped, geometry.threads);
      },
      "Whether the looped kernel is used, and threads per threadgroup");
}
