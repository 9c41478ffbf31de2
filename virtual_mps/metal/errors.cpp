#include "errors.h"

#include "modes.h"

namespace vmps {

Modes& modes() {
  static auto* modes = new Modes;
  return *modes;
}

void assertion_failed(const char* method, const std::string& what) {
  throw MetalAssertion("-[" + std::string(method) + "]: failed assertion `" + what +
                       "' (Metal aborts the process here)");
}

void validation_failed(const char* method, const std::string& what) {
  if (modes().validation) assertion_failed(method, what + "' under API validation `MTL_DEBUG_LAYER=1");
}

}  // namespace vmps
