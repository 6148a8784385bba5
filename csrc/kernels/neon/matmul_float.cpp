// Matrix times activations for weights kept as floats: one fma per column, in ascending order.
#include <arm_neon.h>

#include "functions.h"

namespace kvarn::neon {
namespace {

// Eight rows of one column, four to a vector.
struct F32 {
    using Value = float;
    static void load(const Value* at, float32x4_t w[2]) {
        w[0] = vld1q_f32(at);
        w[1] = vld1q_f32(at + 4);
    }
};

struct F16 {
    using Value = uint16_t;
    static void load(const Value* at, float32x4_t w[2]) {
        const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(at));
        w[0] = vcvt_f32_f16(vget_low_f16(halves));
        w[1] = vcvt_high_f32_f16(halves);
    }
};

struct BF16 {
    using Value = uint16_t;
    static void load(const Value* at, float32x4_t w[2]) {
        const uint16x8_t halves = vld1q_u16(at);
        w[0] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(halves), 16));
        w[1] = vreinterpretq_f32_u32(vshll_high_n_u16(halves, 16));
    }
};

template <class Format>
struct FloatMatmul {
    using Value = typename Format::Value;

    const Value* weights;
    const ActTile& tile;
    float* out;
    size_t out_stride;
    int rows;

    void write(const float* sums, int group, int t) const {
        const int left = rows - group * kLanes, num_rows = left < kLanes ? left : kLanes;
        for (int lane = 0; lane < num_rows; ++lane) out[t * out_stride + group * kLanes + lane] = sums[lane];
    }

    template <int kGroups, int kTokens>
    void run_tile(int group, int t) const {
        const Value* columns[kGroups];
        const float* x[kTokens];
        float32x4_t sums[kGroups][kTokens][2];
        for (int i = 0; i < kTokens; ++i) x[i] = tile.f + static_cast<size_t>(t + i) * tile.k;
        for (int g = 0; g < kGroups; ++g) {
            columns[g] = weights + static_cast<size_t>(tile.k) * kLanes * (group + g);
            for (int i = 0; i < kTokens; ++i) sums[g][i][0] = sums[g][i][1] = vdupq_n_f32(0);
        }
        const int num_columns = tile.k;
        for (int column = 0; column < num_columns; ++column)
            for (int g = 0; g < kGroups; ++g) {
                float32x4_t w[2];
                Format::load(columns[g] + static_cast<size_t>(column) * kLanes, w);
                for (int i = 0; i < kTokens; ++i)
                    for (int half = 0; half < 2; ++half)
                        sums[g][i][half] = vfmaq_n_f32(sums[g][i][half], w[half], x[i][column]);
            }
        // Stored by constant indices first: anything else would keep the sums in memory throughout the loop above.
        float results[kGroups][kTokens][kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kGroups * kTokens * 2; ++i)
            vst1q_f32(results[i / 2 / kTokens][i / 2 % kTokens] + i % 2 * 4,
                      sums[i / 2 / kTokens][i / 2 % kTokens][i % 2]);
        for (int g = 0; g < kGroups; ++g)
            for (int i = 0; i < kTokens; ++i) write(results[g][i], group + g, t + i);
    }

    template <int kGroups>
    void run_groups(int group) const {
        int t = 0;
        for (; t + 4 <= tile.n; t += 4) run_tile<kGroups, 4>(group, t);
        for (; t + 2 <= tile.n; t += 2) run_tile<kGroups, 2>(group, t);
        if (t < tile.n) run_tile<kGroups, 1>(group, t);
    }

    void run(int group_begin, int group_end) const {
        int group = group_begin;
        for (; group + 2 <= group_end; group += 2) run_groups<2>(group);
        if (group < group_end) run_groups<1>(group);
    }
};

}  // namespace

#define KVARN_MATMUL(name, Format)                                                                                  \
    void name(const uint8_t* packed, const ActTile& tile, float* out, size_t out_stride, int rows, int group_begin, \
              int group_end) noexcept {                                                                             \
        const auto* weights = reinterpret_cast<const Format::Value*>(packed);                                       \
        FloatMatmul<Format>{weights, tile, out, out_stride, rows}.run(group_begin, group_end);                      \
    }

KVARN_MATMUL(matmul_f32, F32)
KVARN_MATMUL(matmul_f16, F16)
KVARN_MATMUL(matmul_bf16, BF16)
#undef KVARN_MATMUL

}  // namespace kvarn::neon
