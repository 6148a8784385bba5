// The softmax of attention while keys are still coming: what a split of them has given, and how two become one.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

namespace kvarn {

// Running softmax of `heads` query heads: maxima, sums, accumulators, in one run of floats.
struct State {
    float* m;
    float* l;
    float* acc;
    int heads, head_dim;

    static size_t floats(int heads, int head_dim) {
        return static_cast<size_t>(heads) * static_cast<size_t>(head_dim + 2);
    }
    static State at(float* memory, int heads, int head_dim) {
        return {memory, memory + heads, memory + 2 * heads, heads, head_dim};
    }
    void clear() const {
        std::fill(m, m + heads, -std::numeric_limits<float>::infinity());
        std::fill(l, l + heads, 0.0f);
        std::fill(acc, acc + static_cast<size_t>(heads) * static_cast<size_t>(head_dim), 0.0f);
    }
};

// Merge a later split into an earlier one. Merging into a cleared state copies it exactly.
inline void merge(const State& into, const State& from) {
    for (int h = 0; h < into.heads; ++h) {
        if (from.l[h] == 0.0f) continue;
        float m = std::max(into.m[h], from.m[h]);
        float keep = into.l[h] == 0.0f ? 0.0f : std::exp(into.m[h] - m);
        float take = std::exp(from.m[h] - m);
        float* a = into.acc + static_cast<size_t>(h) * static_cast<size_t>(into.head_dim);
        const float* b = from.acc + static_cast<size_t>(h) * static_cast<size_t>(into.head_dim);
        for (int d = 0; d < into.head_dim; ++d) a[d] = a[d] * keep + b[d] * take;
        into.l[h] = into.l[h] * keep + from.l[h] * take;
        into.m[h] = m;
    }
}

}  // namespace kvarn
