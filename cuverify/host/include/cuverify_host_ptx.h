// The host twins of the PTX wrappers in kernels_cu/include/ptx.cuh. Fragment layouts follow the PTX ISA.
#pragma once

#include "cuverify_host_half.h"

namespace cuverify_host {

struct MmaSlot {
    float* d;
    const unsigned* a;
    const unsigned* b;
};

enum class Narrow { bf16, fp16 };

template <Narrow Type>
float widened(unsigned short bits) {
    return Type == Narrow::bf16 ? bfloat16_to_float(bits) : half_to_float(bits);
}

// Of the low halves of two words.
inline unsigned multiply_bfloat16(unsigned a, unsigned b) {
    double product = static_cast<double>(bfloat16_to_float(static_cast<unsigned short>(a))) *
                     static_cast<double>(bfloat16_to_float(static_cast<unsigned short>(b)));
    return float_to_bfloat16(odd_float(product));
}

template <Narrow Type>
void mma_m16n8k16(float* d, const unsigned* a, const unsigned* b, Site site) {
    MmaSlot slot{d, a, b};
    collective(
        all_lanes, Collective::mma, &slot,
        [](void** slots, unsigned, Site) CUVERIFY_NO_CHECK {
            float left[16][16], right[16][8], sum[16][8];
            auto half_of = [](unsigned pair, int high) {
                return widened<Type>(
                    static_cast<unsigned short>(high ? pair >> 16 : pair & 0xffffu));
            };
            for (int lane = 0; lane < 32; ++lane) {
                const auto* from = static_cast<MmaSlot*>(slots[lane]);
                int group = lane / 4, pair = lane % 4 * 2;
                for (int high = 0; high < 2; ++high) {
                    left[group][pair + high] = half_of(from->a[0], high);
                    left[group + 8][pair + high] = half_of(from->a[1], high);
                    left[group][pair + 8 + high] = half_of(from->a[2], high);
                    left[group + 8][pair + 8 + high] = half_of(from->a[3], high);
                    right[pair + high][group] = half_of(from->b[0], high);
                    right[pair + 8 + high][group] = half_of(from->b[1], high);
                    sum[group][pair + high] = from->d[high];
                    sum[group + 8][pair + high] = from->d[2 + high];
                }
            }
            tile_product(left, right, sum, Type == Narrow::bf16 ? -126 : -14);
            for (int lane = 0; lane < 32; ++lane) {
                auto* to = static_cast<MmaSlot*>(slots[lane]);
                for (int i = 0; i < 4; ++i)
                    to->d[i] = sum[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
            }
        },
        site);
}

struct MatrixSlot {
    unsigned* to;
    const void* row;
};

template <int Matrices, bool Transposed>
void load_matrices(unsigned* to, const void* row, Site site) {
    read_matrix_row(row, 16, site);
    MatrixSlot slot{to, row};
    collective(
        all_lanes, Collective::ldmatrix, &slot,
        [](void** slots, unsigned, Site) CUVERIFY_NO_CHECK {
            for (int m = 0; m < Matrices; ++m)
                for (int lane = 0; lane < 32; ++lane) {
                    unsigned short half[2];
                    for (int i = 0; i < 2; ++i) {
                        int r = lane / 4, c = lane % 4 * 2 + i;
                        if (Transposed) std::swap(r, c);
                        auto* from = static_cast<MatrixSlot*>(slots[m * 8 + r]);
                        half[i] = static_cast<const unsigned short*>(from->row)[c];
                    }
                    static_cast<MatrixSlot*>(slots[lane])->to[m] =
                        half[0] | static_cast<unsigned>(half[1]) << 16;
                }
        },
        site);
}

struct TransposeSlot {
    unsigned in, out;
};

inline unsigned transpose_matrix(unsigned value, Site site) {
    TransposeSlot slot{value, 0};
    collective(
        all_lanes, Collective::movmatrix, &slot,
        [](void** slots, unsigned, Site) CUVERIFY_NO_CHECK {
            for (int lane = 0; lane < 32; ++lane) {
                unsigned out = 0;
                for (int i = 0; i < 2; ++i) {
                    int r = lane % 4 * 2 + i, c = lane / 4;  // element (c, r) of the source
                    unsigned from = static_cast<TransposeSlot*>(slots[r * 4 + c / 2])->in;
                    out |= (from >> c % 2 * 16 & 0xffffu) << 16 * i;
                }
                static_cast<TransposeSlot*>(slots[lane])->out = out;
            }
        },
        site);
    return slot.out;
}

}  // namespace cuverify_host
