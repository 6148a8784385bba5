// One step of the model: tokens in, hidden states of the wanted rows out. Interprets the plan layer by layer.
#pragma once
#include <memory>
#include <span>

#include "keep.h"
#include "step.h"

namespace kvarn {

// A batch on its way through the layers, some of them per call. Its buffers lie in the model's second arena: a new
// passage ends the one before it.
struct Passage {
    BatchView batch;  // the arrays are the caller's, and stay until the end
    std::span<const int32_t> output_rows;
    StepBuffers buffers;
    size_t next_layer = 0;
    double layer_s = 0;  // what the last layer took
    uint64_t number = 0;
};

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

    // The same in pieces: run layers for about that many seconds, at least one; true when out is filled.
    Passage begin(const BatchView& batch, std::span<const int32_t> output_rows);
    bool advance(Passage& passage, double seconds, float* out);

    size_t scratch_bytes() const { return arena_.capacity() + passage_arena_.capacity(); }

private:
    void check(const BatchView& batch, std::span<const int32_t> output_rows) const;
    void check_sequence(const BatchView& batch, int sequence) const;
    void check_keep(const BatchView& batch, const Keep& keep) const;
    void check_block(int block) const;
    StepBuffers enter(Arena& arena, const BatchView& batch);
    void leave(const StepBuffers& buffers, std::span<const int32_t> output_rows, float* out) const;
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
    Keeper keeper_;
    Arena arena_, passage_arena_;
    uint64_t num_passages_ = 0;
};

}  // namespace kvarn
