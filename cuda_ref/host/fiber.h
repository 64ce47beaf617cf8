// A stack of its own for each CUDA thread, and the switch between two of them.
//
// x86-64: six pushes and a jump, about 2 ns. Elsewhere ucontext, whose swapcontext makes a system call at each switch.
// AddressSanitizer has to be told of every switch, or it takes the new stack for an overflow of the old one.
#pragma once

#include <stddef.h>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define NVR_ASAN 1
#else
#define NVR_ASAN 0
#endif

namespace nvr {
namespace host {

struct Context {
    void* stack = nullptr;  // lowest address
    size_t size = 0;
    void* sanitizer = nullptr;  // AddressSanitizer's own state of a fiber that waits
#if defined(__x86_64__)
    void* pointer = nullptr;  // stack pointer of a fiber that waits
#else
    ucontext_t machine;
#endif
};

#if defined(__x86_64__)
extern "C" void nvr_switch_stack(void** save, void* load);
#endif

// Makes `context` start in entry() at the first switch to it. entry never returns.
inline void prepare(Context* context, void (*entry)()) {
#if NVR_ASAN
    __asan_unpoison_memory_region(context->stack, context->size);  // frames that an earlier fiber left behind
#endif
#if defined(__x86_64__)
    // nvr_switch_stack pops six registers and returns: six zeros, entry, and a zero in place of entry's return address. The entry's slot
    // is 16-byte aligned, so that the stack is as the ABI wants it after a call.
    void** top = reinterpret_cast<void**>(static_cast<char*>(context->stack) + context->size) - 2;
    top[1] = nullptr;
    top[0] = reinterpret_cast<void*>(entry);
    for (int i = 1; i <= 6; ++i) top[-i] = nullptr;
    context->pointer = top - 6;
#else
    getcontext(&context->machine);
    context->machine.uc_stack.ss_sp = context->stack;
    context->machine.uc_stack.ss_size = context->size;
    context->machine.uc_link = nullptr;
    makecontext(&context->machine, entry, 0);
#endif
}

// First thing that a new fiber does: fills in the bounds of the stack it came from, when the caller does not know them yet.
inline void arrive(Context* self, Context* from) {
#if NVR_ASAN
    const void* stack = nullptr;
    size_t size = 0;
    __sanitizer_finish_switch_fiber(self->sanitizer, &stack, &size);
    if (from != nullptr && from->stack == nullptr) {
        from->stack = const_cast<void*>(stack);
        from->size = size;
    }
#else
    (void)self;
    (void)from;
#endif
}

// Leaves `from` where it is and goes on in `to`; comes back when somebody switches to `from`. ended: nobody will.
inline void switch_to(Context* from, Context* to, bool ended) {
#if NVR_ASAN
    __sanitizer_start_switch_fiber(ended ? nullptr : &from->sanitizer, to->stack, to->size);
#else
    (void)ended;
#endif
#if defined(__x86_64__)
    nvr_switch_stack(&from->pointer, to->pointer);
#else
    swapcontext(&from->machine, &to->machine);
#endif
    arrive(from, nullptr);
}

}  // namespace host
}  // namespace nvr
