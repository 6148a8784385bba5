// exp and tanh of sixteen floats, sums in a fixed order, masks. The polynomials are those of the AVX2 folder, so that
// single results have the same bits.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace kvarn::avx512 {

static inline __m512 set(float x) { return _mm512_set1_ps(x); }

// exp(x) = 2^n exp(r), |r| <= ln(2) / 2. scalef applies 2^n with one rounding, down to subnormals. NaN stays NaN: max
// and min return their second operand then.
static inline __m512 exp_f32x16(__m512 x) {
    x = _mm512_min_ps(set(89.0f), _mm512_max_ps(set(-104.0f), x));
    const __m512 turns = _mm512_roundscale_ps(_mm512_mul_ps(x, set(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(turns, set(0.693145752f), x);  // ln 2 in two parts, the first exact times n
    r = _mm512_fnmadd_ps(turns, set(1.42860677e-6f), r);
    __m512 p = set(1.395060099e-3f);
    p = _mm512_fmadd_ps(p, r, set(8.368953131e-3f));
    p = _mm512_fmadd_ps(p, r, set(4.166620597e-2f));
    p = _mm512_fmadd_ps(p, r, set(1.666651815e-1f));
    p = _mm512_fmadd_ps(p, r, set(0.5f));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), set(1.0f));
    return _mm512_scalef_ps(p, turns);
}

// Odd polynomial below 0.625, 1 - 2 / (exp(2|x|) + 1) above.
static inline __m512 tanh_f32x16(__m512 x) {
    const __m512 sign_bit = set(-0.0f);
    const __m512 magnitude = _mm512_andnot_ps(sign_bit, x);
    const __m512 square = _mm512_mul_ps(x, x);
    __m512 p = set(-5.717045162e-3f);
    p = _mm512_fmadd_ps(p, square, set(2.065058798e-2f));
    p = _mm512_fmadd_ps(p, square, set(-5.374349654e-2f));
    p = _mm512_fmadd_ps(p, square, set(1.333149076e-1f));
    p = _mm512_fmadd_ps(p, square, set(-3.333328366e-1f));
    const __m512 small = _mm512_fmadd_ps(_mm512_mul_ps(p, square), x, x);
    const __m512 e = exp_f32x16(_mm512_add_ps(magnitude, magnitude));
    const __m512 rest = _mm512_div_ps(set(2.0f), _mm512_add_ps(e, set(1.0f)));
    const __m512 large = _mm512_or_ps(_mm512_sub_ps(set(1.0f), rest), _mm512_and_ps(sign_bit, x));
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(magnitude, set(0.625f), _CMP_GT_OQ), small, large);
}

// Sixteen lanes by halves.
static inline float sum_lanes(__m512 x) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

// Lanes [first, last); both may lie outside 0 .. 16.
static inline __mmask16 lanes_between(int first, int last) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(first)) &
           _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(last));
}

}  // namespace kvarn::avx512
