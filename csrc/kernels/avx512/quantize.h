// Activations to int8, four blocks at a time: what is found of a block as a whole (its largest magnitude, its best
// level and its sums) then costs a fourth of the shuffles, and the waits of one block are filled by the others.
//
// Vectors of four levels and four blocks have a level in each 128 bits and a block in each float of those.
#pragma once
#include "../shared/lanes.h"

#include <immintrin.h>

namespace kvarn::avx512 {
namespace {

constexpr float kSmallestAbsmax = 1e-36f;  // 127 / absmax stays finite
constexpr int kInfinityBits = 0x7f800000;
constexpr int kBlocksAtOnce = 4;

// Where the quants of one row go: the next block of it lies n blocks behind.
struct QuantizedRow {
    int8_t* q;
    float* scale;
    float* sum;
    int32_t* minus_sums;
    size_t n;

    void skip_block() {
        q += n * kQuantBlock;
        scale += n;
        sum += n;
        minus_sums += 2 * n;
    }
};

inline __m512i lanes(int a, int b, int c, int d) {
    return _mm512_setr_epi32(a, b, c, d, a, b, c, d, a, b, c, d, a, b, c, d);
}

template <class Combine>
inline __m512i combine_halves(__m512i a, __m512i b, Combine combine) {
    return combine(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

// Largest magnitudes of four blocks as bits, for every level; magnitudes order like integers, NaN above infinity above
// all numbers.
inline __m512i largest_magnitudes(const __m512 x[kBlocksAtOnce][2]) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    auto max = [](__m512i a, __m512i b) { return _mm512_max_epi32(a, b); };
    __m512i largest[kBlocksAtOnce];
    for (int j = 0; j < kBlocksAtOnce; ++j)
        largest[j] = max(_mm512_and_si512(_mm512_castps_si512(x[j][0]), magnitude),
                         _mm512_and_si512(_mm512_castps_si512(x[j][1]), magnitude));
    const __m512i fours =
        combine_halves(combine_halves(largest[0], largest[1], max), combine_halves(largest[2], largest[3], max), max);
    const __m512i pairs = max(fours, _mm512_shuffle_epi32(fours, _MM_PERM_BADC));
    return _mm512_permutexvar_epi32(lanes(0, 4, 8, 12), max(pairs, _mm512_shuffle_epi32(pairs, _MM_PERM_CDAB)));
}

// Squared distances of x * s from whole numbers, added over i mod 8, for two s at once: one in each half of factors.
inline __m512 rounding_errors(const float* x, __m512 factors) {
    __m512 sum;
    for (int i = 0; i < kQuantBlock; i += 8) {
        const __m512 scaled = _mm512_mul_ps(_mm512_broadcast_f32x8(_mm256_loadu_ps(x + i)), factors);
        const __m512 error = _mm512_sub_ps(scaled, _mm512_roundscale_ps(scaled, 0));
        const __m512 square = _mm512_mul_ps(error, error);
        sum = i == 0 ? square : _mm512_add_ps(sum, square);
    }
    return sum;
}

// The rounding errors of one of the blocks with all four levels: in every 128 bits lanes 0 + 4, 1 + 5, ... of one
// level.
template <int kBlock>
[[gnu::always_inline]] inline __m512 errors_of_block(const float* x, __m512 factors) {
    auto two = [&](int level) {
        const int a = 4 * level + kBlock, b = a + 4;
        return _mm512_permutexvar_ps(_mm512_setr_epi32(a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b), factors);
    };
    const __m512 first = rounding_errors(x, two(0)), last = rounding_errors(x, two(2));
    return _mm512_add_ps(_mm512_shuffle_f32x4(first, last, 0x88), _mm512_shuffle_f32x4(first, last, 0xdd));
}

// By halves: lanes 0 + 2 and 1 + 3 of every 128 bits, then both.
inline __m512 sum_each(const __m512 fours[kBlocksAtOnce]) {
    auto pairs = [](__m512 a, __m512 b) {
        return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    };
    const __m512 low = pairs(fours[0], fours[1]), high = pairs(fours[2], fours[3]);
    return _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x88), _mm512_shuffle_ps(low, high, 0xdd));
}

// Where each block has the least error, as indices of a vector of levels and blocks; the first of equals. NaN is never
// less.
inline __m512i best_levels(__m512 errors) {
    __m128 least = _mm512_castps512_ps128(errors);
    __m128i best = _mm_setr_epi32(0, 1, 2, 3);
    auto look_at = [&](__m128 error, int level) {
        const __mmask8 is_less = _mm_cmp_ps_mask(error, least, _CMP_LT_OQ);
        least = _mm_mask_mov_ps(least, is_less, error);
        best = _mm_mask_mov_epi32(best, is_less, _mm_add_epi32(_mm_setr_epi32(0, 1, 2, 3), _mm_set1_epi32(4 * level)));
    };
    look_at(_mm512_extractf32x4_ps(errors, 1), 1);
    look_at(_mm512_extractf32x4_ps(errors, 2), 2);
    look_at(_mm512_extractf32x4_ps(errors, 3), 3);
    return _mm512_castsi128_si512(best);
}

// The quants of two blocks, one behind the other.
inline __m512i round_to_int8(const __m512 x[2][2], __m512 first_factor, __m512 last_factor) {
    auto words = [](const __m512 block[2], __m512 factor) {
        return _mm512_packs_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(block[0], factor)),
                                  _mm512_cvtps_epi32(_mm512_mul_ps(block[1], factor)));
    };
    const __m512i mixed = _mm512_packs_epi16(words(x[0], first_factor), words(x[1], last_factor));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_max_epi8(_mm512_permutexvar_epi32(order, mixed), _mm512_set1_epi8(-127));
}

