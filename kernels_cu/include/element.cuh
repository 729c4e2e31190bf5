// Element types by the names that contracts have for them, so that a -D value can choose one:
// `namespace element = ELEMENT;` gives pack, first and second of two numbers in a word, and
// WITH_ELEMENT(ptx::mma_m16n8k16_, ELEMENT) is the product for it.
#pragma once

#include "bf16.cuh"
#include "fp16.cuh"

#define ELEMENT_JOIN(name, type) name##type
#define WITH_ELEMENT(name, type) ELEMENT_JOIN(name, type)

#define BYTES_OF_bf16 2
#define BYTES_OF_fp16 2
#define BYTES_OF_fp8_e4m3 1
#define BYTES_OF(type) WITH_ELEMENT(BYTES_OF_, type)

namespace stored {

// What an element of so many bytes is to a program that only moves it.
template <int Bytes>
struct Bits {
    using type = unsigned short;
};
template <>
struct Bits<1> {
    using type = unsigned char;
};

}  // namespace stored

// What PTX calls them.
#define PTX_NAME_bf16 "bf16"
#define PTX_NAME_fp16 "f16"
