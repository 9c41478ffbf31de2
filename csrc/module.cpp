// The Python module: importing it registers the MPS kernels. What it offers by itself is for tests, but for the
// device's name.
#include <torch/extension.h>

#include "geometry.h"
#include "metal.h"
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
  m.def(
      "plan_gemm",
      [](int64_t m, int64_t n, int64_t k, int64_t matrices, bool nt, bool large_chip) {
        const auto plan = torch_metalk::plan_gemm(m, n, k, matrices, nt, large_chip);
        return std::make_tuple(plan.side, plan.chunks, plan.span);
      },
      "Side of a product's tiles, chunks along K, and the span of a chunk");
  m.def(
      "gemm_dispatches",
      [](std::tuple<uint32_t, uint32_t, uint32_t> plan, int64_t m, int64_t n, int64_t matrices) {
        const auto [side, chunks, span] = plan;
        std::vector<std::pair<std::vector<uint64_t>, std::vector<uint64_t>>> parts;
        for (const auto& part : torch_metalk::gemm_dispatches({side, chunks, span}, m, n, matrices)) {
          parts.emplace_back(std::vector<uint64_t>(part.first, part.first + 3),
                             std::vector<uint64_t>(part.count, part.count + 3));
        }
        return parts;
      },
      "First threadgroup and number of threadgroups, along columns, rows and matrices, of each dispatch of a product");
  m.def(
      "plan_decode",
      [](int64_t sequences, int64_t kv_heads, int64_t rows, int64_t keys, int64_t value_dim, bool large_chip) {
        const auto plan = torch_metalk::plan_decode(sequences, kv_heads, rows, keys, value_dim, large_chip);
        return std::make_tuple(plan.rows, plan.row_blocks, plan.chunks, plan.share, plan.lanes);
      },
      "Rows of a threadgroup, blocks of them, chunks of the keys, and a simdgroup's vectors of a value and lanes for "
      "them");
  m.def(
      "set_large_chip", [](bool large) { return std::exchange(torch_metalk::is_large_chip(), large); },
      "Sets whether the GPU counts as one of a Max or Ultra chip, and returns whether it did");
  m.def(
      "limit_dispatches", [](double flops) { return std::exchange(torch_metalk::most_flops_of_a_dispatch, flops); },
      "Sets how many FLOPs one dispatch of a product may have, and returns what it was");
  m.def("device_name", &torch_metalk::device_name, "What Metal calls the device");
  m.def(
      "share_buffers", [](bool shared) { return std::exchange(torch_metalk::buffers_are_shared, shared); },
      "Sets whether the CPU may see the buffers of tensors, and returns what it was");
  m.def("turns_per_position", &torch_metalk::turns_per_position,
        "The turns that one position adds to each pair, in units of 2^-64 turns");
}
