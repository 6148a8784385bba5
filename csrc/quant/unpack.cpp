// Dequantising a row of a packed matrix: for embedding lookups, and the definition of the packed layouts.
#include <cstring>

#include "../kernels/shared/packed_bits.h"
#include "half.h"
#include "pack.h"

namespace kvarn {
namespace {

using shared::kIQ4Values;
using shared::nibble;
using shared::one_bit;
using shared::two_bits;

void unpack_q4_0(const packed::Q4_0& block, int row, float* out) {
    const float d = half_to_float(block.d[row]);
    for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(nibble(block.nibbles, row, i) - 8);
}

void unpack_iq4_nl(const packed::Q4_0& block, int row, float* out) {
    const float d = half_to_float(block.d[row]);
    for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(kIQ4Values[nibble(block.nibbles, row, i)]);
}

void unpack_q4_1(const packed::Q4_1& block, int row, float* out) {
    const float d = half_to_float(block.d[row]), m = half_to_float(block.m[row]);
    for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(nibble(block.nibbles, row, i)) + m;
}

void unpack_q5_0(const packed::Q5_0& block, int row, float* out) {
    const float d = half_to_float(block.d[row]);
    for (int i = 0; i < 32; ++i) {
        const int q = nibble(block.nibbles, row, i) | one_bit(block.high, row, i) << 4;
        out[i] = d * static_cast<float>(q - 16);
    }
}

void unpack_q5_1(const packed::Q5_1& block, int row, float* out) {
    const float d = half_to_float(block.d[row]), m = half_to_float(block.m[row]);
    for (int i = 0; i < 32; ++i) {
        const int q = nibble(block.nibbles, row, i) | one_bit(block.high, row, i) << 4;
        out[i] = d * static_cast<float>(q) + m;
    }
}

void unpack_q8_0(const packed::Q8_0& block, int row, float* out) {
    const float d = half_to_float(block.d[row]);
    for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(block.q[i / 4][row][i % 4]);
}

void unpack_q4_k(const packed::Q4_K& block, int row, float* out) {
    const float d = half_to_float(block.d[row]), dmin = half_to_float(block.dmin[row]);
    for (int s = 0; s < 8; ++s) {
        const float scale = d * block.scale[s][row], min = dmin * block.min[s][row];
        for (int i = 0; i < 32; ++i)
            out[32 * s + i] = scale * static_cast<float>(nibble(block.nibbles[s], row, i)) - min;
    }
}

void unpack_q5_k(const packed::Q5_K& block, int row, float* out) {
    const float d = half_to_float(block.d[row]), dmin = half_to_float(block.dmin[row]);
    for (int s = 0; s < 8; ++s) {
        const float scale = d * block.scale[s][row], min = dmin * block.min[s][row];
        for (int i = 0; i < 32; ++i) {
            const int q = nibble(block.nibbles[s], row, i) | one_bit(block.high[s], row, i) << 4;
            out[32 * s + i] = scale * static_cast<float>(q) - min;
        }
    }
}

void unpack_q6_k(const packed::Q6_K& block, int row, float* out) {
    const float d = half_to_float(block.d[row]);
    for (int i = 0; i < 256; ++i) {
        const int q = nibble(block.nibbles[i / 32], row, i % 32) | two_bits(block.high[i / 32], row, i % 32) << 4;
        out[i] = d * block.scale[i / 16][row] * static_cast<float>(q - 32);
    }
}

void unpack_q3_k(const packed::Q3_K& block, int row, float* out) {
    const float d = half_to_float(block.d[row]);
    for (int i = 0; i < 256; ++i) {
        const int q = two_bits(block.low[i / 32], row, i % 32) | one_bit(block.high[i / 32], row, i % 32) << 2;
        out[i] = d * block.scale[i / 16][row] * static_cast<float>(q - 4);
    }
}

void unpack_q2_k(const packed::Q2_K& block, int row, float* out) {
    const float d = half_to_float(block.d[row]), dmin = half_to_float(block.dmin[row]);
    for (int i = 0; i < 256; ++i) {
        const int scale = block.scale_min[i / 16][row] & 15, min = block.scale_min[i / 16][row] >> 4;
        const int q = two_bits(block.low[i / 32], row, i % 32);
        out[i] = d * static_cast<float>(scale) * static_cast<float>(q) - dmin * static_cast<float>(min);
    }
}

// Columns [begin, end) of a group of rows.
struct Part {
    const uint8_t* group;
    int begin, end;
};

template <class Packed>
void unpack_blocks(const Part& part, int values, int row, float* out, void (*unpack)(const Packed&, int, float*)) {
    const Packed* blocks = reinterpret_cast<const Packed*>(part.group);
    for (int b = part.begin / values; b < part.end / values; ++b, out += values) unpack(blocks[b], row, out);
}

template <float (*ToFloat)(uint16_t)>
void unpack_halves(const Part& part, int row, float* out) {
    for (int i = part.begin; i < part.end; ++i) {
        uint16_t bits;
        std::memcpy(&bits, part.group + sizeof bits * (kLanes * static_cast<size_t>(i) + row), sizeof bits);
        *out++ = ToFloat(bits);
    }
}

void unpack_floats(const Part& part, int row, float* out) {
    for (int i = part.begin; i < part.end; ++i)
        std::memcpy(out++, part.group + sizeof(float) * (kLanes * static_cast<size_t>(i) + row), sizeof(float));
}

}  // namespace

void unpack_row(Type type, const uint8_t* packed, int columns, int row, float* out) noexcept {
    unpack_columns(type, packed, columns, row, 0, columns, out);
}

void unpack_columns(Type type, const uint8_t* packed, int columns, int row, int begin, int end, float* out) noexcept {
    const Part part{packed + packed_group_bytes(type, columns) * (row / kLanes), begin, end};
    const int lane = row % kLanes;
    switch (type) {
        case Type::F32: return unpack_floats(part, lane, out);
        case Type::F16: return unpack_halves<half_to_float>(part, lane, out);
        case Type::BF16: return unpack_halves<bfloat_to_float>(part, lane, out);
        case Type::Q4_0: return unpack_blocks(part, 32, lane, out, unpack_q4_0);
        case Type::IQ4_NL: return unpack_blocks(part, 32, lane, out, unpack_iq4_nl);
        case Type::Q4_1: return unpack_blocks(part, 32, lane, out, unpack_q4_1);
        case Type::Q5_0: return unpack_blocks(part, 32, lane, out, unpack_q5_0);
        case Type::Q5_1: return unpack_blocks(part, 32, lane, out, unpack_q5_1);
        case Type::Q8_0: return unpack_blocks(part, 32, lane, out, unpack_q8_0);
        case Type::Q2_K: return unpack_blocks(part, 256, lane, out, unpack_q2_k);
        case Type::Q3_K: return unpack_blocks(part, 256, lane, out, unpack_q3_k);
        case Type::Q4_K: return unpack_blocks(part, 256, lane, out, unpack_q4_k);
        case Type::Q5_K: return unpack_blocks(part, 256, lane, out, unpack_q5_k);
        case Type::Q6_K: return unpack_blocks(part, 256, lane, out, unpack_q6_k);
    }
}

}  // namespace kvarn
