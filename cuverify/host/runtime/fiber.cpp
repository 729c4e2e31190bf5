#include "fiber.h"

#include <cstdint>

namespace cuverify_host {

#if defined(CUVERIFY_UCONTEXT)

void make_context(Context& context, char* stack_bottom, char* stack_top, void (*entry)()) {
    getcontext(&context.context);
    context.context.uc_stack.ss_sp = stack_bottom;
    context.context.uc_stack.ss_size = static_cast<size_t>(stack_top - stack_bottom);
    context.context.uc_link = nullptr;
    makecontext(&context.context, entry, 0);
}

void switch_context(Context& from, Context& to) { swapcontext(&from.context, &to.context); }

#else

extern "C" void cuverify_switch_stacks(void** save, void* load);

#if defined(__x86_64__)
constexpr int saved_words = 6;  // rbp rbx r12-r15; the return address lies above them
asm(R"(
    .text
    .p2align 4
    .hidden cuverify_switch_stacks
    .globl cuverify_switch_stacks
    .type cuverify_switch_stacks, @function
cuverify_switch_stacks:
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
    ret
    .size cuverify_switch_stacks, .-cuverify_switch_stacks
)");
#elif defined(__aarch64__)
constexpr int saved_words = 20;  // x19-x30, d8-d15; x30 is the return address
constexpr int link_word = 11;
asm(R"(
    .text
    .p2align 4
    .hidden cuverify_switch_stacks
    .globl cuverify_switch_stacks
    .type cuverify_switch_stacks, %function
cuverify_switch_stacks:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size cuverify_switch_stacks, .-cuverify_switch_stacks
)");
#endif

void make_context(Context& context, char*, char* stack_top, void (*entry)()) {
    auto top = reinterpret_cast<uintptr_t>(stack_top) & ~uintptr_t{15};
    void** word = reinterpret_cast<void**>(top);
#if defined(__x86_64__)
    *--word = nullptr;  // a function starts with its stack 8 bytes off a multiple of 16
    *--word = reinterpret_cast<void*>(entry);
    for (int i = 0; i < saved_words; ++i) *--word = nullptr;
#else
    for (int i = 0; i < saved_words; ++i) *--word = nullptr;
    word[link_word] = reinterpret_cast<void*>(entry);
#endif
    context.stack_pointer = word;
}

void switch_context(Context& from, Context& to) {
    cuverify_switch_stacks(&from.stack_pointer, to.stack_pointer);
}

#endif

}  // namespace cuverify_host
