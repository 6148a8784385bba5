// What works on one row of floats, sixteen at a time.
#include "../shared/vector.h"

#include "../avx2/lanes.h"
#include "lanes.h"

namespace kvarn::avx512 {
namespace {

constexpr float kSmallestAbsmax = 1e-36f;  // 127 / absmax stays finite

// Largest magnitude of 32 floats as bits; magnitudes order like integers, NaN above infinity above all numbers.
inline int largest_magnitude_bits(const __m512 x[2]) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    return _mm512_reduce_max_epi32(_mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(x[0]), magnitude),
                                                    _mm512_and_si512(_mm512_castps_si512(x[1]), magnitude)));
}

// Squared distances of x * s from whole numbers, added over i mod 8, for two s at once: one in each half of factors.
inline __m512 rounding_errors(const float* x, __m512 factors) {
    __m512 sum = Lanes::set(0);
    for (int i = 0; i < kQuantBlock; i += 8) {
        const __m512 eights = _mm512_broadcast_f32x8(_mm256_loadu_ps(x + i));
        const __m512 error = _mm512_reduce_ps(_mm512_mul_ps(eights, factors), 0);
        const __m512 square = _mm512_mul_ps(error, error);
        sum = i == 0 ? square : _mm512_add_ps(sum, square);
    }
    return sum;
}

inline __m512 two(float low, float high) { return _mm512_insertf32x8(Lanes::set(low), _mm256_set1_ps(high), 1); }

// Lane i: the sum over halves of the i-th eight: lanes 0 + 4, 1 + 5, ..., then 0 + 2 and 1 + 3 of those, then both.
inline __m128 sum_each(__m512 first_two, __m512 last_two) {
    const __m512 fours =
        _mm512_add_ps(_mm512_shuffle_f32x4(first_two, last_two, 0x88), _mm512_shuffle_f32x4(first_two, last_two, 0xdd));
    const __m512 pairs = _mm512_add_ps(fours, _mm512_permute_ps(fours, 0x4e));
    const __m512 sums = _mm512_add_ps(pairs, _mm512_permute_ps(pairs, 0xb1));
    return _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, sums));
}

// Which of the levels 127, 126, 125, 124 fits the block best; the first of equals.
inline int best_level(const float* x, __m128 steps, __m128 factors) {
    const __m128 sums =
        sum_each(rounding_errors(x, two(factors[0], factors[1])), rounding_errors(x, two(factors[2], factors[3])));
    __m128 error = _mm_mul_ps(sums, _mm_mul_ps(steps, steps));
    const __mmask8 is_nan = _mm_cmp_ps_mask(error, error, _CMP_UNORD_Q);  // 0 * inf is never less
    if (is_nan & 1) return 0;
    error = _mm_mask_mov_ps(error, is_nan, _mm_set1_ps(__builtin_inff()));
    __m128 least = _mm_min_ps(error, _mm_permute_ps(error, 0x4e));
    least = _mm_min_ps(least, _mm_permute_ps(least, 0xb1));
    return __builtin_ctz(_mm_cmp_ps_mask(error, least, _CMP_EQ_OQ));
}

inline __m256i round_to_int8(const __m512 x[2], float s) {
    const __m128i low = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(x[0], Lanes::set(s))));
    const __m128i high = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(x[1], Lanes::set(s))));
    return _mm256_max_epi8(_mm256_set_m128i(high, low), _mm256_set1_epi8(-127));
}

// A block with NaN or infinity gets q = 0 and scale NaN, so that every output it reaches is NaN.
void quantize_row(const float* x, int k, int t, int n, int8_t* q, float* scale, float* sum,
                  int32_t* minus_sums) noexcept {
    const __m128 levels = _mm_setr_ps(127, 126, 125, 124);
    for (int b = 0; b < k / kQuantBlock; ++b) {
        const size_t at = static_cast<size_t>(b) * n + t;
        const __m512 values[2] = {_mm512_loadu_ps(x + kQuantBlock * b), _mm512_loadu_ps(x + kQuantBlock * b + 16)};
        const int bits = largest_magnitude_bits(values);
        const float absmax = __builtin_bit_cast(float, bits);
        __m256i quants = _mm256_setzero_si256();
        float d = 0;
        if (bits >= 0x7f800000) {
            d = __builtin_nanf("");
        } else if (absmax >= kSmallestAbsmax) {
            const __m128 steps = _mm_div_ps(_mm_set1_ps(absmax), levels);
            const __m128 factors = _mm_div_ps(levels, _mm_set1_ps(absmax));
            const int best = best_level(x + kQuantBlock * b, steps, factors);
            d = steps[best];
            quants = round_to_int8(values, factors[best]);
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + at * kQuantBlock), quants);
        scale[at] = d;
        avx2::Lanes::minus_sums(quants, minus_sums + 2 * at);
        sum[at] = d * static_cast<float>(-(minus_sums[2 * at] + minus_sums[2 * at + 1]));
    }
}

// Two sums take turns, so that one fma need not wait for the one before.
void rms_norm(const float* x, const float* w, float eps, int n, float* y) noexcept {
    __m512 sums[2] = {Lanes::set(0), Lanes::set(0)};
    int turn = 0;
    shared::for_vectors<Lanes::kWidth>(n, [&](int i, auto extent) {
        const __m512 value = Lanes::load(x + i, extent);
        sums[turn] = Lanes::fma(value, value, sums[turn]);
        turn ^= 1;
    });
    const float squares = Lanes::sum_lanes(Lanes::add(sums[0], sums[1]));
    const float root = avx2::Lanes::square_root(squares / static_cast<float>(n) + eps);
    const __m512 scale = Lanes::set(1.0f / root);
    shared::for_vectors<Lanes::kWidth>(n, [&](int i, auto extent) {
        const __m512 normed = Lanes::mul(Lanes::load(x + i, extent), scale);
        Lanes::store(y + i, Lanes::mul(normed, Lanes::load(w + i, extent)), extent);
    });
}

constexpr KernelTable make_vector_kernels() {
    KernelTable t{};
    t.quantize_row = quantize_row;
    t.rms_norm = rms_norm;
    t.add = shared::add<Lanes>;
    t.silu_mul = shared::silu_mul<Lanes>;
    t.gelu_tanh_mul = shared::gelu_tanh_mul<Lanes>;
    t.sigmoid_mul = shared::sigmoid_mul<Lanes>;
    t.convolve = shared::convolve<Lanes>;
    t.delta_step = shared::delta_step<Lanes>;
    t.state_step = shared::state_step<Lanes>;
    t.selective_step = shared::selective_step<Lanes>;
    return t;
}

}  // namespace

constinit const KernelTable vector_kernels = make_vector_kernels();

}  // namespace kvarn::avx512
