// A kernel that reads a wrong address or divides by zero must not take the process with it.
#pragma once

namespace vmps {

// Turns SIGSEGV, SIGBUS, SIGFPE and SIGILL raised in a kernel into a failure of its launch; others go where they went.
void catch_faults();

}  // namespace vmps
