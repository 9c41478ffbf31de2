// Everything a Metal source may use. What the compiler writes is compiled after this header and no other.
#pragma once
#include "atomic.h"
#include "builtins.h"
#include "entry.h"
#include "hints.h"
#include "simdgroup_matrix.h"
