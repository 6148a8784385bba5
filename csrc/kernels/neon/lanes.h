// Eight floats in two vectors of Advanced SIMD, for the templates of ../shared. Running sums have four lanes: the first
// half takes both halves of what is added, one after the other.
#pragma once
#include <arm_neon.h>

#include "../shared/lanes.h"

namespace kvarn::neon {
namespace {

using shared::First;
using shared::Whole;

struct Lanes : shared::SmallRegisterTiles {
    struct Floats {
        float32x4_t low, high;
    };
    static constexpr int kWidth = 8;

    static Floats set(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
    static Floats load(const float* at) { return {vld1q_f32(at), vld1q_f32(at + 4)}; }
    static Floats load(const uint16_t* at) {
        const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(at));
        return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
    }
    static Floats load(const int8_t* at) {
        const int16x8_t wide = vmovl_s8(vld1_s8(at));
        return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_high_s16(wide))};
    }
    static Floats load_bf16(const uint16_t* at) {
        const uint16x8_t halves = vld1q_u16(at);
        return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(halves), 16)),
                vreinterpretq_f32_u32(vshll_high_n_u16(halves, 16))};
    }
    template <class Value>
    static Floats load(const Value* at, Whole) {
        return load(at);
    }
    template <class Value>
    static Floats load(const Value* at, First first) {
        Value lanes[kWidth] = {};
        for (int i = 0; i < kWidth && i < first.count; ++i) lanes[i] = at[i];
        return load(lanes);
    }
    static void store(float* to, Floats x) {
        vst1q_f32(to, x.low);
        vst1q_f32(to + 4, x.high);
    }
    static void store(float* to, Floats x, Whole) { store(to, x); }
    static void store(float* to, Floats x, First first) {
        float lanes[kWidth];
        store(lanes, x);
        for (int i = 0; i < first.count; ++i) to[i] = lanes[i];
    }
    static Floats keep(Floats x, Whole) { return x; }
    static Floats keep(Floats x, First first) {
        return {masked(x.low, vcltq_s32(numbers(), vdupq_n_s32(first.count))),
                masked(x.high, vcltq_s32(numbers(), vdupq_n_s32(first.count - 4)))};
    }

    static Floats add(Floats a, Floats b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
    static Floats sub(Floats a, Floats b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
    static Floats mul(Floats a, Floats b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
    static Floats div(Floats a, Floats b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
    static Floats min(Floats a, Floats b) { return {vminq_f32(a.low, b.low), vminq_f32(a.high, b.high)}; }
    static Floats max(Floats a, Floats b) { return {vmaxq_f32(a.low, b.low), vmaxq_f32(a.high, b.high)}; }
    static Floats fma(Floats a, Floats b, Floats c) {
        return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
    }
    static Floats fnma(Floats a, Floats b, Floats c) {
        return {vfmsq_f32(c.low, a.low, b.low), vfmsq_f32(c.high, a.high, b.high)};
    }
    static Floats negate(Floats x) { return {vnegq_f32(x.low), vnegq_f32(x.high)}; }
    static Floats absolute(Floats x) { return {vabsq_f32(x.low), vabsq_f32(x.high)}; }
    static Floats copy_sign(Floats magnitude, Floats x) {
        const uint32x4_t sign = vdupq_n_u32(0x80000000u);
        return {vbslq_f32(sign, x.low, magnitude.low), vbslq_f32(sign, x.high, magnitude.high)};
    }
    static Floats choose_greater(Floats a, Floats b, Floats yes, Floats no) {
        return {vbslq_f32(vcgtq_f32(a.low, b.low), yes.low, no.low),
                vbslq_f32(vcgtq_f32(a.high, b.high), yes.high, no.high)};
    }
    static Floats choose_negative(Floats x, Floats yes, Floats no) { return choose_greater(set(0), x, yes, no); }
    static Floats where_positive(Floats condition, Floats x) {
        return {masked(x.low, vcgtzq_f32(condition.low)), masked(x.high, vcgtzq_f32(condition.high))};
    }
    static float square_root(float x) { return vget_lane_f32(vsqrt_f32(vdup_n_f32(x)), 0); }

    struct WholeNumbers {
        Floats floats;
        int32x4_t low, high;
    };
    static WholeNumbers nearest_whole(Floats x) {
        const int32x4_t low = vcvtnq_s32_f32(x.low), high = vcvtnq_s32_f32(x.high);
        return {{vcvtq_f32_s32(low), vcvtq_f32_s32(high)}, low, high};
    }
    static Floats times_power_of_two(Floats x, const WholeNumbers& n) {
        return {times_power_of_two(x.low, n.low), times_power_of_two(x.high, n.high)};
    }
    static Floats nearest(Floats x) { return {vrndnq_f32(x.low), vrndnq_f32(x.high)}; }

    static float sum_lanes(Floats x) { return vaddvq_f32(vaddq_f32(x.low, x.high)); }
    static float sum_by_halves(Floats x) {
        const float32x4_t four = vaddq_f32(x.low, x.high);
        const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
        return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
    }
    static float sum_of_four(const Floats x[4]) { return sum_lanes(add(add(x[0], x[2]), add(x[1], x[3]))); }
    static void accumulate(Floats& sum, Floats x) { sum.low = vaddq_f32(vaddq_f32(sum.low, x.low), x.high); }
    static float max_lanes(Floats x) { return vmaxnmvq_f32(vmaxnmq_f32(x.low, x.high)); }
    static int32x4_t numbers() {
        static const int32_t lanes[4] = {0, 1, 2, 3};
        return vld1q_s32(lanes);
    }

    struct DoubleSums {
        float64x2_t partial[4] = {vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0)};

        void add(Floats values) {
            partial[0] = vaddq_f64(partial[0], vcvt_f64_f32(vget_low_f32(values.low)));
            partial[1] = vaddq_f64(partial[1], vcvt_high_f64_f32(values.low));
            partial[2] = vaddq_f64(partial[2], vcvt_f64_f32(vget_low_f32(values.high)));
            partial[3] = vaddq_f64(partial[3], vcvt_high_f64_f32(values.high));
        }
        double total() const {
            double sum = 0;
            for (const float64x2_t part : partial) sum = (sum + vgetq_lane_f64(part, 0)) + vgetq_lane_f64(part, 1);
            return sum;
        }
    };

    // Attention.
    static Floats set_half(uint16_t half) { return set(half_to_float(half)); }
    static Floats hide_outside(Floats x, int first, int last) {
        return {hide_outside(x.low, first, last), hide_outside(x.high, first - 4, last - 4)};
    }
    // Passes over NaN, whose weight is NaN.
    static Floats running_max(Floats max, Floats x) {
        return {vmaxnmq_f32(max.low, x.low), vmaxnmq_f32(max.high, x.high)};
    }

    // Quantisation.
    struct Quants {
        int8x16_t half[2];
    };
    static Quants no_quants() { return {{vdupq_n_s8(0), vdupq_n_s8(0)}}; }
    static Quants round_to_int8(const Floats x[4], float factor) {
        Quants q;
        for (int half = 0; half < 2; ++half) {
            int16x8_t eight[2];
            for (int j = 0; j < 2; ++j) {
                const WholeNumbers n = nearest_whole(mul(x[2 * half + j], set(factor)));
                eight[j] = vcombine_s16(vqmovn_s32(n.low), vqmovn_s32(n.high));
            }
            q.half[half] = vmaxq_s8(vcombine_s8(vqmovn_s16(eight[0]), vqmovn_s16(eight[1])), vdupq_n_s8(-127));
        }
        return q;
    }
    static void store(int8_t* to, const Quants& q) {
        vst1q_s8(to, q.half[0]);
        vst1q_s8(to + 16, q.half[1]);
    }
    static void minus_sums(const Quants& q, int32_t sums[2]) {
        for (int half = 0; half < 2; ++half) sums[half] = -vaddlvq_s8(q.half[half]);
    }
    static int largest_magnitude_bits(const Floats x[4]) {
        uint32x4_t largest = vdupq_n_u32(0);
        for (int j = 0; j < 4; ++j) {
            largest = vmaxq_u32(largest, vreinterpretq_u32_f32(vabsq_f32(x[j].low)));
            largest = vmaxq_u32(largest, vreinterpretq_u32_f32(vabsq_f32(x[j].high)));
        }
        return static_cast<int>(vmaxvq_u32(largest));
    }
    static void store_halves(uint16_t* to, Floats x) {
        vst1q_u16(to, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.low), x.high)));
    }
    static uint16_t float_to_half(float x) {
        return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(x))), 0);
    }
    static float half_to_float(uint16_t half) {
        return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(half))), 0);
    }

private:
    static float32x4_t masked(float32x4_t x, uint32x4_t mask) {
        return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), mask));
    }
    static float32x4_t hide_outside(float32x4_t x, int first, int last) {
        const uint32x4_t is_visible =
            vandq_u32(vcgeq_s32(numbers(), vdupq_n_s32(first)), vcltq_s32(numbers(), vdupq_n_s32(last)));
        return vbslq_f32(is_visible, x, vdupq_n_f32(-__builtin_inff()));
    }
    // 2^n for integer n in -126 .. 127.
    static float32x4_t power_of_two(int32x4_t n) {
        return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
    }
    // In two factors, so that subnormals and infinity come out right.
    static float32x4_t times_power_of_two(float32x4_t x, int32x4_t n) {
        const int32x4_t half = vshrq_n_s32(n, 1);
        return vmulq_f32(vmulq_f32(x, power_of_two(half)), power_of_two(vsubq_s32(n, half)));
    }
};

}  // namespace
}  // namespace kvarn::neon
