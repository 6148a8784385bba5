// Number formats and elementary functions in plain arithmetic, so that the scalar table needs no libm.
// Functions are computed in double, good to about 1e-15, and rounded once by the caller.
#pragma once
#include <cstdint>

namespace kvarn::scalar {

static inline float float_of_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
static inline uint32_t bits_of_float(float x) { return __builtin_bit_cast(uint32_t, x); }

static inline float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t exponent = (half >> 10) & 31u, mantissa = half & 1023u;
    if (exponent == 0) return float_of_bits(bits_of_float(static_cast<float>(mantissa) * 0x1p-24f) | sign);
    if (exponent == 31) return float_of_bits(sign | 0x7f800000u | mantissa << 13);
    return float_of_bits(sign | (exponent + 112u) << 23 | mantissa << 13);
}

static inline float bfloat_to_float(uint16_t bits) { return float_of_bits(static_cast<uint32_t>(bits) << 16); }

// Round to nearest even, as F16C does: overflow becomes infinity, NaN stays NaN.
static inline uint16_t float_to_half(float x) {
    const uint32_t bits = bits_of_float(x), magnitude = bits & 0x7fffffffu;
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // >= 65520
    if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 lets the float unit round at 2^-24
        const uint32_t rounded = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
        return static_cast<uint16_t>(sign | rounded);
    }
    const uint32_t rebased = magnitude - 0x38000000u;  // exponent bias 127 -> 15
    return static_cast<uint16_t>(sign | (rebased + 0xfffu + (rebased >> 13 & 1u)) >> 13);
}

static inline float absolute(float x) { return float_of_bits(bits_of_float(x) & 0x7fffffffu); }
static inline bool is_finite(float x) { return (bits_of_float(x) & 0x7f800000u) != 0x7f800000u; }

// x >= 0. Newton's iteration from a guess that halves the exponent.
static inline double square_root(double x) {
    if (!(x > 0) || x > 1e300) return x;
    double root = __builtin_bit_cast(double, (__builtin_bit_cast(uint64_t, x) >> 1) + 0x1ff8000000000000u);
    for (int i = 0; i < 6; ++i) root = 0.5 * (root + x / root);
    return root;
}

// exp(x) = 2^n exp(r), |r| <= ln(2) / 2. Below -708 zero, above 709 infinity: both far outside float.
static inline double exponential(double x) {
    if (!(x == x)) return x;
    if (x < -708) return 0;
    if (x > 709) return __builtin_inf();
    const double turns = x * 1.4426950408889634;
    const int n = static_cast<int>(turns + (turns < 0 ? -0.5 : 0.5));
    const double r = (x - n * 0.6931471803691238) - n * 1.9082149292705877e-10;  // ln 2 in two parts
    double sum = 1;
    for (int i = 13; i > 0; --i) sum = 1 + sum * r / i;
    return sum * __builtin_bit_cast(double, static_cast<uint64_t>(n + 1023) << 52);
}

static inline double hyperbolic_tangent(double x) {
    if (x < 0) return -hyperbolic_tangent(-x);
    return 1 - 2 / (exponential(2 * x) + 1);
}

// erf(x) = 2 / sqrt(pi) exp(-x^2) sum of x (2 x^2)^i / (1 3 5 .. 2i+1): no cancellation, ends within 110 terms.
static inline double error_function(double x) {
    if (x < 0) return -error_function(-x);
    if (x > 6) return 1;
    double term = x, sum = x;
    for (int i = 1; term > sum * 1e-17; ++i) sum += term *= 2 * x * x / (2 * i + 1);
    return 1.1283791670955126 * exponential(-x * x) * sum;
}

}  // namespace kvarn::scalar
