// The type of what a row tile's pieces leave to be merged: `partials::pack`, `first` and `second`.
//
// Half precision has 11 bits where bfloat16 has 8, and most results are rounded to bfloat16, which
// should not happen twice. In exchange it ends at 65,504, where a piece becomes infinite and what it
// is merged into infinite or NaN, and below 2^-14 its steps are 2^-24.
#pragma once

#include "element.cuh"

// the type of partials: fp16 or bf16
#ifndef PARTIAL
#define PARTIAL fp16
#endif

namespace partials = PARTIAL;
