// Frequencies of rotary position embedding in fixed point: a plain function, so that tests can call it.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace torch_metalk {

// For each pair the turns that one position adds, in units of 2^-64 turns; the same as turns_per_position in
// torch_metalk/ops/rope_positions.py.
inline std::vector<uint64_t> turns_per_position(double base, int64_t dims, double scale) {
  std::vector<uint64_t> turns;
  turns.reserve(dims / 2);
  for (int64_t i = 0; i < dims / 2; ++i) {
    double fraction = std::fmod(scale * std::pow(base, -2.0 * i / dims) / (2 * M_PI), 1.0);
    fraction += fraction < 0;
    const double units = std::nearbyint(std::ldexp(fraction, 64));
    turns.push_back(units >= 0x1p64 ? 0 : static_cast<uint64_t>(units));
  }
  return turns;
}

}  // namespace torch_metalk
