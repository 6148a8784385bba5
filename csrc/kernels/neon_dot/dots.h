// Dots by sdot: four bytes of a row times four activations, added to the row's int32 lane.
#pragma once
#include "../neon/products.h"

namespace kvarn::neon_dot {
namespace {

struct QuadDots {
    static void arrange(neon::Weights&) {}

    template <class Format, int kTokens>
    static inline void dot(const neon::Weights& w, const int8_t* q, int part, int32x4_t (*dots)[2]) {
        for (int t = 0; t < kTokens; ++t) dots[t][0] = dots[t][1] = vdupq_n_s32(0);
        for (int half = part; half < part + 2 / Format::kParts; ++half)
            for (int t = 0; t < kTokens; ++t)
                add_half(w + 4 * half, vld1q_s8(q + t * kQuantBlock + 16 * half), dots[t]);
    }

private:
    // Lanes are part of the instruction, so they are written out.
    static inline void add_half(const int8x16_t (*w)[2], int8x16_t x, int32x4_t dots[2]) {
        for (int i = 0; i < 2; ++i) {
            dots[i] = vdotq_laneq_s32(dots[i], w[0][i], x, 0);
            dots[i] = vdotq_laneq_s32(dots[i], w[1][i], x, 1);
            dots[i] = vdotq_laneq_s32(dots[i], w[2][i], x, 2);
            dots[i] = vdotq_laneq_s32(dots[i], w[3][i], x, 3);
        }
    }
};

}  // namespace
}  // namespace kvarn::neon_dot
