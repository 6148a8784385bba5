#include "encode.h"

#include <cstring>

#include "half.h"

namespace kvarn {
namespace {

bool are_finite(const float* x, int count) {
    uint32_t found = 0;
    for (int i = 0; i < count; ++i) {
        const uint32_t exponent = std::bit_cast<uint32_t>(x[i]) & 0x7f800000u;
        found |= exponent == 0x7f800000u ? 1u : 0u;
    }
    return found == 0;
}

template <class Convert>
bool read_halves(const uint8_t* raw, int count, float* out, Convert convert) {
    for (int i = 0; i < count; ++i) {
        uint16_t bits;
        std::memcpy(&bits, raw + 2 * i, sizeof bits);
        out[i] = convert(bits);
    }
    return are_finite(out, count);
}

// F16 in a few steps without a branch, so that the compiler takes several at once: the exponent is moved and corrected
// by a multiplication, which also makes subnormals right.
float half_value(uint16_t half) {
    const uint32_t moved = static_cast<uint32_t>(half & 0x7fffu) << 13;
    const float scaled = std::bit_cast<float>(moved) * 0x1p112f;
    const uint32_t special = moved >= 0x0f800000u ? 0x7f800000u : 0u;  // infinity and NaN
    return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | special |
                                static_cast<uint32_t>(half & 0x8000u) << 16);
}

template <class Convert>
void write_halves(const float* x, int columns, uint8_t* out, Convert convert) {
    for (int i = 0; i < columns; ++i) {
        const uint16_t bits = convert(x[i]);
        std::memcpy(out + 2 * i, &bits, sizeof bits);
    }
}

}  // namespace

bool is_encodable(Type type) {
    switch (type) {
        case Type::F32:
        case Type::F16:
        case Type::BF16:
        case Type::Q4_0:
        case Type::Q4_1:
        case Type::Q5_0:
        case Type::Q5_1:
        case Type::Q8_0:
        case Type::Q2_K:
        case Type::Q3_K:
        case Type::Q4_K:
        case Type::Q5_K:
        case Type::Q6_K:
        case Type::IQ4_NL: return true;
    }
    return false;
}

void encode_row(Type type, const float* x, int columns, const float* importance, uint8_t* out) noexcept {
    switch (type) {
        case Type::F32: std::memcpy(out, x, sizeof(float) * static_cast<size_t>(columns)); return;
        case Type::F16: return write_halves(x, columns, out, float_to_half);
        case Type::BF16: return write_halves(x, columns, out, float_to_bfloat);
        case Type::Q8_0: return encode::blocks_row(type, x, columns, out);  // its rounding is fine enough as it is
        case Type::Q4_0:
        case Type::Q4_1:
        case Type::Q5_0:
        case Type::Q5_1:
            if (importance == nullptr) return encode::blocks_row(type, x, columns, out);
            return encode::weighted_blocks_row(type, x, columns, importance, out);
        case Type::IQ4_NL: return encode::weighted_blocks_row(type, x, columns, importance, out);
        default: return encode::super_row(type, x, columns, importance, out);
    }
}

bool read_floats(Type type, const uint8_t* raw, int count, float* out) noexcept {
    if (type == Type::F16) return read_halves(raw, count, out, half_value);
    if (type == Type::BF16) return read_halves(raw, count, out, bfloat_to_float);
    std::memcpy(out, raw, sizeof(float) * static_cast<size_t>(count));
    return are_finite(out, count);
}

}  // namespace kvarn
