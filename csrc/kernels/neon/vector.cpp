// Everything that works on one row of floats, four at a time.
#include "functions.h"
#include "math.h"

namespace kvarn::neon {
namespace {

constexpr float kLowestLevel = 124;
constexpr float kSmallestAbsmax = 1e-36f;  // 127 / absmax stays finite

// Call body(i, Four) for each four elements, body(i, Last) for what is left.
template <class Body>
inline void for_fours(int n, Body body) {
    int i = 0;
    for (; i + 4 <= n; i += 4) body(i, Four{});
    if (i < n) body(i, Last{n - i});
}

// Sum of term(x) in 32 interleaved partial sums.
template <class Term>
inline float sum_of(const float* x, int n, Term term) {
    float32x4_t sum[8];
    for (float32x4_t& part : sum) part = set(0);
    int i = 0;
    for (; i + 32 <= n; i += 32)
        for (int j = 0; j < 8; ++j) sum[j] = vaddq_f32(sum[j], term(vld1q_f32(x + i + 4 * j)));
    for_fours(n - i, [&](int at, auto lanes) {
        sum[0] = vaddq_f32(sum[0], kept(term(load(x + i + at, lanes)), lanes_of(lanes)));
    });
    for (int half = 4; half > 0; half /= 2)
        for (int j = 0; j < half; ++j) sum[j] = vaddq_f32(sum[j], sum[j + half]);
    return vaddvq_f32(sum[0]);
}

inline float inverse_root(float x) { return 1.0f / vget_lane_f32(vsqrt_f32(vdup_n_f32(x)), 0); }

template <class Activation>
inline void activate(const float* x, const float* up, int n, float* y, Activation activation) {
    for_fours(n, [&](int i, auto lanes) {
        const float32x4_t value = activation(load(x + i, lanes));
        store(y + i, up ? vmulq_f32(value, load(up + i, lanes)) : value, lanes);
    });
}

// Squared distance of x * s from whole numbers: lanes are i mod 8, then added by halves.
inline float rounding_error(const float32x4_t x[8], float s) {
    float32x4_t sum[2] = {set(0), set(0)};
    for (int j = 0; j < 8; ++j) {
        const float32x4_t scaled = vmulq_n_f32(x[j], s);
        const float32x4_t rest = vsubq_f32(scaled, vrndnq_f32(scaled));
        sum[j % 2] = vaddq_f32(sum[j % 2], vmulq_f32(rest, rest));
    }
    const float32x4_t four = vaddq_f32(sum[0], sum[1]);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

// The level between kLowestLevel and 127 whose grid fits the block best.
inline float best_level(const float32x4_t x[8], float absmax) {
    float best = 127, least = 0;
    for (float level = 127; level >= kLowestLevel; --level) {
        const float d = absmax / level;
        const float error = rounding_error(x, level / absmax) * (d * d);
        if (level == 127 || error < least) least = error, best = level;
    }
    return best;
}

}  // namespace

// A block with NaN or infinity gets q = 0 and scale NaN, so that every output it reaches is NaN.
void quantize_row(const float* x, int k, int t, int n, int8_t* q, float* scale, float* sum) noexcept {
    for (int b = 0; b < k / kQuantBlock; ++b) {
        const size_t at = static_cast<size_t>(b) * n + t;
        float32x4_t values[8];
        for (int j = 0; j < 8; ++j) values[j] = vld1q_f32(x + kQuantBlock * b + 4 * j);
        const uint32_t bits = largest_magnitude_bits(values);
        const bool is_finite = bits < 0x7f800000u;
        const float absmax = is_finite ? __builtin_bit_cast(float, bits) : __builtin_nanf("");
        const bool has_values = absmax >= kSmallestAbsmax;
        const float level = has_values ? best_level(values, absmax) : 127;
        const float d = has_values || !is_finite ? absmax / level : 0;
        int8x16_t quants[2] = {vdupq_n_s8(0), vdupq_n_s8(0)};
        if (has_values) {
            for (float32x4_t& value : values) value = vmulq_n_f32(value, level / absmax);
            round_to_int8(values, quants);
        }
        vst1q_s8(q + at * kQuantBlock, quants[0]);
        vst1q_s8(q + at * kQuantBlock + 16, quants[1]);
        scale[at] = d;
        sum[at] = d * static_cast<float>(vaddlvq_s8(quants[0]) + vaddlvq_s8(quants[1]));
    }
}

void rms_norm(const float* x, const float* w, float eps, int n, float* y) noexcept {
    const float squares = sum_of(x, n, [](float32x4_t v) { return vmulq_f32(v, v); });
    const float scale = inverse_root(squares / static_cast<float>(n) + eps);
    for_fours(n, [&](int i, auto lanes) {
        const float32x4_t normed = vmulq_n_f32(load(x + i, lanes), scale);
        store(y + i, vmulq_f32(normed, load(w + i, lanes)), lanes);
    });
}

void layer_norm(const float* x, const float* w, const float* b, float eps, int n, float* y) noexcept {
    const float32x4_t mean = set(sum_of(x, n, [](float32x4_t v) { return v; }) / static_cast<float>(n));
    const float squares = sum_of(x, n, [mean](float32x4_t v) {
        const float32x4_t centred = vsubq_f32(v, mean);
        return vmulq_f32(centred, centred);
    });
    const float scale = inverse_root(squares / static_cast<float>(n) + eps);
    for_fours(n, [&](int i, auto lanes) {
        const float32x4_t normed = vmulq_n_f32(vsubq_f32(load(x + i, lanes), mean), scale);
        store(y + i, vaddq_f32(vmulq_f32(normed, load(w + i, lanes)), load(b + i, lanes)), lanes);
    });
}

void add(const float* x, int n, float* y) noexcept {
    for_fours(n, [&](int i, auto lanes) { store(y + i, vaddq_f32(load(y + i, lanes), load(x + i, lanes)), lanes); });
}

void silu_mul(const float* gate, const float* up, int n, float* y) noexcept {
    activate(gate, up, n, y, [](float32x4_t g) { return vdivq_f32(g, vaddq_f32(set(1.0f), exp_f32x4(vnegq_f32(g)))); });
}

// 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u)), u = sqrt(2 / pi) (g + 0.044715 g^3)
void gelu_tanh_mul(const float* gate, const float* up, int n, float* y) noexcept {
    activate(gate, up, n, y, [](float32x4_t g) {
        const float32x4_t cube = vfmaq_f32(set(1.0f), vmulq_f32(g, g), set(0.044715f));
        const float32x4_t minus_2u = vmulq_f32(vmulq_f32(g, set(-1.59576912f)), cube);
        return vdivq_f32(g, vaddq_f32(set(1.0f), exp_f32x4(minus_2u)));
    });
}

void gelu(const float* x, int n, float* y) noexcept {
    activate(x, nullptr, n, y, [](float32x4_t g) {
        const float32x4_t phi = one_plus_erf_f32x4(vmulq_f32(g, set(0.707106781f)));
        return vmulq_f32(vmulq_f32(g, set(0.5f)), phi);
    });
}

// Each lane keeps its first largest; the lowest index among equal lanes wins. NaN compares false and is passed over.
void argmax(const float* x, int n, int* index, float* value) noexcept {
    float32x4_t best = set(-__builtin_inff());
    uint32x4_t best_at = vdupq_n_u32(0);
    for_fours(n, [&](int i, auto lanes) {
        const float32x4_t values = load(x + i, lanes);
        const uint32x4_t greater = vandq_u32(vcgtq_f32(values, best), lanes_of(lanes));
        best = vbslq_f32(greater, values, best);
        best_at = vbslq_u32(greater, vaddq_u32(vdupq_n_u32(static_cast<uint32_t>(i)), lane_numbers()), best_at);
    });
    *value = vmaxvq_f32(best);
    const uint32x4_t is_largest = vceqq_f32(best, set(*value));
    *index = static_cast<int>(vminvq_u32(vbslq_u32(is_largest, best_at, vdupq_n_u32(~0u))));
}

namespace {

// Eight partial sums in double; lanes are i mod 8.
struct Sums {
    float64x2_t partial[4] = {vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0)};

