// Types whose weights are nibbles, for one token: a tile of weights is made of look-ups in tables, one of 16 values for
// each row and step, which takes half of the instructions of unpack_tile. There a row of the tile is a row of the
// weights, so the token is the other operand; the arithmetic is the same.
#pragma once
#include "../avx512_vnni/formats.h"
#include "shape.h"

namespace kvarn::avx512_amx {
namespace {

using avx512_vnni::Sixteen;

template <class Format>
struct NibbleValues {
    static constexpr bool kExist = false;
};

struct WholeNumbers {
    static constexpr bool kExist = true;
    static __m512 values() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
};

template <>
struct NibbleValues<avx512_vnni::Q4_0> : WholeNumbers {};
template <>
struct NibbleValues<avx512_vnni::Q4_1> : WholeNumbers {};
template <>
struct NibbleValues<avx512_vnni::Q4_K> : WholeNumbers {};
template <>
struct NibbleValues<avx512_vnni::IQ4_NL> {
    static constexpr bool kExist = true;
    static __m512 values() {
        return _mm512_setr_ps(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113);
    }
};

template <class Packed>
const packed::Nibbles& nibbles_of(const Packed& block, int) {
    return block.nibbles;
}
inline const packed::Nibbles& nibbles_of(const packed::Q4_K& block, int step) { return block.nibbles[step]; }

// A step of 16 rows, ready for look-ups.
struct NibbleRows {
    alignas(64) uint8_t nibbles[kTileRows][16];
    alignas(64) float scale[kTileRows], min[kTileRows];
};

// From four words of each row, one after the other, to the rows.
inline void gather_rows(const packed::Nibbles& nibbles, uint8_t (*rows)[16]) {
    const __m512i first = _mm512_loadu_si512(nibbles[0]), second = _mm512_loadu_si512(nibbles[2]);
    const __m512i low = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(4));
    _mm512_store_si512(rows[0], _mm512_permutex2var_epi32(first, low, second));
    _mm512_store_si512(rows[4], _mm512_permutex2var_epi32(first, high, second));
}

template <class Format>
[[gnu::always_inline]] inline void gather_step(const typename Format::Packed& a, const typename Format::Packed& b,
                                               int step, NibbleRows& to) {
    gather_rows(nibbles_of(a, step), to.nibbles);
    gather_rows(nibbles_of(b, step), to.nibbles + kLanes);
    const auto factors = avx512_vnni::factors_of<Sixteen>(a, b);
    const auto scales = Format::template scales<Sixteen>(a, b, step, factors);
    _mm512_store_ps(to.scale, scales.scale[0]);
    if constexpr (Format::kHasMin) _mm512_store_ps(to.min, scales.min[0]);
}

template <class Format>
[[gnu::always_inline]] inline __m512 values_of_row(const NibbleRows& rows, int row) {
    const __m512 values = NibbleValues<Format>::values(), scale = _mm512_set1_ps(rows.scale[row]);
    if constexpr (Format::kHasMin) return _mm512_fmadd_ps(values, scale, _mm512_set1_ps(rows.min[row]));
    else return _mm512_mul_ps(values, scale);
}

// [16 rows][32 columns], the even columns first. A table holds the values of two rows; of a row's 16 bytes each word
// has nibbles of two even columns and two odd ones, which is the order the words come in when shifted by 0, 4, 8, 12.
template <class Format>
[[gnu::always_inline]] inline void look_up_tile(const NibbleRows& rows, uint16_t* to) {
    const __m512i places =
        _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set_m128i(_mm_set1_epi16(4), _mm_set1_epi16(0))),
                           _mm256_set_m128i(_mm_set1_epi16(12), _mm_set1_epi16(8)), 1);
    const __m512i nibble = _mm512_set1_epi16(15), second_row = _mm512_set1_epi16(16);
#pragma GCC unroll 8
    for (int row = 0; row < kTileRows; row += 2) {
        const __m512bh table =
            _mm512_cvtne2ps_pbh(values_of_row<Format>(rows, row + 1), values_of_row<Format>(rows, row));
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(rows.nibbles[row + i]));
            __m512i index = _mm512_srlv_epi16(_mm512_broadcast_i32x4(bytes), places);
            index = i == 0 ? _mm512_and_si512(index, nibble)
                           : _mm512_ternarylogic_epi32(index, nibble, second_row, 0xea);  // (a & b) | c
            _mm512_store_si512(to + kTileColumns * (row + i),
                               _mm512_permutexvar_epi16(index, reinterpret_cast<__m512i>(table)));
        }
    }
}

}  // namespace
}  // namespace kvarn::avx512_amx
