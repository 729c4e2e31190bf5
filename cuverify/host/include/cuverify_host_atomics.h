// Atomics. Threads never run at the same time here, so plain reads and writes do; the checker is told
// that the accesses are atomic.
#pragma once

namespace cuverify_host {

// Not inlined: a checked caller must not see the plain accesses inside.
template <class Operation, class T>
__attribute__((noinline)) CUVERIFY_NO_CHECK T atomic_update(T* address, T value, Site site) {
    atomic_access(address, sizeof(T), site);
    T before = *address;
    *address = Operation::apply(before, value);
    return before;
}

template <class T>
__attribute__((noinline)) CUVERIFY_NO_CHECK T atomic_swap_if(T* address, T expected, T value,
                                                             Site site) {
    atomic_access(address, sizeof(T), site);
    T before = *address;
    if (before == expected) *address = value;
    return before;
}

struct Subtract {
    template <class T>
    static T apply(T a, T b) {
        return static_cast<T>(a - b);
    }
};
struct Exchange {
    template <class T>
    static T apply(T, T b) {
        return b;
    }
};
struct IncrementOrWrap {
    static unsigned apply(unsigned a, unsigned limit) { return a >= limit ? 0 : a + 1; }
};
struct DecrementOrWrap {
    static unsigned apply(unsigned a, unsigned limit) {
        return a == 0 || a > limit ? limit : a - 1;
    }
};

// A second argument of another type is converted, as an overload of CUDA's would do.
template <class T>
struct Same {
    using type = T;
};

}  // namespace cuverify_host

#define CUVERIFY_ATOMIC(name, operation)                                                    \
    template <class T>                                                                      \
    inline T name(T* address, typename cuverify_host::Same<T>::type value, CUVERIFY_SITE) { \
        return cuverify_host::atomic_update<cuverify_host::operation>(address, value,       \
                                                                      CUVERIFY_GIVEN);      \
    }
CUVERIFY_ATOMIC(atomicAdd, Add)
CUVERIFY_ATOMIC(atomicSub, Subtract)
CUVERIFY_ATOMIC(atomicMin, Min)
CUVERIFY_ATOMIC(atomicMax, Max)
CUVERIFY_ATOMIC(atomicAnd, And)
CUVERIFY_ATOMIC(atomicOr, Or)
CUVERIFY_ATOMIC(atomicXor, Xor)
CUVERIFY_ATOMIC(atomicExch, Exchange)
CUVERIFY_ATOMIC(atomicInc, IncrementOrWrap)
CUVERIFY_ATOMIC(atomicDec, DecrementOrWrap)
#undef CUVERIFY_ATOMIC

template <class T>
inline T atomicCAS(T* address, typename cuverify_host::Same<T>::type expected,
                   typename cuverify_host::Same<T>::type value, CUVERIFY_SITE) {
    return cuverify_host::atomic_swap_if(address, expected, value, CUVERIFY_GIVEN);
}