// Minus the sums of 16 quants each, of four blocks in two vectors: 128 bits are half a block, [0] and [1] of them one
// of the first vector, [2] and [3] one of the second.
inline __m512i minus_sums(__m512i first, __m512i last) {
    auto fours = [](__m512i q) {
        return _mm512_castsi512_ps(
            _mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_set1_epi8(1), q), _mm512_set1_epi16(-1)));
    };
    const __m512 a = fours(first), b = fours(last);
    const __m512i eights = _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88)),
                                            _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd)));
    return _mm512_add_epi32(eights, _mm512_shuffle_epi32(eights, _MM_PERM_CDAB));
}

// A block without values, or with NaN or infinity: q = 0, and scale 0 or NaN, so that every output it reaches is NaN.
inline void store_empty(int largest_bits, const QuantizedRow& to) {
    const float scale = largest_bits >= kInfinityBits ? __builtin_nanf("") : 0.0f;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to.q), _mm256_setzero_si256());
    to.scale[0] = to.sum[0] = scale;
    to.minus_sums[0] = to.minus_sums[1] = 0;
}

// Stores kBlocks of four blocks, the quants of two in each vector, and goes on behind them.
template <int kBlocks>
[[gnu::always_inline]] inline void store_blocks(__m512i first, __m512i last, __m128 d, QuantizedRow& to) {
    const __m512i halves = minus_sums(first, last);
    auto pick = [&](int a, int b, int c, int e) {
        return _mm512_castsi512_si128(_mm512_permutexvar_epi32(lanes(a, b, c, e), halves));
    };
    const __m128i minus_first = pick(0, 8, 2, 10), minus_last = pick(4, 12, 6, 14);
    const __m128i total = _mm_sub_epi32(_mm_setzero_si128(), _mm_add_epi32(minus_first, minus_last));
    alignas(64) int8_t q[kBlocksAtOnce][kQuantBlock];
    alignas(16) int32_t minus[kBlocksAtOnce][2];
    alignas(16) float scale[kBlocksAtOnce], sum[kBlocksAtOnce];
    _mm512_store_si512(q[0], first);
    _mm512_store_si512(q[2], last);
    _mm_store_si128(reinterpret_cast<__m128i*>(minus[0]), _mm_unpacklo_epi32(minus_first, minus_last));
    _mm_store_si128(reinterpret_cast<__m128i*>(minus[2]), _mm_unpackhi_epi32(minus_first, minus_last));
    _mm_store_ps(scale, d);
    _mm_store_ps(sum, _mm_mul_ps(d, _mm_cvtepi32_ps(total)));
#pragma GCC unroll 1
    for (int j = 0; j < kBlocks; ++j, to.skip_block()) {
        __builtin_memcpy(to.q, q[j], kQuantBlock);
        __builtin_memcpy(to.minus_sums, minus[j], sizeof minus[j]);
        *to.scale = scale[j];
        *to.sum = sum[j];
    }
}