    void add(int i, float32x4_t values) {
        float64x2_t* half = partial + i % 8 / 2;
        half[0] = vaddq_f64(half[0], vcvt_f64_f32(vget_low_f32(values)));
        half[1] = vaddq_f64(half[1], vcvt_high_f64_f32(values));
    }
    double total() const {
        double sum = 0;
        for (const float64x2_t part : partial) sum = (sum + vgetq_lane_f64(part, 0)) + vgetq_lane_f64(part, 1);
        return sum;
    }
};

}  // namespace

double sum_exp(const float* x, int n, float max) noexcept {
    Sums sums;
    for_fours(n, [&](int i, auto lanes) {
        sums.add(i, kept(exp_f32x4(vsubq_f32(load(x + i, lanes), set(max))), lanes_of(lanes)));
    });
    return sums.total();
}

void softmax_sums(const float* x, int n, float max, double* sums) noexcept {
    Sums plain, weighted;
    for_fours(n, [&](int i, auto lanes) {
        const float32x4_t below = vsubq_f32(load(x + i, lanes), set(max));
        const float32x4_t e = kept(exp_f32x4(below), lanes_of(lanes));
        plain.add(i, e);
        weighted.add(i, kept(vmulq_f32(e, below), vcgtq_f32(e, set(0.0f))));  // 0 * -inf is not 0
    });
    sums[0] = plain.total();
    sums[1] = weighted.total();
}

}  // namespace kvarn::neon
