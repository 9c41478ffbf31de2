#pragma once
#include <unistd.h>

#include <cstddef>

namespace vmps {

// A Mac recommends about two thirds of its memory for the GPU, and allows one buffer about half.
inline size_t recommended_memory() {
  static const size_t all = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return all / 3 * 2;
}

inline size_t max_buffer_length() { return recommended_memory() / 4 * 3; }

}  // namespace vmps