[[gnu::noinline]] void quantize_one_by_one(const float* x, int count, QuantizedRow& to);

// kBlocks of the four lanes of blocks are meant, the others repeat them.
template <int kBlocks>
[[gnu::always_inline]] inline void quantize_blocks(const float* x, QuantizedRow& to) {
    __m512 values[kBlocksAtOnce][2], errors[kBlocksAtOnce], factor[kBlocksAtOnce];
    for (int j = 0; j < kBlocksAtOnce; ++j)
        for (int i = 0; i < 2; ++i) values[j][i] = _mm512_loadu_ps(x + j % kBlocks * kQuantBlock + 16 * i);
    const __m512i bits = largest_magnitudes(values);
    const __m512 absmax = _mm512_castsi512_ps(bits);
    const __mmask16 is_usual = _mm512_cmp_ps_mask(absmax, _mm512_set1_ps(kSmallestAbsmax), _CMP_GE_OQ) &
                               _mm512_cmplt_epi32_mask(bits, _mm512_set1_epi32(kInfinityBits));
    if (is_usual != 0xffff) {
        if constexpr (kBlocks > 1) return quantize_one_by_one(x, kBlocks, to);
        store_empty(_mm512_cvtsi512_si32(bits), to);
        return to.skip_block();
    }
    const __m512 levels =
        _mm512_setr_ps(127, 127, 127, 127, 126, 126, 126, 126, 125, 125, 125, 125, 124, 124, 124, 124);
    const __m512 steps = _mm512_div_ps(absmax, levels), factors = _mm512_div_ps(levels, absmax);
    errors[0] = errors_of_block<0>(x, factors);
    errors[1] = kBlocks > 1 ? errors_of_block<1>(x + kQuantBlock, factors) : errors[0];
    errors[2] = kBlocks > 2 ? errors_of_block<2>(x + 2 * kQuantBlock, factors) : errors[0];
    errors[3] = kBlocks > 2 ? errors_of_block<3>(x + 3 * kQuantBlock, factors) : errors[1];
    const __m512i best = best_levels(_mm512_mul_ps(sum_each(errors), _mm512_mul_ps(steps, steps)));
    const __m512 best_factors = _mm512_permutexvar_ps(best, factors);
    for (int j = 0; j < kBlocksAtOnce; ++j)
        factor[j] = _mm512_permutexvar_ps(_mm512_set1_epi32(j % kBlocks), best_factors);
    const __m512i first = round_to_int8(values, factor[0], factor[1]);
    const __m512i last = kBlocks > 2 ? round_to_int8(values + 2, factor[2], factor[3]) : first;
    store_blocks<kBlocks>(first, last, _mm512_castps512_ps128(_mm512_permutexvar_ps(best, steps)), to);
}

void quantize_one_by_one(const float* x, int count, QuantizedRow& to) {
    for (int j = 0; j < count; ++j) quantize_blocks<1>(x + j * kQuantBlock, to);
}

void quantize_row(const float* x, int k, int t, int n, int8_t* q, float* scale, float* sum,
                  int32_t* minus_sums) noexcept {
    QuantizedRow to{q + t * kQuantBlock, scale + t, sum + t, minus_sums + 2 * t, static_cast<size_t>(n)};
    const int blocks = k / kQuantBlock;
    int b = 0;
    for (; b + kBlocksAtOnce <= blocks; b += kBlocksAtOnce) quantize_blocks<kBlocksAtOnce>(x + b * kQuantBlock, to);
    for (; b + 2 <= blocks; b += 2) quantize_blocks<2>(x + b * kQuantBlock, to);
    if (b < blocks) quantize_blocks<1>(x + b * kQuantBlock, to);
}

}  // namespace
}  // namespace kvarn::avx512
