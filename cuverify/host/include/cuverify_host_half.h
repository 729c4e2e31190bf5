// 16-bit floats: conversions with round to nearest even, and the functions both kinds share.
#pragma once

namespace cuverify_host {

inline unsigned short float_to_bfloat16(float value) {
    unsigned bits = bit_cast<unsigned>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // the one NaN that the device produces
    return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
inline float bfloat16_to_float(unsigned short bits) {
    return bit_cast<float>(static_cast<unsigned>(bits) << 16);
}

// A float that every later rounding to 16 bits takes to where it would take `value`: the bits that are
// lost leave their mark in the last one that is kept.
inline float odd_float(double value) {
    float nearest = static_cast<float>(value);
    if (static_cast<double>(nearest) == value || value != value) return nearest;
    unsigned bits = bit_cast<unsigned>(nearest);
    if (fabs(static_cast<double>(nearest)) > fabs(value))
        --bits;  // towards zero, from infinity, too
    return bit_cast<float>(bits | 1);
}

// A double NaN keeps its sign and the top of its payload, where a float one becomes the device's own.
inline unsigned short narrow_nan(double value, unsigned exponent, int fraction_bits) {
    auto bits = bit_cast<unsigned long long>(value);
    unsigned fraction =
        static_cast<unsigned>(bits >> (52 - fraction_bits)) & ((1u << fraction_bits) - 1);
    return static_cast<unsigned short>(static_cast<unsigned>(bits >> 48 & 0x8000u) | exponent |
                                       fraction);
}
inline unsigned short double_to_bfloat16(double value) {
    return value != value ? narrow_nan(value, 0x7f80u, 7) : float_to_bfloat16(odd_float(value));
}

inline float half_to_float(unsigned short bits) {
    unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3ffu;
    if (exponent == 31) return bit_cast<float>(sign | 0x7f800000u | fraction << 13);
    if (exponent) return bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
    float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
}
inline unsigned short float_to_half(float value) {
    unsigned bits = bit_cast<unsigned>(value), sign = bits >> 16 & 0x8000u,
             rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return 0x7fff;
    if (rest >= 0x477ff000u) return static_cast<unsigned short>(sign | 0x7c00u);
    if (rest < 0x38800000u) {  // subnormal: units of 2^-24, rounded by the host's own nearest-even
        float units = nearbyintf(bit_cast<float>(rest) * 0x1p24f);
        return static_cast<unsigned short>(sign | static_cast<unsigned>(units));
    }
    unsigned rounded = rest + 0xfffu + (rest >> 13 & 1);
    return static_cast<unsigned short>(sign | ((rounded - 0x38000000u) >> 13));
}
inline unsigned short double_to_half(double value) {
    return value != value ? narrow_nan(value, 0x7c00u, 10) : float_to_half(odd_float(value));
}

}  // namespace cuverify_host

#define CUVERIFY_HALF_FUNCTIONS(type, pair, name, name2, suffix)                              \
    static inline float __##name##2float(type v) { return v; }                                \
    static inline type __float2##name(float v) { return type(v); }                            \
    static inline type __float2##name##_rn(float v) { return type(v); }                       \
    static inline pair __floats2##name2##_rn(float a, float b) { return {type(a), type(b)}; } \
    static inline float __low2float(pair v) { return v.x; }                                   \
    static inline float __high2float(pair v) { return v.y; }                                  \
    static inline float2 __##name##22float2(pair v) { return {v.x, v.y}; }                    \
    static inline unsigned short __##suffix##_as_ushort(type v) { return v.x; }               \
    static inline type __ushort_as_##suffix(unsigned short bits) {                            \
        type v;                                                                               \
        v.x = bits;                                                                           \
        return v;                                                                             \
    }                                                                                         \
    static inline pair make_##name2(type a, type b) { return {a, b}; }                        \
    static inline type operator+(type a, type b) { return type(float(a) + float(b)); }        \
    static inline type operator-(type a, type b) { return type(float(a) - float(b)); }        \
    static inline type operator*(type a, type b) { return type(float(a) * float(b)); }        \
    static inline type operator/(type a, type b) { return type(float(a) / float(b)); }        \
    static inline type operator-(type a) {                                                    \
        /* an instruction of arithmetic: of a NaN it makes the device's own */                \
        return __ushort_as_##suffix(float(a) != float(a) ? 0x7fffu : a.x ^ 0x8000u);          \
    }
