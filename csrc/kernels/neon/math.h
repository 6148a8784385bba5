// exp, tanh and 1 + erf of four floats, and loads and stores that stop at the end of a row.
// The same minimax polynomials as in avx2/math.h.
#pragma once
#include <arm_neon.h>

#include <cstdint>

namespace kvarn::neon {

static inline float32x4_t set(float x) { return vdupq_n_f32(x); }

// 2^n for integer n in -126 .. 127.
static inline float32x4_t power_of_two(int32x4_t n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}

// exp(x) = 2^n exp(r), |r| <= ln(2) / 2. 2^n is applied in two factors, so that subnormals and infinity come out
// right. NaN stays NaN: it passes through max and min, and converts to n = 0.
static inline float32x4_t exp_f32x4(float32x4_t x) {
    x = vminq_f32(set(89.0f), vmaxq_f32(set(-104.0f), x));
    const int32x4_t n = vcvtnq_s32_f32(vmulq_f32(x, set(1.44269504f)));
    const float32x4_t turns = vcvtq_f32_s32(n);
    float32x4_t r = vfmsq_f32(x, turns, set(0.693145752f));  // ln 2 in two parts, the first exact times n
    r = vfmsq_f32(r, turns, set(1.42860677e-6f));
    float32x4_t p = set(1.395060099e-3f);
    p = vfmaq_f32(set(8.368953131e-3f), p, r);
    p = vfmaq_f32(set(4.166620597e-2f), p, r);
    p = vfmaq_f32(set(1.666651815e-1f), p, r);
    p = vfmaq_f32(set(0.5f), p, r);
    p = vaddq_f32(vfmaq_f32(r, p, vmulq_f32(r, r)), set(1.0f));
    const int32x4_t half = vshrq_n_s32(n, 1);
    return vmulq_f32(vmulq_f32(p, power_of_two(half)), power_of_two(vsubq_s32(n, half)));
}

static inline float exp_f32(float x) { return vgetq_lane_f32(exp_f32x4(set(x)), 0); }

// Odd polynomial below 0.625, 1 - 2 / (exp(2|x|) + 1) above.
static inline float32x4_t tanh_f32x4(float32x4_t x) {
    const float32x4_t magnitude = vabsq_f32(x);
    const float32x4_t square = vmulq_f32(x, x);
    float32x4_t p = set(-5.717045162e-3f);
    p = vfmaq_f32(set(2.065058798e-2f), p, square);
    p = vfmaq_f32(set(-5.374349654e-2f), p, square);
    p = vfmaq_f32(set(1.333149076e-1f), p, square);
    p = vfmaq_f32(set(-3.333328366e-1f), p, square);
    const float32x4_t small = vfmaq_f32(x, vmulq_f32(p, square), x);
    const float32x4_t e = exp_f32x4(vaddq_f32(magnitude, magnitude));
    const float32x4_t rest = vdivq_f32(set(2.0f), vaddq_f32(e, set(1.0f)));
    const float32x4_t large = vbslq_f32(vdupq_n_u32(0x80000000u), x, vsubq_f32(set(1.0f), rest));
    return vbslq_f32(vcgtq_f32(magnitude, set(0.625f)), large, small);
}

// 1 + erf(x): 1 + odd polynomial below 1; above, erfc(|x|) = exp(polynomial), or 2 minus it.
static inline float32x4_t one_plus_erf_f32x4(float32x4_t x) {
    const float32x4_t magnitude = vabsq_f32(x);
    const float32x4_t square = vmulq_f32(x, x);
    float32x4_t p = set(7.647119492e-5f);
    p = vfmaq_f32(set(-7.942356751e-4f), p, square);
    p = vfmaq_f32(set(5.179749802e-3f), p, square);
    p = vfmaq_f32(set(-2.684859186e-2f), p, square);
    p = vfmaq_f32(set(1.128343046e-1f), p, square);
    p = vfmaq_f32(set(-3.761260509e-1f), p, square);
    p = vfmaq_f32(set(1.128379107f), p, square);
    const float32x4_t small = vfmaq_f32(set(1.0f), p, x);
    const float32x4_t t = vsubq_f32(vminq_f32(set(10.0f), magnitude), set(2.5f));
    float32x4_t e = set(-2.168676474e-5f);
    e = vfmaq_f32(set(6.181692879e-5f), e, t);
    e = vfmaq_f32(set(-4.309144570e-4f), e, t);
    e = vfmaq_f32(set(2.166523365e-3f), e, t);
    e = vfmaq_f32(set(-1.085349917e-2f), e, t);
    e = vfmaq_f32(set(-9.438918233e-1f), e, t);
    e = vfmaq_f32(set(-5.352680683f), e, t);
    e = vfmaq_f32(set(-7.806815147f), e, t);
    const float32x4_t erfc = exp_f32x4(e);
    const float32x4_t large = vbslq_f32(vcltq_f32(x, set(0.0f)), erfc, vsubq_f32(set(2.0f), erfc));
    return vbslq_f32(vcgtq_f32(magnitude, set(1.0f)), large, small);
}

// Largest magnitude of 32 floats as bits; magnitudes order like integers, NaN above infinity above all numbers.
static inline uint32_t largest_magnitude_bits(const float32x4_t x[8]) {
    uint32x4_t largest = vreinterpretq_u32_f32(vabsq_f32(x[0]));
    for (int j = 1; j < 8; ++j) largest = vmaxq_u32(largest, vreinterpretq_u32_f32(vabsq_f32(x[j])));
    return vmaxvq_u32(largest);
}

// 32 floats to int8, rounded to nearest even and held to -127 .. 127.
static inline void round_to_int8(const float32x4_t x[8], int8x16_t q[2]) {
    for (int half = 0; half < 2; ++half) {
        int16x4_t whole[4];
        for (int j = 0; j < 4; ++j) whole[j] = vqmovn_s32(vcvtnq_s32_f32(x[4 * half + j]));
        const int8x8_t low = vqmovn_s16(vcombine_s16(whole[0], whole[1]));
        const int8x8_t high = vqmovn_s16(vcombine_s16(whole[2], whole[3]));
        q[half] = vmaxq_s8(vcombine_s8(low, high), vdupq_n_s8(-127));
    }
}

// Four floats, or the last 1 to 3 of a row; lanes beyond are loaded as zeros and not stored.
struct Four {};
struct Last {
    int count;
};

static inline float32x4_t load(const float* from, Four) { return vld1q_f32(from); }
static inline float32x4_t load(const float* from, Last last) {
    float lanes[4] = {};
    for (int i = 0; i < last.count; ++i) lanes[i] = from[i];
    return vld1q_f32(lanes);
}
static inline void store(float* to, float32x4_t x, Four) { vst1q_f32(to, x); }
static inline void store(float* to, float32x4_t x, Last last) {
    float lanes[4];
    vst1q_f32(lanes, x);
    for (int i = 0; i < last.count; ++i) to[i] = lanes[i];
}

static inline uint32x4_t lane_numbers() {
    static const uint32_t lanes[4] = {0, 1, 2, 3};
    return vld1q_u32(lanes);
}
static inline uint32x4_t lanes_of(Four) { return vdupq_n_u32(~0u); }
static inline uint32x4_t lanes_of(Last last) {
    return vcltq_u32(lane_numbers(), vdupq_n_u32(static_cast<uint32_t>(last.count)));
}
static inline float32x4_t kept(float32x4_t x, uint32x4_t lanes) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), lanes));
}

}  // namespace kvarn::neon
