// Everything that works on one row of floats, eight at a time; the end of a row is loaded under a mask.
#include "functions.h"
#include "math.h"

namespace kvarn::avx2 {
namespace {

constexpr float kLowestLevel = 124;
constexpr float kSmallestAbsmax = 1e-36f;  // 127 / absmax stays finite

// Call body(i, mask) for each eight elements; the mask is all ones but for the last.
template <class Body>
inline void for_eights(int n, Body body) {
    const __m256i all = _mm256_set1_epi32(-1);
    int i = 0;
    for (; i + 8 <= n; i += 8) body(i, all);
    if (i < n) body(i, first_lanes(n - i));
}

// Sum of term(x) in 32 interleaved partial sums. Lanes beyond n are zeroed by the mask after term.
template <class Term>
inline float sum_of(const float* x, int n, Term term) {
    __m256 sum[4] = {set(0), set(0), set(0), set(0)};
    int i = 0;
    for (; i + 32 <= n; i += 32)
        for (int j = 0; j < 4; ++j) sum[j] = _mm256_add_ps(sum[j], term(_mm256_loadu_ps(x + i + 8 * j)));
    for_eights(n - i, [&](int at, __m256i mask) {
        const __m256 value = term(_mm256_maskload_ps(x + i + at, mask));
        sum[0] = _mm256_add_ps(sum[0], _mm256_and_ps(value, _mm256_castsi256_ps(mask)));
    });
    return sum_lanes(_mm256_add_ps(_mm256_add_ps(sum[0], sum[1]), _mm256_add_ps(sum[2], sum[3])));
}

inline float inverse_root(float x) { return 1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

template <class Activation>
inline void activate(const float* x, const float* up, int n, float* y, Activation activation) {
    for_eights(n, [&](int i, __m256i mask) {
        const __m256 value = activation(_mm256_maskload_ps(x + i, mask));
        const __m256 result = up ? _mm256_mul_ps(value, _mm256_maskload_ps(up + i, mask)) : value;
        _mm256_maskstore_ps(y + i, mask, result);
    });
}

// Squared distance of x * s from whole numbers.
inline float rounding_error(const __m256 x[4], __m256 s) {
    __m256 sum = set(0);
    for (int j = 0; j < 4; ++j) {
        const __m256 scaled = _mm256_mul_ps(x[j], s);
        const __m256 rest =
            _mm256_sub_ps(scaled, _mm256_round_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        sum = _mm256_add_ps(sum, _mm256_mul_ps(rest, rest));
    }
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}

// The level between kLowestLevel and 127 whose grid fits the block best.
inline float best_level(const __m256 x[4], float absmax) {
    float best = 127, least = 0;
    for (float level = 127; level >= kLowestLevel; --level) {
        const float d = absmax / level;
        const float error = rounding_error(x, set(level / absmax)) * (d * d);
        if (level == 127 || error < least) least = error, best = level;
    }
    return best;
}

inline __m256i round_to_int8(const __m256 x[4], __m256 s) {
    __m256i q[4];
    for (int j = 0; j < 4; ++j) q[j] = _mm256_cvtps_epi32(_mm256_mul_ps(x[j], s));
    const __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm256_max_epi8(_mm256_permutevar8x32_epi32(mixed, order), _mm256_set1_epi8(-127));
}

inline int sum_int8(__m256i q) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), q);
    return sum_lanes(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

}  // namespace

// A block with NaN or infinity gets q = 0 and scale NaN, so that every output it reaches is NaN.
void quantize_row(const float* x, int k, int t, int n, int8_t* q, float* scale, float* sum) noexcept {
    for (int b = 0; b < k / kQuantBlock; ++b) {
        const size_t at = static_cast<size_t>(b) * n + t;
        __m256 values[4];
        for (int j = 0; j < 4; ++j) values[j] = _mm256_loadu_ps(x + kQuantBlock * b + 8 * j);
        const int bits = largest_magnitude_bits(values);
        const float absmax = bits < 0x7f800000 ? __builtin_bit_cast(float, bits) : __builtin_nanf("");
        const bool has_values = absmax >= kSmallestAbsmax;
        const float level = has_values ? best_level(values, absmax) : 127;
        const float d = has_values || bits >= 0x7f800000 ? absmax / level : 0;
        const __m256i quants = has_values ? round_to_int8(values, set(level / absmax)) : _mm256_setzero_si256();
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + at * kQuantBlock), quants);
        scale[at] = d;
        sum[at] = d * static_cast<float>(sum_int8(quants));
    }
}

void rms_norm(const float* x, const float* w, float eps, int n, float* y) noexcept {
    const float squares = sum_of(x, n, [](__m256 v) { return _mm256_mul_ps(v, v); });
    const __m256 scale = set(inverse_root(squares / static_cast<float>(n) + eps));
    for_eights(n, [&](int i, __m256i mask) {
        const __m256 normed = _mm256_mul_ps(_mm256_maskload_ps(x + i, mask), scale);
        _mm256_maskstore_ps(y + i, mask, _mm256_mul_ps(normed, _mm256_maskload_ps(w + i, mask)));
    });
}

