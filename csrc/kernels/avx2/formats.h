// How each packed type turns a step of 8 rows x 32 columns into eight vectors of bytes and its scales.
// Vector j of a step holds columns 4j .. 4j + 3 of row 0, then of row 1, up to row 7.
#pragma once
#include <immintrin.h>

#include "../table.h"

namespace kvarn::avx2 {
namespace {

inline __m256i load32(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
inline __m128i load16(const void* at) { return _mm_loadu_si128(static_cast<const __m128i*>(at)); }
inline __m128i load8(const void* at) { return _mm_loadl_epi64(static_cast<const __m128i*>(at)); }

inline __m256 halves(const uint16_t* at) { return _mm256_cvtph_ps(load16(at)); }
inline __m256 bytes_to_floats(const uint8_t* at) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load8(at))); }

// Shifts move bits between bytes; the mask drops those.
template <int kShift>
inline __m256i bits_down(__m256i x, int mask) {
    return _mm256_and_si256(_mm256_srli_epi16(x, kShift), _mm256_set1_epi8(static_cast<char>(mask)));
}

inline void unpack_nibbles(const packed::Nibbles& nibbles, __m256i w[8]) {
    for (int j = 0; j < 4; ++j) {
        const __m256i pairs = load32(nibbles[j]);
        w[j] = bits_down<0>(pairs, 15);
        w[4 + j] = bits_down<4>(pairs, 15);
    }
}

// Shift left by `places`, right if negative. Constant after inlining.
inline __m256i shifted(__m256i x, int places) {
    return places >= 0 ? _mm256_slli_epi16(x, places) : _mm256_srli_epi16(x, -places);
}

// w[j] |= bit j of every byte, moved to bit kTo.
template <int kTo>
inline void add_bits(const packed::OneBit& bits, __m256i w[8]) {
    const __m256i all = load32(bits), mask = _mm256_set1_epi8(1 << kTo);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) w[j] = _mm256_or_si256(w[j], _mm256_and_si256(shifted(all, kTo - j), mask));
}

// w[4i + j] |= bits 2j..2j+1 of the bytes of field i, moved to bit kTo.
template <int kTo>
inline void add_two_bits(const packed::TwoBits& bits, __m256i w[8]) {
    const __m256i mask = _mm256_set1_epi8(3 << kTo);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
        const __m256i fields = shifted(load32(bits[j / 4]), kTo - 2 * (j % 4));
        w[j] = _mm256_or_si256(w[j], _mm256_and_si256(fields, mask));
    }
}

inline void unpack_two_bits(const packed::TwoBits& bits, __m256i w[8]) {
    for (int i = 0; i < 2; ++i) {
        const __m256i fields = load32(bits[i]);
        w[4 * i] = bits_down<0>(fields, 3);
        w[4 * i + 1] = bits_down<2>(fields, 3);
        w[4 * i + 2] = bits_down<4>(fields, 3);
        w[4 * i + 3] = bits_down<6>(fields, 3);
    }
}

// Unsigned weights: W = d * w + m, both per row and step. kSplit: 5-bit sums need two int16 accumulators.
struct AffineScales {
    __m256 d, m;
};

struct Q4_0 {
    using Packed = packed::Q4_0;
    static constexpr int kSteps = 1;
    static constexpr bool kSplit = false;
    static void unpack(const Packed& in, int, __m256i w[8]) { unpack_nibbles(in.nibbles, w); }
    static AffineScales scales(const Packed& in, int) {
        const __m256 d = halves(in.d);
        return {d, _mm256_mul_ps(d, _mm256_set1_ps(-8.0f))};
    }
};

struct Q4_1 {
    using Packed = packed::Q4_1;
    static constexpr int kSteps = 1;
    static constexpr bool kSplit = false;
    static void unpack(const Packed& in, int, __m256i w[8]) { unpack_nibbles(in.nibbles, w); }
    static AffineScales scales(const Packed& in, int) { return {halves(in.d), halves(in.m)}; }
};

struct Q5_0 {
    using Packed = packed::Q5_0;
    static constexpr int kSteps = 1;
    static constexpr bool kSplit = true;
    static void unpack(const Packed& in, int, __m256i w[8]) {
        unpack_nibbles(in.nibbles, w);
        add_bits<4>(in.high, w);
    }
    static AffineScales scales(const Packed& in, int) {
        const __m256 d = halves(in.d);
        return {d, _mm256_mul_ps(d, _mm256_set1_ps(-16.0f))};
    }
};

struct Q5_1 {
    using Packed = packed::Q5_1;
    static constexpr int kSteps = 1;
    static constexpr bool kSplit = true;
    static void unpack(const Packed& in, int, __m256i w[8]) {
        unpack_nibbles(in.nibbles, w);
        add_bits<4>(in.high, w);
    }
    static AffineScales scales(const Packed& in, int) { return {halves(in.d), halves(in.m)}; }
};

