// f16 and bf16 bit patterns to float. Every pattern is a value: NaN and infinity pass through.
#pragma once
#include <bit>
#include <cstdint>

namespace kvarn {

inline float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t exponent = (half >> 10) & 31u;
    const uint32_t mantissa = half & 1023u;
    if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24, exact
        const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
        return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
    }
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
    return std::bit_cast<float>(sign | (exponent + 112u) << 23 | mantissa << 13);
}

inline float bfloat_to_float(uint16_t bfloat) { return std::bit_cast<float>(static_cast<uint32_t>(bfloat) << 16); }

}  // namespace kvarn
