// GNUstep's Foundation, minus the macros that Apple's does not have.
#pragma once
#include_next <Foundation/Foundation.h>
#include <TargetConditionals.h>
#include <time.h>

#undef _  // GNUstep's NSLocalizedString shorthand; C++ code uses _ as an identifier
#undef nil
#undef Nil
#ifdef __cplusplus
#define nil __null  // as on Darwin: initialises C++ pointers too, which GNUstep's (id)0 does not
#define Nil __null
#else
#define nil ((id)0)
#define Nil ((Class)0)
#endif

static inline uint64_t clock_gettime_nsec_np(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
