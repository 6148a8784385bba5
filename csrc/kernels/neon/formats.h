// How each packed type turns a step of 8 rows x 32 columns into signed bytes and its scales. Types without a minimum
// lose their offset here, so that their sums need no correction:
//   Whole    W = scale * w + min                                  one scale for the 32 columns
//   Halved   W = d * scale[half] * w + minus_dmin * min[half]     small integer scales for each 16
// Everything has internal linkage: the folders that build on this one compile it anew with their own flags.
#pragma once
#include <arm_neon.h>

#include "../table.h"

namespace kvarn::neon {
namespace {

// [j][i]: columns 4j .. 4j + 3 of row 4i, then of row 4i + 1, up to row 4i + 3.
using Weights = int8x16_t[8][2];

// One value for each of the 8 rows.
struct Floats {
    float32x4_t four[2];
};
struct Ints {
    int32x4_t four[2];
};

struct WholeScales {
    Floats scale, min;
};
struct HalvedScales {
    Floats d, minus_dmin;
    Ints scale[2], min[2];
};

inline Floats halves(const uint16_t* at) {
    const float16x8_t eight = vreinterpretq_f16_u16(vld1q_u16(at));
    return {{vcvt_f32_f16(vget_low_f16(eight)), vcvt_high_f32_f16(eight)}};
}

inline Ints widened(int8x8_t x) {
    const int16x8_t eight = vmovl_s8(x);
    return {{vmovl_s16(vget_low_s16(eight)), vmovl_high_s16(eight)}};
}

inline Ints widened(uint8x8_t x) {
    const int16x8_t eight = vreinterpretq_s16_u16(vmovl_u8(x));  // at most 255
    return {{vmovl_s16(vget_low_s16(eight)), vmovl_high_s16(eight)}};
}

inline Floats product(Floats x, Ints y) {
    return {{vmulq_f32(x.four[0], vcvtq_f32_s32(y.four[0])), vmulq_f32(x.four[1], vcvtq_f32_s32(y.four[1]))}};
}

inline Floats negated(Floats x) { return {{vnegq_f32(x.four[0]), vnegq_f32(x.four[1])}}; }

// Shift every byte left by `places`, right if negative. Constant after inlining.
inline uint8x16_t shifted(uint8x16_t x, int places) { return vshlq_u8(x, vdupq_n_s8(static_cast<int8_t>(places))); }

inline uint8x16_t masked(uint8x16_t x, int mask) { return vandq_u8(x, vdupq_n_u8(static_cast<uint8_t>(mask))); }

// Bits of a step before they become signed weights; the same order as Weights.
struct Bits {
    uint8x16_t at[8][2];

    void set_nibbles(const packed::Nibbles& nibbles) {
        for (int j = 0; j < 4; ++j)
            for (int i = 0; i < 2; ++i) {
                const uint8x16_t pairs = vld1q_u8(nibbles[j][4 * i]);
                at[j][i] = masked(pairs, 15);
                at[4 + j][i] = vshrq_n_u8(pairs, 4);
            }
    }

    void set_two_bits(const packed::TwoBits& bits) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j)
            for (int i = 0; i < 2; ++i) at[j][i] = masked(shifted(vld1q_u8(bits[j / 4][4 * i]), -2 * (j % 4)), 3);
    }

    // Bit j of every byte is moved to bit kTo of at[j].
    template <int kTo>
    void add_bits(const packed::OneBit& bits) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j)
            for (int i = 0; i < 2; ++i)
                at[j][i] = vorrq_u8(at[j][i], masked(shifted(vld1q_u8(bits[4 * i]), kTo - j), 1 << kTo));
    }

    template <int kTo>
    void add_two_bits(const packed::TwoBits& bits) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j)
            for (int i = 0; i < 2; ++i) {
                const uint8x16_t fields = shifted(vld1q_u8(bits[j / 4][4 * i]), kTo - 2 * (j % 4));
                at[j][i] = vorrq_u8(at[j][i], masked(fields, 3 << kTo));
            }
    }

    void write(int offset, Weights& w) const {
        for (int j = 0; j < 8; ++j)
            for (int i = 0; i < 2; ++i)
                w[j][i] = vsubq_s8(vreinterpretq_s8_u8(at[j][i]), vdupq_n_s8(static_cast<int8_t>(offset)));
    }
};

// Four or five bits with an offset (kOffset > 0) or a minimum.
template <class PackedType, int kOffset, bool kHasHighBit>
struct Simple {
    using Packed = PackedType;
    using Scales = WholeScales;
    static constexpr int kSteps = 1, kParts = 1, kMaxWeight = (kHasHighBit ? 31 : 15) - (kOffset > 0 ? kOffset - 1 : 0);
    static constexpr bool kHasMin = kOffset == 0;

