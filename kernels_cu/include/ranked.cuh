// A value and its place as one number: larger for a larger value, and for a lower place of equal
// ones, so that a maximum is both. 0 is no value. For searches over rows of logits.
#pragma once

namespace {

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int LANES = 32;

__device__ float minus_infinity() { return __uint_as_float(0xff800000u); }

__device__ unsigned long long ranked(float value, unsigned place) {
    const int bits = __float_as_int(value + 0.0f);
    const unsigned ordered =
        static_cast<unsigned>(bits) ^ (static_cast<unsigned>(bits >> 31) | 0x80000000u);
    return static_cast<unsigned long long>(ordered) << 32 | ~place;
}

__device__ float value_of(unsigned long long key) {
    const unsigned ordered = static_cast<unsigned>(key >> 32);
    return __uint_as_float(ordered ^ ((ordered >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}

__device__ long long place_of(unsigned long long key) {
    return static_cast<long long>(~static_cast<unsigned>(key));
}

__device__ unsigned long long warp_max(unsigned long long value) {
    const unsigned high = static_cast<unsigned>(value >> 32);
    const unsigned highest = __reduce_max_sync(ALL_LANES, high);
    const unsigned low = high == highest ? static_cast<unsigned>(value) : 0;
    return static_cast<unsigned long long>(highest) << 32 | __reduce_max_sync(ALL_LANES, low);
}

}  // namespace
