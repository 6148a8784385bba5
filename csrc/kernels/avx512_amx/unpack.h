// Packed weights to tiles of bf16 that are the second operand of a product: [16 pairs of columns][16 rows][2].
#pragma once
#include "../avx512_vnni/formats.h"
#include "shape.h"

namespace kvarn::avx512_amx {
namespace {

using avx512_vnni::Sixteen;

// Two even or two odd columns of eight rows, as floats: which bytes of a vector of 16 rows x 4 columns.
struct PairBytes {
    alignas(64) uint8_t at[2][2][64];  // by even and odd columns, half of the rows
};

constexpr PairBytes make_pair_bytes() {
    PairBytes bytes{};
    for (int pair = 0; pair < 2; ++pair)
        for (int half = 0; half < 2; ++half)
            for (int i = 0; i < 16; ++i)
                bytes.at[pair][half][4 * i] = static_cast<uint8_t>(4 * (8 * half + i / 2) + pair + 2 * (i % 2));
    return bytes;
}

constexpr PairBytes kPairBytes = make_pair_bytes();

// Scales or minima of 16 rows, each twice: those of the first and of the last eight rows.
struct Doubled {
    __m512 half[2];
    explicit Doubled(__m512 x) {
        const __m512i first = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
        half[0] = _mm512_permutexvar_ps(first, x);
        half[1] = _mm512_permutexvar_ps(_mm512_add_epi32(first, _mm512_set1_epi32(8)), x);
    }
};

// Bytes of [16 rows][4 columns], scaled, to two rows of a tile: [16 rows][2 even columns], and behind all even columns
// of the step [16 rows][2 odd columns].
[[gnu::always_inline]] inline void unpack_four_columns(__m512i bytes, const Doubled& scale, const Doubled& min,
                                                       uint16_t* to) {
    constexpr __mmask64 kFirstOfFour = 0x1111111111111111;
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
        __m512 values[2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const __m512i which = _mm512_load_si512(kPairBytes.at[pair][half]);
            const __m512 q = _mm512_cvtepi32_ps(_mm512_maskz_permutexvar_epi8(kFirstOfFour, which, bytes));
            values[half] = _mm512_fmadd_ps(q, scale.half[half], min.half[half]);
        }
        const __m512bh rounded = _mm512_cvtne2ps_pbh(values[1], values[0]);
        _mm512_store_si512(to + kTileValues / 2 * pair, reinterpret_cast<__m512i>(rounded));
    }
}

// One step of 16 rows, a group of eight from each of a and b, as a tile of weights.
template <class Format>
[[gnu::always_inline]] inline void unpack_tile(const typename Format::Packed& a, const typename Format::Packed& b,
                                               int step, uint16_t* to) {
    constexpr int kParts = Format::kParts, kVectors = 8 / kParts;
    __m512i w[8];
    Format::template unpack<Sixteen>(a, b, step, w);
    const auto factors = avx512_vnni::factors_of<Sixteen>(a, b);
    const auto scales = Format::template scales<Sixteen>(a, b, step, factors);
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
        // The offset is a whole number of few bits, so the product is exact and the fma rounds as if it were
        // subtracted.
        const __m512 min =
            Format::kHasMin ? scales.min[part] : _mm512_mul_ps(scales.scale[part], _mm512_set1_ps(-Format::kOffset));
        const Doubled doubled_scale(scales.scale[part]), doubled_min(min);
#pragma GCC unroll 8
        for (int j = part * kVectors; j < (part + 1) * kVectors; ++j)
            unpack_four_columns(w[j], doubled_scale, doubled_min, to + 2 * kTileRows * j);
    }
}

}  // namespace
}  // namespace kvarn::avx512_amx
