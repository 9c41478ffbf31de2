// The threads that run grids: the one that launches, and helpers that persist and join in.
#pragma once

#include <string>

#include "worker.h"

namespace vmps {

// Runs all threadgroups of the grid. Returns the first failure, with its threadgroup, or nothing.
std::string run_grid(const Launch& launch);

}  // namespace vmps
