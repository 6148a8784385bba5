// Floats to the quantised blocks of blocks.h: what `kvarn quantize` spends its time in.
//
// Without importance the bytes are those of llama.cpp for Q4_0 .. Q8_0, Q2_K, Q4_K, Q5_K and Q6_K; Q3_K and IQ4_NL are
// searched in our own way. importance: how much an error of each column counts, one float per column; the search is
// then our own for all but Q8_0.
#pragma once
#include <cstdint>

#include "../kernels/table.h"

namespace kvarn {

bool is_encodable(Type type);

// One row of `columns` finite values, a whole number of blocks. importance: null for none.
void encode_row(Type type, const float* x, int columns, const float* importance, uint8_t* out) noexcept;

// `count` values of a float type as float; false when one of them is NaN or infinite.
bool read_floats(Type type, const uint8_t* raw, int count, float* out) noexcept;

namespace encode {
// Blocks of 32 (encode_blocks.cpp, and encode_weighted.cpp with importance) and super-blocks of 256 (encode_super.cpp).
void blocks_row(Type type, const float* x, int columns, uint8_t* out) noexcept;
void weighted_blocks_row(Type type, const float* x, int columns, const float* importance, uint8_t* out) noexcept;
void super_row(Type type, const float* x, int columns, const float* importance, uint8_t* out) noexcept;
}  // namespace encode

}  // namespace kvarn
