// One step of the model: tokens in, hidden states of the wanted rows out. Interprets the plan layer by layer.
#pragma once
#include <memory>
#include <span>

#include "step.h"

namespace kvarn {

class Model {
public:
    Model(ModelSpec spec, const KernelTable& kernels, std::shared_ptr<ThreadTeam> pool)
        : spec_(std::move(spec)), kernels_(kernels), pool_(std::move(pool)) {}

    Weights& weights() { return weights_; }
    KVCache& cache() { return cache_; }
    const ModelSpec& spec() const { return spec_; }
    const ModelPlan& plan() const { return plan_; }
    Compute compute() const { return {kernels_, *pool_}; }

    void finish_loading() { plan_ = make_plan(spec_, weights_); }

    // out is (output_rows, width): the states after the output norm.
    void forward(const BatchView& batch, std::span<const int32_t> output_rows, float* out);

    size_t scratch_bytes() const { return arena_.capacity(); }

private:
    void check(const BatchView& batch, std::span<const int32_t> output_rows) const;
    StepBuffers buffers_for(const BatchView& batch);
    void embed(const BatchView& batch, float* x) const;
    void run_layer(size_t index, const BatchView& batch, const StepBuffers& buffers);
    void attention_sublayer(size_t index, const BatchView& batch, const StepBuffers& buffers, const float* input,
                            float* residual);
    void rotate_and_store(size_t index, const BatchView& batch, const StepBuffers& buffers);
    void close_sublayer(Placement placement, const NormPlan& norm, const StepBuffers& buffers, int n) const;

    ModelSpec spec_;
    const KernelTable& kernels_;
    std::shared_ptr<ThreadTeam> pool_;
    Weights weights_;
    ModelPlan plan_;
    KVCache cache_;
    Arena arena_;
};

}  // namespace kvarn
