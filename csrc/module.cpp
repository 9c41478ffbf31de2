// The Python module: importing it registers the MPS kernels. What it offers by itself is for tests.
#include <torch/extension.h>

#include "geometry.h"
#include "rope_positions.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("row_threads", &torch_metalk::row_threads,
        "Threads per threadgroup that take a row of so many columns in one pass, with so many vectors of four each, "
        "where the pipeline takes so many; 0: too few");
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