template <class PackedK>
inline AffineScales super_block_scales(const PackedK& in, int s) {
    const __m256 min = _mm256_mul_ps(halves(in.dmin), bytes_to_floats(in.min[s]));
    return {_mm256_mul_ps(halves(in.d), bytes_to_floats(in.scale[s])), _mm256_xor_ps(min, _mm256_set1_ps(-0.0f))};
}

struct Q4_K {
    using Packed = packed::Q4_K;
    static constexpr int kSteps = 8;
    static constexpr bool kSplit = false;
    static void unpack(const Packed& in, int s, __m256i w[8]) { unpack_nibbles(in.nibbles[s], w); }
    static AffineScales scales(const Packed& in, int s) { return super_block_scales(in, s); }
};

struct Q5_K {
    using Packed = packed::Q5_K;
    static constexpr int kSteps = 8;
    static constexpr bool kSplit = true;
    static void unpack(const Packed& in, int s, __m256i w[8]) {
        unpack_nibbles(in.nibbles[s], w);
        add_bits<4>(in.high[s], w);
    }
    static AffineScales scales(const Packed& in, int s) { return super_block_scales(in, s); }
};

// Signed weights: W = d * w.
struct Q8_0 {
    using Packed = packed::Q8_0;
    static constexpr int kSteps = 1;
    static void unpack(const Packed& in, int, __m256i w[8]) {
        for (int j = 0; j < 8; ++j) w[j] = load32(in.q[j]);
    }
    static __m256 scales(const Packed& in, int) { return halves(in.d); }
};

struct IQ4_NL {
    using Packed = packed::Q4_0;
    static constexpr int kSteps = 1;
    static void unpack(const Packed& in, int, __m256i w[8]) {
        const __m256i values = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113));
        unpack_nibbles(in.nibbles, w);
        for (int j = 0; j < 8; ++j) w[j] = _mm256_shuffle_epi8(values, w[j]);
    }
    static __m256 scales(const Packed& in, int) { return halves(in.d); }
};

// Sub-blocks of 16: W = d * scale[half] * (w - kOffset) - dmin * min[half], scale and min small integers.
// A row's int16 pair holds its scale twice, to meet the two partial sums of maddubs in one madd.
struct HalvedScales {
    __m256 d, minus_dmin;
    __m256i scale_i16x16[2], min_i16x16[2];
};

inline __m256i doubled(__m128i i16x8) {
    return _mm256_set_m128i(_mm_unpackhi_epi16(i16x8, i16x8), _mm_unpacklo_epi16(i16x8, i16x8));
}

inline HalvedScales signed_scales(const uint16_t* d, const int8_t (*scale)[8]) {
    const __m256i zero = _mm256_setzero_si256();
    return {halves(d),
            _mm256_setzero_ps(),
            {doubled(_mm_cvtepi8_epi16(load8(scale[0]))), doubled(_mm_cvtepi8_epi16(load8(scale[1])))},
            {zero, zero}};
}

struct Q6_K {
    using Packed = packed::Q6_K;
    static constexpr int kSteps = 8;
    static constexpr int kOffset = 32;
    static constexpr bool kHasMin = false;
    static void unpack(const Packed& in, int s, __m256i w[8]) {
        unpack_nibbles(in.nibbles[s], w);
        add_two_bits<4>(in.high[s], w);
    }
    static HalvedScales scales(const Packed& in, int s) { return signed_scales(in.d, in.scale + 2 * s); }
};

struct Q3_K {
    using Packed = packed::Q3_K;
    static constexpr int kSteps = 8;
    static constexpr int kOffset = 4;
    static constexpr bool kHasMin = false;
    static void unpack(const Packed& in, int s, __m256i w[8]) {
        unpack_two_bits(in.low[s], w);
        add_bits<2>(in.high[s], w);
    }
    static HalvedScales scales(const Packed& in, int s) { return signed_scales(in.d, in.scale + 2 * s); }
};

struct Q2_K {
    using Packed = packed::Q2_K;
    static constexpr int kSteps = 8;
    static constexpr int kOffset = 0;
    static constexpr bool kHasMin = true;
    static void unpack(const Packed& in, int s, __m256i w[8]) { unpack_two_bits(in.low[s], w); }
    static HalvedScales scales(const Packed& in, int s) {
        HalvedScales out;
        out.d = halves(in.d);
        out.minus_dmin = _mm256_xor_ps(halves(in.dmin), _mm256_set1_ps(-0.0f));
        for (int half = 0; half < 2; ++half) {
            const __m128i both = _mm_cvtepu8_epi16(load8(in.scale_min[2 * s + half]));
            out.scale_i16x16[half] = doubled(_mm_and_si128(both, _mm_set1_epi16(15)));
            out.min_i16x16[half] = doubled(_mm_srli_epi16(both, 4));
        }
        return out;
    }
};

}  // namespace
}  // namespace kvarn::avx2
