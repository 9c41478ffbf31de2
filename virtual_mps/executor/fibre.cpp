#include "fibre.h"

#include "executor.h"

#ifdef VMPS_BOOST_FIBRES

namespace {

unsigned wait(vmps_lane* lane, vmps_lane* next) {
  if (next != lane) vmps_switch(lane, next);
  return lane->serve;
}

}  // namespace

extern "C" {

// Boost hands the context that was left to the one that continues, which stores it for its owner.
void vmps_switch(vmps_lane* from, vmps_lane* to) {
  boost::context::detail::transfer_t left = boost::context::detail::jump_fcontext(to->stack_pointer, from);
  static_cast<vmps_lane*>(left.data)->stack_pointer = left.fctx;
}

VMPS_API unsigned vmps_wait_simdgroup(vmps_lane* lane) {
  return wait(lane, vmps_arrive_in_simdgroup(lane, __builtin_return_address(0)));
}

VMPS_API void vmps_wait_threadgroup(vmps_lane* lane) {
  wait(lane, vmps_arrive_in_threadgroup(lane, __builtin_return_address(0)));
}
}

#else

#include <cstddef>

static_assert(offsetof(vmps_lane, stack_pointer) == 0 && offsetof(vmps_lane, serve) == 8);

// A lane continues in the kernel by a jump, not through returns: the processor would expect each of them to go back to
// where the lane before came from. The jump it predicts well, as the lanes of a simdgroup wait in the same place.
asm(R"(.text
.macro vmps_save
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
.endm
.macro vmps_continue lane
  movq (\lane), %rsp
  movl 8(\lane), %eax
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmp *%rcx
.endm
.macro vmps_define_wait name, arrive
.globl \name
.type \name,@function
\name:
  vmps_save
  movq 48(%rsp), %rsi
  subq $8, %rsp
  call \arrive
  vmps_continue %rax
.size \name,.-\name
.endm

vmps_define_wait vmps_wait_simdgroup, vmps_arrive_in_simdgroup
vmps_define_wait vmps_wait_threadgroup, vmps_arrive_in_threadgroup

.globl vmps_switch
.hidden vmps_switch
.type vmps_switch,@function
vmps_switch:
  vmps_save
  vmps_continue %rsi
.size vmps_switch,.-vmps_switch
)");

#endif
