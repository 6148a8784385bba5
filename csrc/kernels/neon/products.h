// Matrix times activations for every quantised type, over a way to dot bytes that each folder brings along:
//   Dots::arrange(w)                          reorder the weights of a step, once for all tokens
//   Dots::dot<Format, kTokens>(w, q, part, dots)    dots[t] = w . q[t] over the columns of one part
//
// A step is 8 rows x 32 columns; its weights are unpacked once and meet every token of the tile. Sums over a step are
// integers and exact, then come one fma for the scale and one for the minimum where a type has it, always in that
// order: results depend neither on tile sizes nor on Dots.
#pragma once
#include "../shared/step_input.h"
#include "formats.h"

namespace kvarn::neon {
namespace {

using shared::StepInput;

inline void add_product(float32x4_t sums[2], int32x4_t const dots[2], const Floats& scale, float xd) {
    for (int i = 0; i < 2; ++i) sums[i] = vfmaq_f32(sums[i], vcvtq_f32_s32(dots[i]), vmulq_n_f32(scale.four[i], xd));
}

template <class Format, class Dots, int kTokens>
inline void add_step(const Weights& w, const WholeScales& scales, const StepInput& x, float32x4_t (*sums)[2]) {
    int32x4_t dots[kTokens][2];
    Dots::template dot<Format, kTokens>(w, x.q, 0, dots);
    for (int t = 0; t < kTokens; ++t) {
        add_product(sums[t], dots[t], scales.scale, x.scale[t]);
        if constexpr (Format::kHasMin)
            for (int i = 0; i < 2; ++i) sums[t][i] = vfmaq_n_f32(sums[t][i], scales.min.four[i], x.sum[t]);
    }
}

template <class Format, class Dots, int kTokens>
inline void add_step(const Weights& w, const HalvedScales& scales, const StepInput& x, float32x4_t (*sums)[2]) {
    int32x4_t dots[kTokens][2], total[kTokens][2];
    for (int half = 0; half < 2; ++half) {
        Dots::template dot<Format, kTokens>(w, x.q, half, dots);
        for (int t = 0; t < kTokens; ++t)
            for (int i = 0; i < 2; ++i) {
                const int32x4_t scaled = vmulq_s32(dots[t][i], scales.scale[half].four[i]);
                total[t][i] = half == 0 ? scaled : vaddq_s32(total[t][i], scaled);
            }
    }
    for (int t = 0; t < kTokens; ++t) {
        add_product(sums[t], total[t], scales.d, x.scale[t]);
        if constexpr (!Format::kHasMin) continue;
        const int8_t* q = x.q + t * kQuantBlock;
        const int sum0 = vaddlvq_s8(vld1q_s8(q)), sum1 = vaddlvq_s8(vld1q_s8(q + 16));
        int32x4_t min[2];
        for (int i = 0; i < 2; ++i)
            min[i] = vmlaq_n_s32(vmulq_n_s32(scales.min[0].four[i], sum0), scales.min[1].four[i], sum1);
        add_product(sums[t], min, scales.minus_dmin, x.scale[t]);
    }
}

// Write the sums of one group for one token, no further than the last row.
inline void write_rows(const float32x4_t sums[2], float* out, int num_rows) {
    if (num_rows >= kLanes) {
        vst1q_f32(out, sums[0]);
        vst1q_f32(out + 4, sums[1]);
        return;
    }
    float rows[kLanes];
    vst1q_f32(rows, sums[0]);
    vst1q_f32(rows + 4, sums[1]);
    for (int lane = 0; lane < num_rows; ++lane) out[lane] = rows[lane];
}

template <class Format, class Dots>
struct Products {
    using Packed = typename Format::Packed;
    using Scales = typename Format::Scales;
    static constexpr int kSteps = Format::kSteps;

    const Packed* weights;
    const ActTile& tile;
    float* out;
    size_t out_stride;
    int rows;

    const Packed& block_at(int group, int step) const {
        return weights[static_cast<size_t>(tile.k / kQuantBlock / kSteps) * group + step / kSteps];
    }

    StepInput input(int step, int t) const { return shared::step_input(tile, step, t); }

    void write(const float32x4_t sums[2], int group, int t) const {
        write_rows(sums, out + t * out_stride + group * kLanes, rows - group * kLanes);
    }

    // One token: weights and sums never leave the registers.
    void run_one(int group) const {
        float32x4_t sums[1][2] = {{vdupq_n_f32(0), vdupq_n_f32(0)}};
        for (int step = 0; step < tile.k / kQuantBlock; ++step) {
            const Packed& block = block_at(group, step);
            Weights w;
            Format::unpack(block, step % kSteps, w);
            Dots::arrange(w);
            add_step<Format, Dots, 1>(w, Format::scales(block, step % kSteps), input(step, 0), sums);
        }
        write(sums[0], group, 0);
    }

    template <int kTokens>
    static inline void add_tokens(const Weights& w, const Scales& scales, const StepInput& x, float32x4_t (*acc)[2]) {
        float32x4_t sums[kTokens][2];
        for (int t = 0; t < kTokens; ++t)
            for (int i = 0; i < 2; ++i) sums[t][i] = acc[t][i];
        add_step<Format, Dots, kTokens>(w, scales, x, sums);
        for (int t = 0; t < kTokens; ++t)
            for (int i = 0; i < 2; ++i) acc[t][i] = sums[t][i];
    }

    void run_tile(int group) const {
        float32x4_t acc[kTileTokens][2];
        for (int t = 0; t < tile.n; ++t) acc[t][0] = acc[t][1] = vdupq_n_f32(0);
        for (int step = 0; step < tile.k / kQuantBlock; ++step) {
            const Packed& block = block_at(group, step);
            Weights w;
            Format::unpack(block, step % kSteps, w);
            Dots::arrange(w);
            const Scales scales = Format::scales(block, step % kSteps);
            int t = 0;
            for (; t + 4 <= tile.n; t += 4) add_tokens<4>(w, scales, input(step, t), acc + t);
            for (; t + 2 <= tile.n; t += 2) add_tokens<2>(w, scales, input(step, t), acc + t);
            if (t < tile.n) add_tokens<1>(w, scales, input(step, t), acc + t);
        }
        for (int t = 0; t < tile.n; ++t) write(acc[t], group, t);
    }
};

// OneDots: for a single token.
template <class Format, class Dots, class OneDots>
void matmul(const uint8_t* packed, const ActTile& tile, float* out, size_t out_stride, int rows, int group_begin,
            int group_end) noexcept {
    const auto* weights = reinterpret_cast<const typename Format::Packed*>(packed);
    for (int group = group_begin; group < group_end; ++group) {
        if (tile.n == 1) Products<Format, OneDots>{weights, tile, out, out_stride, rows}.run_one(group);
        else Products<Format, Dots>{weights, tile, out, out_stride, rows}.run_tile(group);
    }
}

template <class Dots, class OneDots = Dots>
constexpr KernelTable make_matmul_kernels() {
    KernelTable t{};
#define KVARN_SET(type) t.matmul[static_cast<int>(Type::type)] = matmul<type, Dots, OneDots>;
    KVARN_QUANTIZED_TYPES(KVARN_SET)
#undef KVARN_SET
    return t;
}

}  // namespace
}  // namespace kvarn::neon
