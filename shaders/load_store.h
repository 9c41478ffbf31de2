// Four neighbouring elements at a time, or two, as float32.
#pragma once

#include <metal_stdlib>

// Elements i to i + 3 of a row of `count`, which is below 2^31. Where rows start at multiples of 4 elements (`aligned`)
// they are one access, but for the last few of a row; else each is its own. Loads give 0 for what lies behind the end,
// and stores leave it: callers need not check.
template <typename T>
inline float4 load4(device const T* row, uint i, uint count, bool aligned) {
  if (aligned && i + 4 <= count) {
    return float4(*reinterpret_cast<device const metal::vec<T, 4>*>(row + i));
  }
  float4 values = 0.0f;
  for (uint k = 0; k < 4 && i + k < count; ++k) {
    values[k] = float(row[i + k]);
  }
  return values;
}

template <typename T>
inline void store4(device T* row, uint i, uint count, bool aligned, float4 values) {
  if (aligned && i + 4 <= count) {
    *reinterpret_cast<device metal::vec<T, 4>*>(row + i) = metal::vec<T, 4>(values);
    return;
  }
  for (uint k = 0; k < 4 && i + k < count; ++k) {
    row[i + k] = T(values[k]);
  }
}

// Elements i and i + 1, in the same way.
template <typename T>
inline float2 load2(device const T* row, uint i, uint count, bool aligned) {
  if (aligned && i + 2 <= count) {
    return float2(*reinterpret_cast<device const metal::vec<T, 2>*>(row + i));
  }
  return float2(i < count ? float(row[i]) : 0.0f, i + 1 < count ? float(row[i + 1]) : 0.0f);
}
