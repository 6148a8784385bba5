// On top of the dot product table: two rows times two tokens with smmla. Needs the int8 matrix extension (ARMv8.6).
// A single token would fill half of each instruction, so it keeps sdot.
#include "../neon_dot/dots.h"

namespace kvarn::neon_i8mm {
namespace {

struct MatrixDots {
    // Rows of four columns become pairs of rows of eight: [2p + r][i] holds columns 8p .. 8p + 7 of row 4i + 2r, then
    // of the next row.
    static void arrange(neon::Weights& w) {
        for (int p = 0; p < 4; ++p)
            for (int i = 0; i < 2; ++i) {
                const int32x4_t a = vreinterpretq_s32_s8(w[2 * p][i]), b = vreinterpretq_s32_s8(w[2 * p + 1][i]);
                w[2 * p][i] = vreinterpretq_s8_s32(vzip1q_s32(a, b));
                w[2 * p + 1][i] = vreinterpretq_s8_s32(vzip2q_s32(a, b));
            }
    }

    // An odd token at the end of a tile is paired with itself.
    template <class Format, int kTokens>
    static inline void dot(const neon::Weights& w, const int8_t* q, int part, int32x4_t (*dots)[2]) {
        constexpr int kCount = 4 / Format::kParts;
        for (int t = 0; t < kTokens; t += 2) {
            const int8_t* first = q + t * kQuantBlock;
            const int8_t* second = kTokens > 1 ? first + kQuantBlock : first;
            int32x4_t sums[2][2];  // [i][r]: row 4i + 2r with both tokens, then the next row with both
            for (int i = 0; i < 2; ++i) sums[i][0] = sums[i][1] = vdupq_n_s32(0);
            for (int p = part * kCount; p < (part + 1) * kCount; ++p) {
                const int8x16_t x = vcombine_s8(vld1_s8(first + 8 * p), vld1_s8(second + 8 * p));
                for (int i = 0; i < 2; ++i)
                    for (int r = 0; r < 2; ++r) sums[i][r] = vmmlaq_s32(sums[i][r], w[2 * p + r][i], x);
            }
            for (int i = 0; i < 2; ++i) {
                dots[t][i] = vuzp1q_s32(sums[i][0], sums[i][1]);
                if (kTokens > 1) dots[t + 1][i] = vuzp2q_s32(sums[i][0], sums[i][1]);
            }
        }
    }
};

}  // namespace

constinit const KernelTable matmul_kernels = neon::make_matmul_kernels<MatrixDots, neon_dot::QuadDots>();

}  // namespace kvarn::neon_i8mm
