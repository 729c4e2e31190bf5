// Integer, bit and floating-point intrinsics. Approximate device functions are computed exactly here:
// the host lane says nothing about their last bits.
#pragma once

// CUDA has each function of <math.h> for float, too, and these three as functions.
#ifndef _LIBCPP_VERSION
#define CUVERIFY_FLOAT_1(name) \
    static inline float name(float v) { return name##f(v); }
#define CUVERIFY_FLOAT_2(name) \
    static inline float name(float a, float b) { return name##f(a, b); }
CUVERIFY_FLOAT_1(fabs)
CUVERIFY_FLOAT_1(sqrt)
CUVERIFY_FLOAT_1(cbrt)
CUVERIFY_FLOAT_1(exp)
CUVERIFY_FLOAT_1(exp2)
CUVERIFY_FLOAT_1(expm1)
CUVERIFY_FLOAT_1(log)
CUVERIFY_FLOAT_1(log2)
CUVERIFY_FLOAT_1(log10)
CUVERIFY_FLOAT_1(log1p)
CUVERIFY_FLOAT_1(sin)
CUVERIFY_FLOAT_1(cos)
CUVERIFY_FLOAT_1(tan)
CUVERIFY_FLOAT_1(asin)
CUVERIFY_FLOAT_1(acos)
CUVERIFY_FLOAT_1(atan)
CUVERIFY_FLOAT_1(sinh)
CUVERIFY_FLOAT_1(cosh)
CUVERIFY_FLOAT_1(tanh)
CUVERIFY_FLOAT_1(erf)
CUVERIFY_FLOAT_1(erfc)
CUVERIFY_FLOAT_1(floor)
CUVERIFY_FLOAT_1(ceil)
CUVERIFY_FLOAT_1(trunc)
CUVERIFY_FLOAT_1(round)
CUVERIFY_FLOAT_1(rint)
CUVERIFY_FLOAT_1(nearbyint)
CUVERIFY_FLOAT_2(pow)
CUVERIFY_FLOAT_2(fmod)
CUVERIFY_FLOAT_2(atan2)
CUVERIFY_FLOAT_2(hypot)
CUVERIFY_FLOAT_2(fmin)
CUVERIFY_FLOAT_2(fmax)
CUVERIFY_FLOAT_2(copysign)
static inline float fma(float a, float b, float c) { return fmaf(a, b, c); }
static inline float ldexp(float v, int exponent) { return ldexpf(v, exponent); }
#undef isnan
#undef isinf
#undef isfinite
#define CUVERIFY_CLASSIFY(name)                                           \
    static inline bool name(float v) { return __builtin_##name(v) != 0; } \
    static inline bool name(double v) { return __builtin_##name(v) != 0; }
CUVERIFY_CLASSIFY(isnan)
CUVERIFY_CLASSIFY(isinf)
CUVERIFY_CLASSIFY(isfinite)
static inline float abs(float v) { return fabsf(v); }
static inline double abs(double v) { return fabs(v); }
static inline long abs(long v) { return labs(v); }
static inline long long abs(long long v) { return llabs(v); }
#endif

#define CUVERIFY_MIN_MAX(type)                                       \
    static inline type min(type a, type b) { return b < a ? b : a; } \
    static inline type max(type a, type b) { return a < b ? b : a; }
CUVERIFY_MIN_MAX(int)
CUVERIFY_MIN_MAX(unsigned)
CUVERIFY_MIN_MAX(long)
CUVERIFY_MIN_MAX(unsigned long)
CUVERIFY_MIN_MAX(long long)
CUVERIFY_MIN_MAX(unsigned long long)
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }

namespace cuverify_host {
template <class To, class From>
inline To bit_cast(From value) {
    static_assert(sizeof(To) == sizeof(From), "bit casts keep the width");
    To to;
    __builtin_memcpy(&to, &value, sizeof to);
    return to;
}
}  // namespace cuverify_host

static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
static inline int __clz(int v) { return v ? __builtin_clz(static_cast<unsigned>(v)) : 32; }
static inline int __clzll(long long v) {
    return v ? __builtin_clzll(static_cast<unsigned long long>(v)) : 64;
}
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __ffsll(long long v) { return __builtin_ffsll(v); }
static inline unsigned __brev(unsigned v) {
    unsigned r = 0;
    for (int i = 0; i < 32; ++i) r |= (v >> i & 1u) << (31 - i);
    return r;
}
static inline unsigned long long __brevll(unsigned long long v) {
    return static_cast<unsigned long long>(__brev(static_cast<unsigned>(v))) << 32 |
           __brev(static_cast<unsigned>(v >> 32));
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    unsigned long long both = static_cast<unsigned long long>(b) << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; ++i)
        r |= static_cast<unsigned>(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return r;
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
    return static_cast<unsigned>(both << (shift & 31) >> 32);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
    return static_cast<unsigned>(both >> (shift & 31));
}
static inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
static inline int __mulhi(int a, int b) {
    return static_cast<int>(static_cast<long long>(a) * b >> 32);
}
__extension__ typedef unsigned __int128 cuverify_uint128;
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<cuverify_uint128>(a) * b >> 64);
}

static inline float __int_as_float(int v) { return cuverify_host::bit_cast<float>(v); }
static inline int __float_as_int(float v) { return cuverify_host::bit_cast<int>(v); }
static inline float __uint_as_float(unsigned v) { return cuverify_host::bit_cast<float>(v); }
static inline unsigned __float_as_uint(float v) { return cuverify_host::bit_cast<unsigned>(v); }
static inline double __longlong_as_double(long long v) {
    return cuverify_host::bit_cast<double>(v);
}
static inline long long __double_as_longlong(double v) {
    return cuverify_host::bit_cast<long long>(v);
}
namespace cuverify_host {
// What does not fit becomes the nearest that does, and NaN becomes 0.
inline int whole(float v) {
    if (!(v == v)) return 0;
    return v >= 0x1p31f ? 0x7fffffff : v <= -0x1p31f ? -0x7fffffff - 1 : static_cast<int>(v);
}
}  // namespace cuverify_host
static inline int __float2int_rn(float v) { return cuverify_host::whole(nearbyintf(v)); }
static inline int __float2int_rz(float v) { return cuverify_host::whole(v); }
static inline float __int2float_rn(int v) { return static_cast<float>(v); }

static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float v) { return sqrtf(v); }
static inline float __frcp_rn(float v) { return 1.0f / v; }
static inline float rsqrtf(float v) { return 1.0f / sqrtf(v); }
// glibc declares names like __expf itself, so these must be macros.
#define __expf(v) expf(v)
#define __exp2f(v) exp2f(v)
#define __logf(v) logf(v)
#define __log2f(v) log2f(v)
#define __sinf(v) sinf(v)
#define __cosf(v) cosf(v)
#define __powf(a, b) powf(a, b)
#define __fdividef(a, b) ((a) / (b))

template <class T>
static inline T __ldg(const T* pointer) {
    return *pointer;
}
#define __ldcg __ldg
#define __ldca __ldg
#define __ldcs __ldg
#define __ldlu __ldg
#define __ldcv __ldg
template <class T>
static inline void __stcg(T* pointer, T value) {
    *pointer = value;
}
#define __stcs __stcg
#define __stwb __stcg
#define __stwt __stcg

static inline long long clock64() { return 0; }
static inline void __nanosleep(unsigned) {}
#define __trap() ::cuverify_host::fault("trap", CUVERIFY_HERE, "the kernel called __trap()")
#undef assert
#define assert(condition) \
    ((condition) ? (void)0 : ::cuverify_host::fault("assertion", CUVERIFY_HERE, "%s", #condition))
