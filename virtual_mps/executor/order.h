// A random order of lanes and threadgroups, the same for the same seed.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

namespace vmps {

class Order {
 public:
  explicit Order(uint64_t seed) : state_(seed) {}

  // 0 <= result < n. SplitMix64 (Steele, Lea, Flood 2014) and the high half of a product (Lemire 2019).
  uint32_t below(uint32_t n) {
    uint64_t z = state_ += 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    z ^= z >> 31;
    return static_cast<uint32_t>((z >> 32) * n >> 32);
  }

  // One of the bits that are set.
  unsigned bit(unsigned mask) {
    for (unsigned skip = below(static_cast<uint32_t>(__builtin_popcount(mask))); skip; skip--) mask &= mask - 1;
    return static_cast<unsigned>(__builtin_ctz(mask));
  }

  const std::vector<uint32_t>& permutation(uint32_t n) {
    permutation_.resize(n);
    std::iota(permutation_.begin(), permutation_.end(), 0);
    for (uint32_t i = n; i > 1; i--) std::swap(permutation_[i - 1], permutation_[below(i)]);
    return permutation_;
  }

  // The i-th of n in an order in which neighbours lie apart, for grids too large for a list: i -> step * i + first,
  // where step and n have no common divisor.
  void start_walk(uint64_t n) {
    n_ = n;
    first_ = n > 1 ? (uint64_t{below(UINT32_MAX)} << 32 | below(UINT32_MAX)) % n : 0;
    step_ = n > 2 ? 1 + (uint64_t{below(UINT32_MAX)} << 32 | below(UINT32_MAX)) % (n - 1) : 1;
    while (std::gcd(step_, n) != 1) step_++;
  }
  uint64_t walk(uint64_t i) const {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(step_) * i + first_) % n_);
  }

 private:
  uint64_t state_, n_ = 1, first_ = 0, step_ = 1;
  std::vector<uint32_t> permutation_;
};

}  // namespace vmps