void layer_norm(const float* x, const float* w, const float* b, float eps, int n, float* y) noexcept {
    const __m256 mean = set(sum_of(x, n, [](__m256 v) { return v; }) / static_cast<float>(n));
    const float squares = sum_of(x, n, [mean](__m256 v) {
        const __m256 centred = _mm256_sub_ps(v, mean);
        return _mm256_mul_ps(centred, centred);
    });
    const __m256 scale = set(inverse_root(squares / static_cast<float>(n) + eps));
    for_eights(n, [&](int i, __m256i mask) {
        const __m256 normed = _mm256_mul_ps(_mm256_sub_ps(_mm256_maskload_ps(x + i, mask), mean), scale);
        const __m256 scaled = _mm256_mul_ps(normed, _mm256_maskload_ps(w + i, mask));
        _mm256_maskstore_ps(y + i, mask, _mm256_add_ps(scaled, _mm256_maskload_ps(b + i, mask)));
    });
}

void add(const float* x, int n, float* y) noexcept {
    for_eights(n, [&](int i, __m256i mask) {
        const __m256 sum = _mm256_add_ps(_mm256_maskload_ps(y + i, mask), _mm256_maskload_ps(x + i, mask));
        _mm256_maskstore_ps(y + i, mask, sum);
    });
}

void silu_mul(const float* gate, const float* up, int n, float* y) noexcept {
    activate(gate, up, n, y, [](__m256 g) {
        const __m256 e = exp_f32x8(_mm256_xor_ps(g, set(-0.0f)));
        return _mm256_div_ps(g, _mm256_add_ps(set(1.0f), e));
    });
}

// 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u)), u = sqrt(2 / pi) (g + 0.044715 g^3)
void gelu_tanh_mul(const float* gate, const float* up, int n, float* y) noexcept {
    activate(gate, up, n, y, [](__m256 g) {
        const __m256 cube = _mm256_fmadd_ps(_mm256_mul_ps(g, g), set(0.044715f), set(1.0f));
        const __m256 minus_2u = _mm256_mul_ps(_mm256_mul_ps(g, set(-1.59576912f)), cube);
        return _mm256_div_ps(g, _mm256_add_ps(set(1.0f), exp_f32x8(minus_2u)));
    });
}

void gelu(const float* x, int n, float* y) noexcept {
    activate(x, nullptr, n, y, [](__m256 g) {
        const __m256 phi = one_plus_erf_f32x8(_mm256_mul_ps(g, set(0.707106781f)));
        return _mm256_mul_ps(_mm256_mul_ps(g, set(0.5f)), phi);
    });
}

// Each lane keeps its first largest; the lowest index among equal lanes wins. NaN compares false and is passed over.
void argmax(const float* x, int n, int* index, float* value) noexcept {
    __m256 best = set(-__builtin_inff());
    __m256i best_at = _mm256_setzero_si256();
    for_eights(n, [&](int i, __m256i mask) {
        const __m256 values = _mm256_maskload_ps(x + i, mask);
        __m256 greater = _mm256_cmp_ps(values, best, _CMP_GT_OQ);
        greater = _mm256_and_ps(greater, _mm256_castsi256_ps(mask));
        const __m256i at = _mm256_add_epi32(_mm256_set1_epi32(i), lane_numbers());
        best = _mm256_blendv_ps(best, values, greater);
        best_at = _mm256_blendv_epi8(best_at, at, _mm256_castps_si256(greater));
    });
    alignas(32) float values[8];
    alignas(32) int indices[8];
    _mm256_store_ps(values, best);
    _mm256_store_si256(reinterpret_cast<__m256i*>(indices), best_at);
    *index = indices[0];
    *value = values[0];
    for (int lane = 1; lane < 8; ++lane)
        if (values[lane] > *value || (values[lane] == *value && indices[lane] < *index)) {
            *index = indices[lane];
            *value = values[lane];
        }
}

namespace {

// Eight partial sums in double.
struct Sums {
    __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();

    void add(__m256 values) {
        low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(values)));
        high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1)));
    }
    double total() const {
        alignas(32) double partial[8];
        _mm256_store_pd(partial, low);
        _mm256_store_pd(partial + 4, high);
        double sum = 0;
        for (int lane = 0; lane < 8; ++lane) sum += partial[lane];
        return sum;
    }
};

}  // namespace

double sum_exp(const float* x, int n, float max) noexcept {
    Sums sums;
    for_eights(n, [&](int i, __m256i mask) {
        const __m256 e = exp_f32x8(_mm256_sub_ps(_mm256_maskload_ps(x + i, mask), set(max)));
        sums.add(_mm256_and_ps(e, _mm256_castsi256_ps(mask)));
    });
    return sums.total();
}

void softmax_sums(const float* x, int n, float max, double* sums) noexcept {
    Sums plain, weighted;
    for_eights(n, [&](int i, __m256i mask) {
        const __m256 below = _mm256_sub_ps(_mm256_maskload_ps(x + i, mask), set(max));
        const __m256 e = _mm256_and_ps(exp_f32x8(below), _mm256_castsi256_ps(mask));
        plain.add(e);
        // 0 * -inf is not 0.
        const __m256 is_some = _mm256_cmp_ps(e, _mm256_setzero_ps(), _CMP_GT_OQ);
        weighted.add(_mm256_and_ps(_mm256_mul_ps(e, below), is_some));
    });
    sums[0] = plain.total();
    sums[1] = weighted.total();
}

}  // namespace kvarn::avx2
