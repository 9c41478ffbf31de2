#include "faults.h"

#include <ucontext.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>

#include "worker.h"

namespace vmps {
namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
struct sigaction previous[sizeof kSignals / sizeof kSignals[0]];

std::string describe(int signal, const void* address) {
  switch (signal) {
    case SIGFPE:
      return "integer division by zero";
    case SIGILL:
      return "undefined behaviour (the compiler left no code here)";
    default:
      char text[96];
      std::snprintf(text, sizeof text,
                    "access to address %p, which is in no buffer (an unbound slot, or out of bounds)", address);
      return text;
  }
}

void pass_on(int signal, siginfo_t* info, void* context) {
  for (unsigned i = 0; i < sizeof kSignals / sizeof kSignals[0]; i++) {
    if (kSignals[i] != signal) continue;
    const struct sigaction& before = previous[i];
    if (before.sa_flags & SA_SIGINFO) {
      before.sa_sigaction(signal, info, context);
    } else if (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN) {
      // Returning repeats the access, this time without us.
      sigaction(signal, &before, nullptr);
    } else {
      before.sa_handler(signal);
    }
  }
}

uintptr_t stack_pointer(const void* context) {
  const mcontext_t& machine = static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  return static_cast<uintptr_t>(machine.gregs[REG_RSP]);
#elif defined(__aarch64__)
  return machine.sp;
#else
#error "where does this machine keep its stack pointer?"
#endif
}

// Leaves the lane for good, as longjmp would: the signal is not blocked meanwhile (SA_NODEFER).
void on_fault(int signal, siginfo_t* info, void* context) {
  if (Worker* worker = Worker::running())
    worker->abandon(describe(signal, info->si_addr), stack_pointer(context));
  else
    pass_on(signal, info, context);
}

}  // namespace

void catch_faults() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    for (unsigned i = 0; i < sizeof kSignals / sizeof kSignals[0]; i++) sigaction(kSignals[i], &action, &previous[i]);
  });
}

}  // namespace vmps
