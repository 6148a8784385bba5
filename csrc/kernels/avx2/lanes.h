// Eight floats of AVX2 with FMA and F16C, for the templates of ../shared.
#pragma once
#include <immintrin.h>

#include "../shared/lanes.h"

namespace kvarn::avx2 {
namespace {

using shared::First;
using shared::Whole;

struct Lanes : shared::SmallRegisterTiles {
    using Floats = __m256;
    static constexpr int kWidth = 8;

    static Floats set(float x) { return _mm256_set1_ps(x); }
    static Floats load(const float* at) { return _mm256_loadu_ps(at); }
    static Floats load(const uint16_t* at) { return _mm256_cvtph_ps(load16(at)); }
    static Floats load(const int8_t* at) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
    }
    static Floats load_bf16(const uint16_t* at) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(at)), 16));
    }
    template <class Value>
    static Floats load(const Value* at, Whole) {
        return load(at);
    }
    static Floats load(const float* at, First first) { return _mm256_maskload_ps(at, mask(first)); }
    template <class Value>
    static Floats load(const Value* at, First first) {
        Value lanes[kWidth] = {};
        for (int i = 0; i < first.count; ++i) lanes[i] = at[i];
        return load(lanes);
    }
    static void store(float* to, Floats x) { _mm256_storeu_ps(to, x); }
    static void store(float* to, Floats x, Whole) { _mm256_storeu_ps(to, x); }
    static void store(float* to, Floats x, First first) { _mm256_maskstore_ps(to, mask(first), x); }
    static Floats keep(Floats x, Whole) { return x; }
    static Floats keep(Floats x, First first) { return _mm256_and_ps(x, _mm256_castsi256_ps(mask(first))); }

    static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
    static Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
    static Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
    static Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
    static Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static Floats fnma(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
    static Floats negate(Floats x) { return _mm256_xor_ps(x, set(-0.0f)); }
    static Floats absolute(Floats x) { return _mm256_andnot_ps(set(-0.0f), x); }
    static Floats copy_sign(Floats magnitude, Floats x) {
        return _mm256_or_ps(magnitude, _mm256_and_ps(set(-0.0f), x));
    }
    static Floats choose_greater(Floats a, Floats b, Floats yes, Floats no) {
        return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_GT_OQ));
    }
    static Floats choose_negative(Floats x, Floats yes, Floats no) { return _mm256_blendv_ps(no, yes, x); }
    static Floats where_positive(Floats condition, Floats x) {
        return _mm256_and_ps(x, _mm256_cmp_ps(condition, _mm256_setzero_ps(), _CMP_GT_OQ));
    }
    static float square_root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

    struct WholeNumbers {
        Floats floats;
        __m256i ints;
    };
    static WholeNumbers nearest_whole(Floats x) {
        const __m256i n = _mm256_cvtps_epi32(x);
        return {_mm256_cvtepi32_ps(n), n};
    }
    // In two factors, so that subnormals and infinity come out right.
    static Floats times_power_of_two(Floats x, WholeNumbers n) {
        const __m256i half = _mm256_srai_epi32(n.ints, 1);
        return mul(mul(x, power_of_two(half)), power_of_two(_mm256_sub_epi32(n.ints, half)));
    }
    static Floats nearest(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

    static float sum_lanes(Floats x) {
        __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
        return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
    }
    static float sum_by_halves(Floats x) { return sum_lanes(x); }
    static float sum_of_four(const Floats x[4]) { return sum_lanes(add(add(x[0], x[1]), add(x[2], x[3]))); }
    static void accumulate(Floats& sum, Floats x) { sum = add(sum, x); }
    static float max_lanes(Floats x) {
        __m128 max = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        max = _mm_max_ps(max, _mm_movehl_ps(max, max));
        return _mm_cvtss_f32(_mm_max_ss(max, _mm_movehdup_ps(max)));
    }
    static __m256i numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
    // All ones in the first lanes; the count may lie outside 0 .. 8.
    static __m256i mask(First first) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(first.count), numbers()); }

    struct DoubleSums {
        __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();

        void add(Floats values) {
            low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(values)));
            high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1)));
        }
        double total() const {
            alignas(32) double partial[kWidth];
            _mm256_store_pd(partial, low);
            _mm256_store_pd(partial + 4, high);
            double sum = 0;
            for (int lane = 0; lane < kWidth; ++lane) sum += partial[lane];
            return sum;
        }
    };

    // Attention.
    static Floats set_half(uint16_t half) { return _mm256_cvtph_ps(_mm_set1_epi16(static_cast<short>(half))); }
    static Floats hide_outside(Floats x, int first, int last) {
        const __m256i is_hidden = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(first), numbers()),
                                                  _mm256_cmpgt_epi32(numbers(), _mm256_set1_epi32(last - 1)));
        return _mm256_blendv_ps(x, set(-__builtin_inff()), _mm256_castsi256_ps(is_hidden));
    }
    static Floats running_max(Floats max, Floats x) { return _mm256_max_ps(max, x); }

    // Quantisation.
    using Quants = __m256i;
    static Quants no_quants() { return _mm256_setzero_si256(); }
    // The packs work within halves of 128 bits; the permutation puts the words of four back in order.
    static Quants round_to_int8(const Floats x[4], float factor) {
        __m256i q[4];
        for (int j = 0; j < 4; ++j) q[j] = _mm256_cvtps_epi32(mul(x[j], set(factor)));
        const __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        return _mm256_max_epi8(_mm256_permutevar8x32_epi32(mixed, order), _mm256_set1_epi8(-127));
    }
    static void store(int8_t* to, Quants q) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), q); }
    static void minus_sums(Quants q, int32_t sums[2]) {
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), q);
        __m256i quads = _mm256_madd_epi16(pairs, _mm256_set1_epi16(-1));
        quads = _mm256_add_epi32(quads, _mm256_shuffle_epi32(quads, 0x4e));
        quads = _mm256_add_epi32(quads, _mm256_shuffle_epi32(quads, 0xb1));
        sums[0] = _mm_cvtsi128_si32(_mm256_castsi256_si128(quads));
        sums[1] = _mm_cvtsi128_si32(_mm256_extracti128_si256(quads, 1));
    }
    static int largest_magnitude_bits(const Floats x[4]) {
        __m256i largest = _mm256_castps_si256(absolute(x[0]));
        for (int j = 1; j < 4; ++j) largest = _mm256_max_epi32(largest, _mm256_castps_si256(absolute(x[j])));
        __m128i max = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
        max = _mm_max_epi32(max, _mm_shuffle_epi32(max, 0x4e));
        return _mm_cvtsi128_si32(_mm_max_epi32(max, _mm_shuffle_epi32(max, 0xb1)));
    }
    static void store_halves(uint16_t* to, Floats x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, 0));
    }
    static uint16_t float_to_half(float x) { return _cvtss_sh(x, 0); }
    static float half_to_float(uint16_t half) { return _cvtsh_ss(half); }

private:
    static __m128i load16(const void* at) { return _mm_loadu_si128(static_cast<const __m128i*>(at)); }
    // 2^n for integer n in -126 .. 127.
    static Floats power_of_two(__m256i n) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
    }
};

}  // namespace
}  // namespace kvarn::avx2