    static void unpack(const Packed& block, int, Weights& w) {
        Bits bits;
        bits.set_nibbles(block.nibbles);
        if constexpr (kHasHighBit) bits.template add_bits<4>(block.high);
        bits.write(kOffset, w);
    }
    static Scales scales(const Packed& block, int) {
        if constexpr (kHasMin) return {halves(block.d), halves(block.m)};
        else return {halves(block.d), {}};
    }
};

using Q4_0 = Simple<packed::Q4_0, 8, false>;
using Q4_1 = Simple<packed::Q4_1, 0, false>;
using Q5_0 = Simple<packed::Q5_0, 16, true>;
using Q5_1 = Simple<packed::Q5_1, 0, true>;

template <class PackedType, bool kHasHighBit>
struct SuperBlock {
    using Packed = PackedType;
    using Scales = WholeScales;
    static constexpr int kSteps = 8, kParts = 1, kMaxWeight = kHasHighBit ? 31 : 15;
    static constexpr bool kHasMin = true;

    static void unpack(const Packed& block, int s, Weights& w) {
        Bits bits;
        bits.set_nibbles(block.nibbles[s]);
        if constexpr (kHasHighBit) bits.template add_bits<4>(block.high[s]);
        bits.write(0, w);
    }
    static Scales scales(const Packed& block, int s) {
        return {product(halves(block.d), widened(vld1_u8(block.scale[s]))),
                product(negated(halves(block.dmin)), widened(vld1_u8(block.min[s])))};
    }
};

using Q4_K = SuperBlock<packed::Q4_K, false>;
using Q5_K = SuperBlock<packed::Q5_K, true>;

struct Q8_0 {
    using Packed = packed::Q8_0;
    using Scales = WholeScales;
    static constexpr int kSteps = 1, kParts = 1, kMaxWeight = 128;
    static constexpr bool kHasMin = false;

    static void unpack(const Packed& block, int, Weights& w) {
        for (int j = 0; j < 8; ++j)
            for (int i = 0; i < 2; ++i) w[j][i] = vld1q_s8(block.q[j][4 * i]);
    }
    static Scales scales(const Packed& block, int) { return {halves(block.d), {}}; }
};

struct IQ4_NL {
    using Packed = packed::Q4_0;
    using Scales = WholeScales;
    static constexpr int kSteps = 1, kParts = 1, kMaxWeight = 127;
    static constexpr bool kHasMin = false;

    static void unpack(const Packed& block, int, Weights& w) {
        static const int8_t kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
        const int8x16_t values = vld1q_s8(kValues);
        Bits bits;
        bits.set_nibbles(block.nibbles);
        for (int j = 0; j < 8; ++j)
            for (int i = 0; i < 2; ++i) w[j][i] = vqtbl1q_s8(values, bits.at[j][i]);
    }
    static Scales scales(const Packed& block, int) { return {halves(block.d), {}}; }
};

template <class Packed>
inline HalvedScales signed_scales(const Packed& block, int s) {
    return {halves(block.d), {}, {widened(vld1_s8(block.scale[2 * s])), widened(vld1_s8(block.scale[2 * s + 1]))}, {}};
}

struct Q6_K {
    using Packed = packed::Q6_K;
    using Scales = HalvedScales;
    static constexpr int kSteps = 8, kParts = 2, kMaxWeight = 32;
    static constexpr bool kHasMin = false;

    static void unpack(const Packed& block, int s, Weights& w) {
        Bits bits;
        bits.set_nibbles(block.nibbles[s]);
        bits.add_two_bits<4>(block.high[s]);
        bits.write(32, w);
    }
    static Scales scales(const Packed& block, int s) { return signed_scales(block, s); }
};

struct Q3_K {
    using Packed = packed::Q3_K;
    using Scales = HalvedScales;
    static constexpr int kSteps = 8, kParts = 2, kMaxWeight = 4;
    static constexpr bool kHasMin = false;

    static void unpack(const Packed& block, int s, Weights& w) {
        Bits bits;
        bits.set_two_bits(block.low[s]);
        bits.add_bits<2>(block.high[s]);
        bits.write(4, w);
    }
    static Scales scales(const Packed& block, int s) { return signed_scales(block, s); }
};

struct Q2_K {
    using Packed = packed::Q2_K;
    using Scales = HalvedScales;
    static constexpr int kSteps = 8, kParts = 2, kMaxWeight = 3;
    static constexpr bool kHasMin = true;

    static void unpack(const Packed& block, int s, Weights& w) {
        Bits bits;
        bits.set_two_bits(block.low[s]);
        bits.write(0, w);
    }
    static Scales scales(const Packed& block, int s) {
        Scales out{halves(block.d), negated(halves(block.dmin)), {}, {}};
        for (int half = 0; half < 2; ++half) {
            const uint8x8_t both = vld1_u8(block.scale_min[2 * s + half]);
            out.scale[half] = widened(vand_u8(both, vdup_n_u8(15)));
            out.min[half] = widened(vshr_n_u8(both, 4));
        }
        return out;
    }
};

}  // namespace
}  // namespace kvarn::neon
