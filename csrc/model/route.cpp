#include "route.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace kvarn {

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

void score(const FeedForwardSpec& spec, float* logits) {
    if (spec.is_sigmoid) {
        for (int e = 0; e < spec.num_experts; ++e) logits[e] = 1.0f / (1.0f + std::exp(-logits[e]));
        return;
    }
    float largest = *std::max_element(logits, logits + spec.num_experts), total = 0;
    for (int e = 0; e < spec.num_experts; ++e) total += logits[e] = std::exp(logits[e] - largest);
    for (int e = 0; e < spec.num_experts; ++e) logits[e] /= total;
}

// The `count` largest of n values; ties to the lower index.
void largest(const float* values, int n, int count, int32_t* index) {
    for (int slot = 0; slot < count; ++slot) {
        int best = -1;
        for (int i = 0; i < n; ++i)
            if (std::find(index, index + slot, i) == index + slot && (best < 0 || values[i] > values[best])) best = i;
        index[slot] = best;
    }
}

// Only the groups whose best expert is largest, or the sum of their two best, stay eligible.
void drop_groups(const FeedForwardSpec& spec, float* choice) {
    if (spec.num_active_groups == spec.num_groups) return;
    int size = spec.num_experts / spec.num_groups;
    float sums[kMaxExperts];
    int32_t kept[kMaxExperts];
    for (int g = 0; g < spec.num_groups; ++g) {
        float first = kNever, second = kNever;
        for (const float* value = choice + g * size; value < choice + (g + 1) * size; ++value) {
            if (*value > first) second = std::exchange(first, *value);
            else second = std::max(second, *value);
        }
        sums[g] = size > 1 && spec.num_judged > 1 ? first + second : first;
    }
    largest(sums, spec.num_groups, spec.num_active_groups, kept);
    for (int g = 0; g < spec.num_groups; ++g)
        if (std::find(kept, kept + spec.num_active_groups, g) == kept + spec.num_active_groups)
            std::fill_n(choice + g * size, size, kNever);
}

// One expert after the other, the largest first: its share is a softmax over those not yet taken that are near it.
void mix_sparsely(const FeedForwardSpec& spec, const float* logits, int32_t* index, float* weight) {
    for (int slot = 0; slot < spec.num_active; ++slot) {
        int best = -1;
        for (int e = 0; e < spec.num_experts; ++e)
            if (std::find(index, index + slot, e) == index + slot && (best < 0 || logits[e] > logits[best])) best = e;
        float total = 0;
        for (int e = 0; e < spec.num_experts; ++e) {
            if (std::find(index, index + slot, e) != index + slot) continue;
            float distance = (logits[best] - logits[e]) / std::max(std::abs(logits[e]), logits[best]);
            if (!(distance > spec.mixer_margin)) total += std::exp(logits[e] - logits[best]);
        }
        index[slot] = best;
        weight[slot] = 1.0f / total;
    }
    for (int slot = 1; slot < spec.num_active; ++slot)  // in ascending order of experts
        for (int at = slot; at > 0 && index[at] < index[at - 1]; --at) {
            std::swap(index[at], index[at - 1]);
            std::swap(weight[at], weight[at - 1]);
        }
}

}  // namespace

void route(const FeedForwardSpec& spec, const float* selection_bias, const float* expert_scale, float* logits,
           int32_t* index, float* weight) {
    if (spec.mixer_margin >= 0) return mix_sparsely(spec, logits, index, weight);
    score(spec, logits);
    float choice[kMaxExperts];
    for (int e = 0; e < spec.num_experts; ++e)
        choice[e] = selection_bias == nullptr ? logits[e] : logits[e] + selection_bias[e];
    drop_groups(spec, choice);
    largest(choice, spec.num_experts, spec.num_active, index);
    std::sort(index, index + spec.num_active);
    float chosen = 0;
    for (int slot = 0; slot < spec.num_active; ++slot) chosen += weight[slot] = logits[index[slot]];
    if (spec.renormalise)
        for (int slot = 0; slot < spec.num_active; ++slot) weight[slot] /= chosen;
    if (expert_scale != nullptr)
        for (int slot = 0; slot < spec.num_active; ++slot) weight[slot] *= expert_scale[index[slot]];
    if (spec.scale != 1.0f)
        for (int slot = 0; slot < spec.num_active; ++slot) weight[slot] *= spec.scale;
}

}  // namespace kvarn
