// Everything that works on one row of floats.
#include "../shared/quantize.h"
#include "math.h"

namespace kvarn::scalar {
namespace {

// |quotient| <= 2^23 is assumed of finite input; adding 1.5 * 2^23 makes the float unit round to nearest even.
int8_t round_to_int8(float quotient) {
    const float limited = quotient > 127.0f ? 127.0f : quotient < -127.0f ? -127.0f : quotient;
    return static_cast<int8_t>((limited + 12582912.0f) - 12582912.0f);
}

// Squared distance of x * s from whole numbers, added in the order a vector of eight adds.
float rounding_error(const float* x, float s) {
    float lanes[8] = {};
    for (int i = 0; i < kQuantBlock; ++i) {
        const float scaled = x[i] * s;
        const float error = scaled - static_cast<float>(round_to_int8(scaled));
        lanes[i % 8] += error * error;
    }
    for (int half = 4; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
}

float largest_magnitude(const float* x) {
    float largest = 0;
    for (int i = 0; i < kQuantBlock; ++i) {
        const float magnitude = absolute(x[i]);
        if (!is_finite(magnitude)) return __builtin_nanf("");
        if (magnitude > largest) largest = magnitude;
    }
    return largest;
}

// A block with NaN or infinity gets q = 0 and scale NaN, so that every output it reaches is NaN.
void quantize_row(const float* x, int k, int t, int n, int8_t* q, float* scale, float* sum,
                  int32_t* minus_sums) noexcept {
    for (int b = 0; b < k / kQuantBlock; ++b) {
        const float* block = x + kQuantBlock * b;
        const size_t at = static_cast<size_t>(b) * n + t;
        const float absmax = largest_magnitude(block);
        const bool has_values = absmax >= shared::kSmallestAbsmax;
        const auto error = [&](float s) { return rounding_error(block, s); };
        const float level = has_values ? shared::best_level(absmax, error) : shared::kHighestLevel;
        const float d = has_values || !is_finite(absmax) ? absmax / level : 0;
        int total[2] = {0, 0};
        for (int i = 0; i < kQuantBlock; ++i) {
            const int8_t value = has_values ? round_to_int8(block[i] * (level / absmax)) : int8_t{0};
            q[at * kQuantBlock + i] = value;
            total[i / 16] += value;
        }
        scale[at] = d;
        sum[at] = d * static_cast<float>(total[0] + total[1]);
        for (int half = 0; half < 2; ++half) minus_sums[2 * at + half] = -total[half];
    }
}

void rms_norm(const float* x, const float* w, float eps, int n, float* y) noexcept {
    double squares = 0;
    for (int i = 0; i < n; ++i) squares += static_cast<double>(x[i]) * x[i];
    const float scale = static_cast<float>(1 / square_root(squares / n + eps));
    for (int i = 0; i < n; ++i) y[i] = x[i] * scale * w[i];
}

void layer_norm(const float* x, const float* w, const float* b, float eps, int n, float* y) noexcept {
    double total = 0, squares = 0;
    for (int i = 0; i < n; ++i) total += x[i];
    const double mean = total / n;
    for (int i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
    const double scale = 1 / square_root(squares / n + eps);
    for (int i = 0; i < n; ++i) y[i] = static_cast<float>((x[i] - mean) * scale) * w[i] + b[i];
}

void add(const float* x, int n, float* y) noexcept {
    for (int i = 0; i < n; ++i) y[i] += x[i];
}

void silu_mul(const float* gate, const float* up, int n, float* y) noexcept {
    for (int i = 0; i < n; ++i) {
        const double g = gate[i];
        y[i] = static_cast<float>(g / (1 + exponential(-g))) * up[i];
    }
}

// 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u))
void gelu_tanh_mul(const float* gate, const float* up, int n, float* y) noexcept {
    for (int i = 0; i < n; ++i) {
        const double g = gate[i];
        const double u = 0.7978845608028654 * (g + 0.044715 * g * g * g);
        y[i] = static_cast<float>(g / (1 + exponential(-2 * u))) * up[i];
    }
}

void gelu(const float* x, int n, float* y) noexcept {
    for (int i = 0; i < n; ++i) {
        const double g = x[i];
        y[i] = static_cast<float>(0.5 * g * (1 + error_function(g * 0.7071067811865476)));
    }
}

// NaN is never the largest; if nothing is above -inf the index is 0.
void argmax(const float* x, int n, int* index, float* value) noexcept {
    *index = 0;
    *value = -__builtin_inff();
    for (int i = 0; i < n; ++i)
        if (x[i] > *value) {
            *index = i;
            *value = x[i];
        }
}

double sum_exp(const float* x, int n, float max) noexcept {
    double partial[8] = {};
    for (int i = 0; i < n; ++i) partial[i % 8] += static_cast<float>(exponential(x[i] - max));
    double total = 0;
    for (double part : partial) total += part;
    return total;
}

void softmax_sums(const float* x, int n, float max, double* sums) noexcept {
    double plain[8] = {}, weighted[8] = {};
    for (int i = 0; i < n; ++i) {
        const float below = x[i] - max, e = static_cast<float>(exponential(below));
        plain[i % 8] += e;
        if (e > 0) weighted[i % 8] += e * below;
    }
    sums[0] = sums[1] = 0;
    for (int lane = 0; lane < 8; ++lane) {
        sums[0] += plain[lane];
        sums[1] += weighted[lane];
    }
}

void sigmoid_mul(const float* gate, const float* x, int n, float* y) noexcept {
    for (int i = 0; i < n; ++i) y[i] = static_cast<float>(x[i] / (1 + exponential(-static_cast<double>(gate[i]))));
}

void convolve(const float* const* rows, const float* w, const float* bias, int kernel, int n, bool silu,
              float* y) noexcept {
    for (int c = 0; c < n; ++c) {
        float sum = rows[0][c] * w[c];
        for (int i = 1; i < kernel; ++i) sum += rows[i][c] * w[static_cast<size_t>(i) * n + c];
        if (bias != nullptr) sum += bias[c];
        y[c] = silu ? static_cast<float>(sum / (1 + exponential(-static_cast<double>(sum)))) : sum;
    }
}

void delta_step(const float* S, const float* q, const float* k, const float* v, float decay, float beta, int key_dim,
                int value_dim, float* next, float* out) noexcept {
    for (int c = 0; c < value_dim; ++c) {
        float sum = 0;
        for (int i = 0; i < key_dim; ++i) sum += k[i] * (S[static_cast<size_t>(i) * value_dim + c] * decay);
        const float error = (v[c] - sum) * beta;
        sum = 0;
        for (int i = 0; i < key_dim; ++i) {
            const size_t at = static_cast<size_t>(i) * value_dim + c;
            const float state = k[i] * error + S[at] * decay;
            next[at] = state;
            sum += q[i] * state;
        }
        out[c] = sum;
    }
}

void state_step(const float* S, const float* q, const float* k, const float* v, float decay, float step, int key_dim,
                int value_dim, float* next, float* out) noexcept {
    for (int c = 0; c < value_dim; ++c) {
        const float added = v[c] * step;
        float sum = 0;
        for (int i = 0; i < key_dim; ++i) {
            const size_t at = static_cast<size_t>(i) * value_dim + c;
            const float state = k[i] * added + S[at] * decay;
            next[at] = state;
            sum += q[i] * state;
        }
        out[c] = sum;
    }
}

void selective_step(const float* S, const float* a, const float* q, const float* k, const float* v, const float* steps,
                    int key_dim, int value_dim, float* next, float* out) noexcept {
    for (int c = 0; c < value_dim; ++c) {
        const float added = v[c] * steps[c];
        float sum = 0;
        for (int i = 0; i < key_dim; ++i) {
            const size_t at = static_cast<size_t>(i) * value_dim + c;
            const float decay = static_cast<float>(exponential(static_cast<double>(a[at] * steps[c])));
            const float state = k[i] * added + S[at] * decay;
            next[at] = state;
            sum += q[i] * state;
        }
        out[c] = sum;
    }
}

constexpr KernelTable make_vector_kernels() {
    KernelTable t{};
    t.quantize_row = quantize_row;
    t.rms_norm = rms_norm;
    t.layer_norm = layer_norm;
    t.add = add;
    t.silu_mul = silu_mul;
    t.gelu_tanh_mul = gelu_tanh_mul;
    t.gelu = gelu;
    t.sigmoid_mul = sigmoid_mul;
    t.convolve = convolve;
    t.delta_step = delta_step;
    t.state_step = state_step;
    t.selective_step = selective_step;
    t.argmax = argmax;
    t.sum_exp = sum_exp;
    t.softmax_sums = softmax_sums;
    return t;
}

}  // namespace

constinit const KernelTable vector_kernels = make_vector_kernels();

}  // namespace kvarn::scalar
