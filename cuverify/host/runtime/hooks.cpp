// The entry points that `-fsanitize=thread,alignment` makes the compiler call. There is no libtsan and
// no libubsan behind them: they are the checker.
#include <cstring>

#include "sanitizer.h"
#include "state.h"

#ifndef CUVERIFY_ASAN  // whose build has the real handlers

using cuverify_host::access_read;
using cuverify_host::access_write;
using cuverify_host::check_access;
using cuverify_host::Place;

extern "C" char __ehdr_start[] __attribute__((visibility("hidden")));

namespace {
inline Place at(void* return_address) {
    auto pc = static_cast<char*>(return_address) - __ehdr_start;
    return {nullptr, 0, static_cast<uint64_t>(pc) - 1};  // inside the call, not after it
}

// What the compiler hands to the alignment handlers.
struct SourceLocation {
    const char* file;
    uint32_t line, column;
};
struct TypeMismatch {
    SourceLocation location;
    const void* type;
    unsigned char log2_alignment, check_kind;
};
void misaligned(const TypeMismatch* data, const void* pointer, Place caller) {
    auto alignment = size_t{1} << data->log2_alignment;
    if (reinterpret_cast<uintptr_t>(pointer) % alignment == 0)
        return;  // a null pointer, judged on access
    Place place{data->location.file, static_cast<int>(data->location.line), 0};
    // Of an access inside the shim's own headers the address says more: who it was inlined into.
    if (strstr(place.file, "cuverify_host")) place = caller;
    cuverify_host::misaligned_access(pointer, alignment, place);
}
}  // namespace

#define CALLER at(__builtin_return_address(0))
#define ACCESS_HOOKS(n)                                                                            \
    void __tsan_read##n(void* p) { check_access(p, n, access_read, CALLER); }                      \
    void __tsan_write##n(void* p) { check_access(p, n, access_write, CALLER); }                    \
    void __tsan_unaligned_read##n(void* p) { check_access(p, n, access_read, CALLER); }            \
    void __tsan_unaligned_write##n(void* p) { check_access(p, n, access_write, CALLER); }          \
    void __tsan_volatile_read##n(void* p) { check_access(p, n, access_read, CALLER); }             \
    void __tsan_volatile_write##n(void* p) { check_access(p, n, access_write, CALLER); }           \
    void __tsan_unaligned_volatile_read##n(void* p) { check_access(p, n, access_read, CALLER); }   \
    void __tsan_unaligned_volatile_write##n(void* p) { check_access(p, n, access_write, CALLER); } \
    void __tsan_read_write##n(void* p) {                                                           \
        check_access(p, n, access_read, CALLER);                                                   \
        check_access(p, n, access_write, CALLER);                                                  \
    }                                                                                              \
    void __tsan_unaligned_read_write##n(void* p) {                                                 \
        check_access(p, n, access_read, CALLER);                                                   \
        check_access(p, n, access_write, CALLER);                                                  \
    }

extern "C" {

ACCESS_HOOKS(1)
ACCESS_HOOKS(2)
ACCESS_HOOKS(4)
ACCESS_HOOKS(8)
ACCESS_HOOKS(16)

void __tsan_read_range(void* p, size_t n) {
    if (n) check_access(p, n, access_read, CALLER);
}
void __tsan_write_range(void* p, size_t n) {
    if (n) check_access(p, n, access_write, CALLER);
}
void* __tsan_memset(void* to, int value, size_t n) {
    if (n) check_access(to, n, access_write, CALLER);
    return memset(to, value, n);
}
void* __tsan_memcpy(void* to, const void* from, size_t n) {
    if (n) check_access(from, n, access_read, CALLER), check_access(to, n, access_write, CALLER);
    return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, size_t n) {
    if (n) check_access(from, n, access_read, CALLER), check_access(to, n, access_write, CALLER);
    return memmove(to, from, n);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, void* pointer) {
    misaligned(data, pointer, CALLER);
}
void __ubsan_handle_type_mismatch_v1_abort(TypeMismatch* data, void* pointer) {
    misaligned(data, pointer, CALLER);
}
}

#endif
