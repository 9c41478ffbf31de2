#pragma once
#include <torch/version.h>

#define VMPS_TORCH_VERSION (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR)
