// A fiber: one CUDA thread's stack and the switch between two of them.
//
// The switch saves what the ABI says a call must preserve and nothing else; it costs a few nanoseconds,
// where ucontext makes two system calls. Machines without an assembly version below use ucontext.
#pragma once

#include <cstddef>

#if !defined(CUVERIFY_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define CUVERIFY_UCONTEXT 1
#endif
#ifdef CUVERIFY_UCONTEXT
#include <ucontext.h>
#endif

namespace cuverify_host {

struct Context {
#ifdef CUVERIFY_UCONTEXT
    ucontext_t context;
#else
    void* stack_pointer;
#endif
};

// Let `context` start `entry` (which never returns) on the stack that ends below `stack_top`.
void make_context(Context& context, char* stack_bottom, char* stack_top, void (*entry)());

// Leave `from` and continue `to`; returns when somebody switches back to `from`.
void switch_context(Context& from, Context& to);

}  // namespace cuverify_host
