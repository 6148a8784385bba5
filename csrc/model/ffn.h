// Feed-forward sublayers: plain, gated, and a mixture of experts.
#pragma once
#include "step.h"

namespace kvarn {

// result (n, width) = feed-forward of input (n, width). When residual is not null the result is added to it instead.
void feed_forward(const Compute& compute, const LayerPlan& layer, const StepBuffers& buffers, const float* input, int n,
                  int width, float* residual);

// result = mixture of experts of input; written to buffers.result.
void mixture_of_experts(const Compute& compute, const LayerPlan& layer, const StepBuffers& buffers, const float* input,
                        int n, int width);

}  // namespace kvarn
