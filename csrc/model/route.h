// Which experts a row of a mixture goes to, and with what weights.
#pragma once
#include <cstdint>

#include "spec.h"

namespace kvarn {

// logits (num_experts) of one row become scores; index and weight (num_active) are in ascending order of experts.
// selection_bias (num_experts) is added to the scores to choose by, never to the weights; null: none.
// expert_scale (num_experts) multiplies the weights in the end; null: none.
void route(const FeedForwardSpec& spec, const float* selection_bias, const float* expert_scale, float* logits,
           int32_t* index, float* weight);

}  // namespace kvarn
