// The Python module: importing it registers the MPS kernels. What it offers by itself is for tests.
#include <torch/extension.h>

#include "geometry.h"
#include "rope_positions.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def(
      "row_geometry",
      [](int64_t columns, int64_t columns_per_thread, uint32_t max_threads) {
        const auto geometry = torch_metalk::row_geometry(columns, columns_per_thread, max_threads);
        return std::make_tuple(geometry.looped, geometry.threads);
      },
      "Whether the looped kernel is used, and threads per threadgroup");
  m.def(
      "elementwise_geometry",
      [](int64_t needed, uint32_t max_threads) {
        const auto geometry = torch_metalk::elementwise_geometry(needed, max_threads);
        return std::make_tuple(geometry.groups, geometry.threads);
      },
      "Threadgroups and threads per threadgroup");
  m.def("turns_per_position", &torch_metalk::turns_per_position,
        "The turns that one position adds to each pair, in units of 2^-64 turns");
}
