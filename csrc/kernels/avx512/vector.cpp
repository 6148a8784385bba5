// What works on one row of floats, sixteen at a time; the end of a row is loaded under a mask.
#include "functions.h"
#include "math.h"

namespace kvarn::avx512 {
namespace {

constexpr float kSmallestAbsmax = 1e-36f;  // 127 / absmax stays finite

// Call body(i, mask) for each sixteen elements; the mask is all ones but for the last.
template <class Body>
inline void for_sixteens(int n, Body body) {
    int i = 0;
    for (; i + 16 <= n; i += 16) body(i, static_cast<__mmask16>(0xffff));
    if (i < n) body(i, static_cast<__mmask16>((1u << (n - i)) - 1));
}

template <class Activation>
inline void activate(const float* x, const float* up, int n, float* y, Activation activation) {
    for_sixteens(n, [&](int i, __mmask16 mask) {
        const __m512 value = activation(_mm512_maskz_loadu_ps(mask, x + i));
        _mm512_mask_storeu_ps(y + i, mask, _mm512_mul_ps(value, _mm512_maskz_loadu_ps(mask, up + i)));
    });
}

// Largest magnitude of 32 floats as bits; magnitudes order like integers, NaN above infinity above all numbers.
inline int largest_magnitude_bits(const __m512 x[2]) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    return _mm512_reduce_max_epi32(_mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(x[0]), magnitude),
                                                    _mm512_and_si512(_mm512_castps_si512(x[1]), magnitude)));
}

// Squared distances of x * s from whole numbers, added over i mod 8, for two s at once: one in each half of factors.
inline __m512 rounding_errors(const float* x, __m512 factors) {
    __m512 sum = set(0);
    for (int i = 0; i < kQuantBlock; i += 8) {
        const __m512 eights = _mm512_broadcast_f32x8(_mm256_loadu_ps(x + i));
        const __m512 rest = _mm512_reduce_ps(_mm512_mul_ps(eights, factors), 0);
        const __m512 square = _mm512_mul_ps(rest, rest);
        sum = i == 0 ? square : _mm512_add_ps(sum, square);
    }
    return sum;
}

inline __m512 two(float low, float high) { return _mm512_insertf32x8(set(low), _mm256_set1_ps(high), 1); }

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
    const __m128i low = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(x[0], set(s))));
    const __m128i high = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(x[1], set(s))));
    return _mm256_max_epi8(_mm256_set_m128i(high, low), _mm256_set1_epi8(-127));
}

// Minus the sums of the first and of the last sixteen.
inline void add_negated(__m256i q, int32_t sums[2]) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), q);
    __m256i quads = _mm256_madd_epi16(pairs, _mm256_set1_epi16(-1));
    quads = _mm256_add_epi32(quads, _mm256_shuffle_epi32(quads, 0x4e));
    quads = _mm256_add_epi32(quads, _mm256_shuffle_epi32(quads, 0xb1));
    sums[0] = _mm_cvtsi128_si32(_mm256_castsi256_si128(quads));
    sums[1] = _mm_cvtsi128_si32(_mm256_extracti128_si256(quads, 1));
}

}  // namespace

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
        add_negated(quants, minus_sums + 2 * at);
        sum[at] = d * static_cast<float>(-(minus_sums[2 * at] + minus_sums[2 * at + 1]));
    }
}

void rms_norm(const float* x, const float* w, float eps, int n, float* y) noexcept {
    __m512 sums[2] = {set(0), set(0)};
    int turn = 0;
    for_sixteens(n, [&](int i, __mmask16 mask) {
        const __m512 value = _mm512_maskz_loadu_ps(mask, x + i);
        sums[turn] = _mm512_fmadd_ps(value, value, sums[turn]);
        turn ^= 1;
    });
    const float squares = sum_lanes(_mm512_add_ps(sums[0], sums[1]));
    const float root = _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(squares / static_cast<float>(n) + eps)));
    const __m512 scale = set(1.0f / root);
    for_sixteens(n, [&](int i, __mmask16 mask) {
        const __m512 normed = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), scale);
        _mm512_mask_storeu_ps(y + i, mask, _mm512_mul_ps(normed, _mm512_maskz_loadu_ps(mask, w + i)));
    });
}

void add(const float* x, int n, float* y) noexcept {
    for_sixteens(n, [&](int i, __mmask16 mask) {
        const __m512 sum = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, y + i), _mm512_maskz_loadu_ps(mask, x + i));
        _mm512_mask_storeu_ps(y + i, mask, sum);
    });
}

void silu_mul(const float* gate, const float* up, int n, float* y) noexcept {
    activate(gate, up, n, y, [](__m512 g) {
        const __m512 e = exp_f32x16(_mm512_xor_ps(g, set(-0.0f)));
        return _mm512_div_ps(g, _mm512_add_ps(set(1.0f), e));
    });
}

// 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u)), u = sqrt(2 / pi) (g + 0.044715 g^3)
void gelu_tanh_mul(const float* gate, const float* up, int n, float* y) noexcept {
    activate(gate, up, n, y, [](__m512 g) {
        const __m512 cube = _mm512_fmadd_ps(_mm512_mul_ps(g, g), set(0.044715f), set(1.0f));
        const __m512 minus_2u = _mm512_mul_ps(_mm512_mul_ps(g, set(-1.59576912f)), cube);
        return _mm512_div_ps(g, _mm512_add_ps(set(1.0f), exp_f32x16(minus_2u)));
    });
}

}  // namespace kvarn::avx512
