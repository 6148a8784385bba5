// Products of quantised types by widening multiplications: byte times byte to int16, added there as long as they fit.
#include "products.h"

namespace kvarn::neon {
namespace {

// The four activations of columns 4j .. 4j + 3, twice.
inline int8x8_t broadcast4(const int8_t* q, int j) {
    uint32_t four;
    __builtin_memcpy(&four, q + 4 * j, sizeof four);
    return vreinterpret_s8_u32(vdup_n_u32(four));
}

struct WideningDots {
    static void arrange(Weights&) {}

    template <class Format, int kTokens>
    static inline void dot(const Weights& w, const int8_t* q, int part, int32x4_t (*dots)[2]) {
        for (int t = 0; t < kTokens; ++t)
            dot_one<Format>(w + part * (8 / Format::kParts), q + t * kQuantBlock + part * 16, dots[t]);
    }

private:
    // products[p]: four columns of row 2p, then of row 2p + 1; kRun of them fit int16.
    template <class Format>
    static inline void dot_one(const int8x16_t (*w)[2], const int8_t* q, int32x4_t dots[2]) {
        constexpr int kCount = 8 / Format::kParts, kFit = 32767 / (127 * Format::kMaxWeight);
        constexpr int kRun = kFit < kCount ? kFit : kCount;
        int32x4_t pairs[4];
        for (int begin = 0; begin < kCount; begin += kRun) {
            int16x8_t products[4];
            for (int j = begin; j < begin + kRun; ++j) {
                const int8x8_t x = broadcast4(q, j);
                for (int p = 0; p < 4; ++p) {
                    const int8x8_t rows = p % 2 == 0 ? vget_low_s8(w[j][p / 2]) : vget_high_s8(w[j][p / 2]);
                    products[p] = j == begin ? vmull_s8(rows, x) : vmlal_s8(products[p], rows, x);
                }
            }
            for (int p = 0; p < 4; ++p)
                pairs[p] = begin == 0 ? vpaddlq_s16(products[p]) : vpadalq_s16(pairs[p], products[p]);
        }
        for (int i = 0; i < 2; ++i) dots[i] = vpaddq_s32(pairs[2 * i], pairs[2 * i + 1]);
    }
};

}  // namespace

constinit const KernelTable matmul_kernels = make_matmul_kernels<WideningDots>();

}  // namespace kvarn::neon
