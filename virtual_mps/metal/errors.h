#pragma once
#include <stdexcept>
#include <string>

namespace vmps {

// A misuse of Metal for which Apple's framework aborts the process. Here it is an exception, so that a test can see it.
struct MetalAssertion : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void assertion_failed(const char* method, const std::string& what);

// What only API validation (MTL_DEBUG_LAYER=1) notices. Returns in a plain run.
void validation_failed(const char* method, const std::string& what);

}  // namespace vmps
