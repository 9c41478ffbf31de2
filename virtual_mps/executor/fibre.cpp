#include "fibre.h"

#ifdef VMPS_BOOST_FIBRES

// Boost hands the context that was left to the one that continues, which stores it where its owner looks for it.
extern "C" void vmps_switch(void** save, void* to) {
  boost::context::detail::transfer_t from = boost::context::detail::jump_fcontext(to, save);
  *static_cast<void**>(from.data) = from.fctx;
}

#else

// Leaves through jmp, not ret: the return predictor would be wrong at every switch.
asm(R"(.text
.globl vmps_switch
.type vmps_switch,@function
vmps_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmp *%rcx
.size vmps_switch,.-vmps_switch
)");

#endif
