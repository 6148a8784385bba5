// Sixteen floats of AVX-512, for the templates of ../shared. The end of a row is loaded and stored under a mask.
#pragma once
#include <immintrin.h>

#include "../shared/lanes.h"

namespace kvarn::avx512 {
namespace {

using shared::First;
using shared::Whole;

struct Lanes {
    using Floats = __m512;
    static constexpr int kWidth = 16;

    static Floats set(float x) { return _mm512_set1_ps(x); }
    static Floats load(const float* at) { return _mm512_loadu_ps(at); }
    static Floats load(const uint16_t* at) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
    }
    static Floats load(const int8_t* at) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
    }
    template <class Value>
    static Floats load(const Value* at, Whole) {
        return load(at);
    }
    static Floats load(const float* at, First first) { return _mm512_maskz_loadu_ps(mask(first), at); }
    static Floats load(const uint16_t* at, First first) {
        return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask(first), at));
    }
    static Floats load(const int8_t* at, First first) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask(first), at)));
    }
    static void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
    static void store(float* to, Floats x, Whole) { _mm512_storeu_ps(to, x); }
    static void store(float* to, Floats x, First first) { _mm512_mask_storeu_ps(to, mask(first), x); }

    static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
    static Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
    static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
    static Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
    static Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static Floats fnma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
    static Floats negate(Floats x) { return _mm512_xor_ps(x, set(-0.0f)); }
    static Floats absolute(Floats x) { return _mm512_andnot_ps(set(-0.0f), x); }
    static Floats copy_sign(Floats magnitude, Floats x) {
        return _mm512_or_ps(magnitude, _mm512_and_ps(set(-0.0f), x));
    }
    static Floats choose_greater(Floats a, Floats b, Floats yes, Floats no) {
        return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), no, yes);
    }

    struct WholeNumbers {
        Floats floats;
    };
    static WholeNumbers nearest_whole(Floats x) { return {_mm512_roundscale_ps(x, 0)}; }
    static Floats times_power_of_two(Floats x, WholeNumbers n) { return _mm512_scalef_ps(x, n.floats); }

    // Sixteen lanes by halves.
    static float sum_lanes(Floats x) {
        const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
        __m128 sum = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
        return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
    }
    static void accumulate(Floats& sum, Floats x) { sum = add(sum, x); }
    static float max_lanes(Floats x) { return _mm512_reduce_max_ps(x); }

    // Attention. Registers are plenty: the same tile for any number of heads.
    static constexpr int kMaxHeads = 6;
    static constexpr bool kLoadsWholeTile = true;
    static constexpr int key_blocks(int, bool) { return 4; }
    static constexpr int value_vectors(int) { return 4; }
    static Floats set_half(uint16_t half) { return set(_cvtsh_ss(half)); }
    static Floats hide_outside(Floats x, int first, int last) {
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __mmask16 is_visible = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(first)) &
                                     _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(last));
        return _mm512_mask_mov_ps(set(-__builtin_inff()), is_visible, x);
    }
    static Floats running_max(Floats max, Floats x) { return _mm512_max_ps(max, x); }

    static __mmask16 mask(First first) { return static_cast<__mmask16>((1u << first.count) - 1); }
};

}  // namespace
}  // namespace kvarn::avx512
