// Feed-forward sublayers: plain, gated, and a mixture of experts.
#pragma once
#include "observe.h"
#include "step.h"

namespace kvarn {

// The products that the input of a feed-forward meets first: gate and up, up alone, or the router.
struct FirstProducts {
    Projection all[2];
    size_t count;
    operator std::span<const Projection>() const { return {all, count}; }
};
FirstProducts first_products(const LayerPlan& layer, const StepBuffers& buffers);

// result (n, width) = feed-forward of in (n, width). When residual is not null the result is added to it instead.
// observed: where the inputs of the inner products are summed up; null: nowhere.
void feed_forward(const Compute& compute, const LayerPlan& layer, const StepBuffers& buffers, const Activations& in,
                  float* residual, LayerInputs* observed);

// result = mixture of experts of values (n, width), which the router chooses by in; written to buffers.result.
void mixture_of_experts(const Compute& compute, const LayerPlan& layer, const StepBuffers& buffers,
                        const Activations& in, const float* values, LayerInputs* observed);

// gate = act(gate) * up
void activate_gated(const KernelTable& kernels, Activation activation, const float* up, int n, float* gate);

}  // namespace kvarn
