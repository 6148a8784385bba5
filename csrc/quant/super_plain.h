// Super-blocks without importance: sub-blocks are fitted one by one, then their scales are rounded. llama.cpp's bytes.
#pragma once
#include "super.h"

namespace kvarn::super {
namespace {

template <int N>
void round_affine(const Parts<N>& parts, const fit::Affine* fits, int max_quant, Chosen& out) {
    const float d = half_to_float(out.d), dmin = half_to_float(out.dmin);
    for (int g = 0; g < Parts<N>::kGroups; ++g) {
        Floats step, minimum, q[N];
        for (int lane = 0; lane < kWide; ++lane) {
            step.set(lane, d * static_cast<float>(out.scale[kWide * g + lane]));
            minimum.set(lane, dmin * static_cast<float>(out.minimum[kWide * g + lane]));
        }
        for (int i = 0; i < N; ++i) {
            const Floats x = parts.x[g][i];
            const Floats searched = fits[g].grid * (x - fits[g].origin);  // where all of a sub-block is its minimum
            const Floats scaled = choose(step != 0.0f, (x + minimum) / step, searched);
            q[i] = held(nearest(scaled), 0, static_cast<float>(max_quant));
        }
        store_quants(q, g, out.q);
    }
}

template <int N>
void encode_affine(const Parts<N>& parts, const fit::AffineSearch& search, int max_scale, Chosen& out) {
    constexpr int kGroups = Parts<N>::kGroups;
    fit::Affine fits[kGroups];
    float most_scale = 0, most_minimum = 0;
    for (int g = 0; g < kGroups; ++g) {
        fits[g] = fit::fit_affine(parts.x[g], parts.w[g], search);
        most_scale = std::max(most_scale, largest(fits[g].scale));
        most_minimum = std::max(most_minimum, largest(-fits[g].low));
    }
    const float limit = static_cast<float>(max_scale);
    const float by_scale = most_scale > 0 ? limit / most_scale : 0,
                by_min = most_minimum > 0 ? limit / most_minimum : 0;
    for (int g = 0; g < kGroups; ++g) {
        const Floats scale = nearest(by_scale * fits[g].scale), minimum = nearest(by_min * -fits[g].low);
        for (int lane = 0; lane < kWide; ++lane) {
            out.scale[kWide * g + lane] = std::min<int>(max_scale, static_cast<uint8_t>(static_cast<int>(scale[lane])));
            out.minimum[kWide * g + lane] =
                std::min<int>(max_scale, static_cast<uint8_t>(static_cast<int>(minimum[lane])));
        }
    }
    out.d = float_to_half(most_scale / limit);
    out.dmin = float_to_half(most_minimum / limit);
    round_affine(parts, fits, static_cast<int>(search.max_quant), out);
}

// Scales in units of d, where the largest of them is -max_scale; fits give the quants of sub-blocks whose scale is 0.
template <int N>
void encode_symmetric(const Parts<N>& parts, const fit::Symmetric* fits, int middle, int max_scale, Chosen& out) {
    constexpr int kGroups = Parts<N>::kGroups;
    Floats scales[kGroups];
    for (int g = 0; g < kGroups; ++g) scales[g] = fits[g].scale;
    const float most = peak_of(scales);
    if (std::fabs(most) < fit::kSmallestPeak) return;  // out is all zero
    const float by_scale = -static_cast<float>(max_scale) / most;
    out.d = float_to_half(1 / by_scale);
    const float d = half_to_float(out.d), low = static_cast<float>(-middle), high = static_cast<float>(middle - 1);
    for (int g = 0; g < kGroups; ++g) {
        const Floats scale =
            held(nearest(by_scale * scales[g]), static_cast<float>(-max_scale), static_cast<float>(max_scale - 1));
        const Floats step = d * scale;
        Floats q[N];
        for (int i = 0; i < N; ++i) {
            const Floats x = parts.x[g][i];
            const Floats scaled = choose(step != 0.0f, x / step, fits[g].grid * x);
            const Ints is_zero = (step == 0.0f) & (fits[g].grid == 0.0f);
            q[i] = choose(is_zero, Floats{}, held(nearest(scaled), low, high) - low);
        }
        store_quants(q, g, out.q);
        for (int lane = 0; lane < kWide; ++lane) out.scale[kWide * g + lane] = static_cast<int>(scale[lane]);
    }
}

}  // namespace
}  // namespace kvarn::super
