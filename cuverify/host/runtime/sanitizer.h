// What the address sanitizer must be told of fibers and of the arena, in the build that has one.
// Everywhere else these functions are nothing.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#define CUVERIFY_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CUVERIFY_ASAN 1
#endif
#endif

#ifdef CUVERIFY_ASAN
extern "C" {
void __sanitizer_start_switch_fiber(void** kept, const void* bottom, size_t bytes);
void __sanitizer_finish_switch_fiber(void* kept, const void** bottom_left, size_t* bytes_left);
void __asan_poison_memory_region(const volatile void* address, size_t bytes);
void __asan_unpoison_memory_region(const volatile void* address, size_t bytes);
void* __asan_region_is_poisoned(void* address, size_t bytes);
}
#endif

namespace cuverify_host {

#ifdef CUVERIFY_ASAN
constexpr bool sanitized = true;
inline void leave_stack(void** kept, const void* bottom_of_next, size_t bytes) {
    __sanitizer_start_switch_fiber(kept, bottom_of_next, bytes);
}
inline void reach_stack(void* kept) { __sanitizer_finish_switch_fiber(kept, nullptr, nullptr); }
inline void forbid(const void* address, size_t bytes) {
    __asan_poison_memory_region(address, bytes);
}
inline void allow(const void* address, size_t bytes) {
    __asan_unpoison_memory_region(address, bytes);
}
// The first byte that must not be touched, or null.
inline const void* forbidden(const void* address, size_t bytes) {
    return __asan_region_is_poisoned(const_cast<void*>(address), bytes);
}
#else
constexpr bool sanitized = false;
inline void leave_stack(void**, const void*, size_t) {}
inline void reach_stack(void*) {}
inline void forbid(const void*, size_t) {}
inline void allow(const void*, size_t) {}
inline const void* forbidden(const void*, size_t) { return nullptr; }
#endif

}  // namespace cuverify_host
