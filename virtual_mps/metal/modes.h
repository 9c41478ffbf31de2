// Switches of the whole process, set from Python at any time.
#pragma once
#include <atomic>

namespace vmps {

struct Modes {
  std::atomic<bool> strict{false};      // refuse ops that have no kernel in PyTorch's MPS backend
  std::atomic<bool> poison{false};      // fill fresh device memory with NaN
  std::atomic<bool> deferred{false};    // run encoded work at commit, not when it is encoded
  std::atomic<bool> validation{false};  // what Apple's API validation refuses, too
  std::atomic<bool> check{false};       // fail launches in which a kernel did what it must not
};

__attribute__((visibility("default"))) Modes& modes();

}  // namespace vmps
