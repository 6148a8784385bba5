// A super-block of 256 values on its way to bytes: its sub-blocks side by side, and what has been chosen for them.
#pragma once
#include <algorithm>
#include <cmath>

#include "fit.h"
#include "half.h"

namespace kvarn::super {
namespace {

using namespace wide;

constexpr int kValues = 256;

// Sub-blocks of N values, eight to a group, with the weight of each value's error.
template <int N>
struct Parts {
    static constexpr int kGroups = kValues / N / kWide;
    Floats x[kGroups][N], w[kGroups][N];

    explicit Parts(const float* values) {
        for (int g = 0; g < kGroups; ++g) interleave(values + N * kWide * g, N, x[g]);
    }

    // weight = importance * sqrt(sigma2 + x^2), sigma2 = factor * the mean square; factor 0: the bare importance.
    void weigh(const float* values, const float* importance, float factor) {
        float weights[kValues], squares = 0;
        for (int i = 0; i < kValues; ++i) squares += values[i] * values[i];
        const float sigma2 = factor * squares / kValues;
        for (int i = 0; i < kValues; ++i)
            weights[i] = importance[i] * (factor > 0 ? std::sqrt(sigma2 + values[i] * values[i]) : 1.0f);
        for (int g = 0; g < kGroups; ++g) interleave(weights + N * kWide * g, N, w[g]);
    }
};

// x ~ d * scale * q - dmin * minimum; symmetric types have no minimum, and q counts from -middle.
struct Chosen {
    uint16_t d = 0, dmin = 0;
    int scale[16] = {}, minimum[16] = {};
    uint8_t q[kValues] = {};
};

// Quants of one group as bytes.
template <int N>
void store_quants(const Floats (&quants)[N], int group, uint8_t* q) {
    for (int i = 0; i < N; ++i) {
        const Ints whole = cut(quants[i]);
        for (int lane = 0; lane < kWide; ++lane) q[N * (kWide * group + lane) + i] = static_cast<uint8_t>(whole[lane]);
    }
}

KVARN_WIDE float largest(Floats x) {
    float found = x[0];
    for (int lane = 1; lane < kWide; ++lane) found = std::max(found, x[lane]);
    return found;
}

// The value of largest magnitude, with its sign; of equal ones the first.
template <int Groups>
float peak_of(const Floats (&x)[Groups]) {
    float found = 0, size = 0;
    for (int g = 0; g < Groups; ++g)
        for (int lane = 0; lane < kWide; ++lane)
            if (std::fabs(x[g][lane]) > size) size = std::fabs(x[g][lane]), found = x[g][lane];
    return found;
}

KVARN_WIDE Floats inverse(Floats x) { return choose(x != 0.0f, 1.0f / x, Floats{}); }
KVARN_WIDE float rounded_half(float x) { return half_to_float(float_to_half(x)); }
KVARN_WIDE Floats whole_below(Floats x) {
    const Floats near = nearest(x);
    return choose(near > x, near - 1.0f, near);
}

}  // namespace
}  // namespace kvarn::super
