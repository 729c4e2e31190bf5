// The tensor core's dot product.
//
// The default adds in double and rounds once to nearest. Hardware does neither: it aligns all terms to
// the largest exponent, truncates them to a few bits more than float32 has, adds them as integers and
// truncates the sum. The models follow MMA-Sim (arXiv 2511.10909):
//   sm_80  Ampere, Ada       two chained dots of 8 terms, 24 fractional bits
//   sm_90  Hopper, Blackwell one dot of 16 terms, 25 fractional bits
#include <cmath>
#include <cstdint>
#include <cstring>

#include "state.h"

namespace cuverify_host {

namespace {

constexpr int smallest_exponent = -126;  // of float32 and bfloat16
constexpr int max_terms = 16;
unsigned model;  // 0: exact, 80, 90

struct Scaled {
    double significand;  // in [1, 2), or smaller for what the type holds as subnormal
    int exponent;
};

Scaled scaled(double value, int smallest = smallest_exponent) {
    int exponent;
    double significand = std::frexp(value, &exponent) * 2;
    --exponent;
    if (significand == 0) return {0, smallest};
    if (exponent < smallest) return {std::ldexp(significand, exponent - smallest), smallest};
    return {significand, exponent};
}

float truncated_to_float(double value) {
    Scaled s = scaled(value);
    return static_cast<float>(
        std::ldexp(std::trunc(std::ldexp(s.significand, 23)), s.exponent - 23));
}

float aligned_dot(const float* a, const float* b, int terms, float c, int fraction_bits,
                  int smallest) {
    double sum = c;
    for (int i = 0; i < terms; ++i) sum += static_cast<double>(a[i]) * b[i];
    if (std::isnan(sum)) {
        uint32_t bits = 0x7fffffffu;  // the one NaN that tensor cores produce
        float nan;
        memcpy(&nan, &bits, sizeof nan);
        return nan;
    }
    if (std::isinf(sum)) return static_cast<float>(sum);
    Scaled term[max_terms + 1];
    term[terms] = scaled(c);
    int largest = term[terms].exponent;
    for (int i = 0; i < terms; ++i) {
        Scaled x = scaled(a[i], smallest), y = scaled(b[i], smallest);
        term[i] = {x.significand * y.significand, x.exponent + y.exponent};
        if (term[i].significand != 0 && term[i].exponent > largest) largest = term[i].exponent;
    }
    int64_t total = 0;
    for (int i = 0; i <= terms; ++i) {
        int shift = fraction_bits + term[i].exponent - largest;
        if (shift > -64) total += static_cast<int64_t>(std::ldexp(term[i].significand, shift));
    }
    return truncated_to_float(std::ldexp(static_cast<double>(total), largest - fraction_bits));
}

float modelled_dot(const float* a, const float* b, float c, int smallest) {
    if (model == 90) return aligned_dot(a, b, 16, c, 25, smallest);
    c = aligned_dot(a, b, 8, c, 24, smallest);
    return aligned_dot(a + 8, b + 8, 8, c, 24, smallest);
}

}  // namespace

void set_mma_model(unsigned chosen) { model = chosen; }

// The default. A column at a time in each place of a vector; terms are added in their order.
static void exact_product(const float (*a)[16], const float (*b)[8], float (*d)[8]) {
    typedef double Pair __attribute__((vector_size(16)));
    Pair right[16][4];
    for (int k = 0; k < 16; ++k)
        for (int n = 0; n < 8; n += 2) right[k][n / 2] = Pair{b[k][n], b[k][n + 1]};
    for (int m = 0; m < 16; ++m) {
        Pair sum[4];
        for (int n = 0; n < 8; n += 2) sum[n / 2] = Pair{d[m][n], d[m][n + 1]};
        for (int k = 0; k < 16; ++k) {
            Pair left = {a[m][k], a[m][k]};
            for (int n = 0; n < 4; ++n) sum[n] += left * right[k][n];
        }
        for (int n = 0; n < 8; ++n) d[m][n] = static_cast<float>(sum[n / 2][n % 2]);
    }
}

void tile_product(const float (*a)[16], const float (*b)[8], float (*d)[8], int smallest) {
    if (!model) return exact_product(a, b, d);
    for (int n = 0; n < 8; ++n) {
        float column[16];
        for (int k = 0; k < 16; ++k) column[k] = b[k][n];
        for (int m = 0; m < 16; ++m) d[m][n] = modelled_dot(a[m], column, d[m][n], smallest);
    }
}

}  // namespace cuverify_host
