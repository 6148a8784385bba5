// One step of the model: tokens in, hidden states of the wanted rows out. Interprets the plan layer by layer.
#pragma once
#include <memory>
#include <span>

#include "keep.h"
#include "observe.h"
#include "resumable_forward.h"
#include "states.h"
#include "step.h"

namespace kvarn {

class Model {
public:
    Model(ModelSpec spec, const KernelTable& kernels, std::shared_ptr<ThreadTeam> pool)
        : spec_(std::move(spec)), kernels_(kernels), pool_(std::move(pool)) {}

    Weights& weights() { return weights_; }
    KVCache& cache(bool is_windowed = false) { return is_windowed ? window_cache_ : cache_; }
    // Which layers keep their window only, in the windowed cache; none of them from the start.
    void keep_windows(std::vector<bool> layers);
    StateStore& states() { return states_; }
    const ModelSpec& spec() const { return spec_; }
    const ModelPlan& plan() const { return plan_; }
    Compute compute() const { return {kernels_, *pool_}; }

    void finish_loading() { plan_ = make_plan(spec_, weights_); }
    const Weights& weights() const { return weights_; }

    // From now on sum up what every matrix reads, beginning at zero.
    void observe_inputs();
    LayerInputs& observed(size_t layer) { return observed_.at(layer); }

    // out is (ids, width): their rows of the embedding, scaled, as layers that join them with states read them.
    void embed_tokens(std::span<const int32_t> ids, float* out) const;

    // out is (output_rows, width): the states after the output norm.
    void forward(const BatchView& batch, std::span<const int32_t> output_rows, float* out) {
        forward_from(0, batch, output_rows, out, nullptr);
    }
    // The layers from `first` on. states (layers, tokens, width), or null: what each layer reads. From layer 0 on they
    // are written; from a later one on, its states are where the pass begins.
    void forward_from(size_t first, const BatchView& batch, std::span<const int32_t> output_rows, float* out,
                      float* states);

    // The same in pieces: compute for that many seconds on average, at least one piece; true when out is filled.
    // The buffers lie in a second arena: a new resumable pass ends the one before it.
    ResumableForward begin(const BatchView& batch, std::span<const int32_t> output_rows);
    bool advance(ResumableForward& forward, double seconds, float* out);

    size_t scratch_bytes() const { return arena_.capacity() + resumable_arena_.capacity(); }

private:
    void check(const BatchView& batch, std::span<const int32_t> output_rows) const;
    void check_sequence(const BatchView& batch, int sequence) const;
    void check_window(const BatchView& batch, int sequence) const;
    void check_states(const BatchView& batch) const;
    void check_keep(const BatchView& batch, const Keep& keep) const;
    void check_canvases(const BatchView& batch) const;
    const KVCache& cache_of(size_t layer) const {
        return windowed_.empty() || !windowed_[layer] ? cache_ : window_cache_;
    }
    StepBuffers prepare_step(Arena& arena, const BatchView& batch);
    void write_outputs(const StepBuffers& buffers, std::span<const int32_t> output_rows, float* out) const;
    void embed(const BatchView& batch, const StepBuffers& buffers) const;
    void condition_canvases(const BatchView& batch, const StepBuffers& buffers) const;
    void run_piece(ResumableForward& forward);
    void compute_recurrent(size_t index, const BatchView& batch, const StepBuffers& buffers);
    void compute_latent(size_t index, const BatchView& batch, const StepBuffers& buffers);
    void rotate_and_store_latent(size_t index, const BatchView& batch, const StepBuffers& buffers);
    void mix_latents(const LayerPlan& layer, const StepBuffers& buffers, const Activations& out) const;
    void compute_qkv(size_t index, const BatchView& batch, const StepBuffers& buffers);
    void run_attention(size_t index, const BatchView& batch, const StepBuffers& buffers,
                       std::span<const QueryRun> runs) const;
    void finish_attention(size_t index, const BatchView& batch, const StepBuffers& buffers);
    void run_feed_forward(size_t index, const BatchView& batch, const StepBuffers& buffers);
    void run_beside(size_t index, const BatchView& batch, const StepBuffers& buffers);
    void join_inputs(const BatchView& batch, const StepBuffers& buffers) const;
    void embed_layer_inputs(const BatchView& batch, const StepBuffers& buffers) const;
    void finish_layer(size_t index, const BatchView& batch, const StepBuffers& buffers);
    void add_laurel(const LayerPlan& layer, int n, const StepBuffers& buffers) const;
    void add_layer_input(size_t index, int n, const StepBuffers& buffers) const;
    void split_streams(int n, const StepBuffers& buffers) const;
    void merge_streams(int n, const StepBuffers& buffers) const;
    void predict_streams(size_t index, int n, const StepBuffers& buffers) const;
    void correct_streams(size_t index, int n, const StepBuffers& buffers) const;
    void stream_modes(const LayerPlan& layer, const float* x, float* work, float* modes) const;
    Activations normed(const float* x, const NormPlan& norm, const StepBuffers& buffers, int n,
                       std::span<const Projection> projections) const;
    Projection attention_output(size_t index, const StepBuffers& buffers) const;
    Activations mixed(size_t index, const BatchView& batch, const StepBuffers& buffers) const;
    void normalise_heads(const LayerPlan& layer, float* q, float* k) const;
    void rotate_and_store(size_t index, const BatchView& batch, const StepBuffers& buffers);
    LayerInputs* observed_of(size_t layer) { return observed_.empty() ? nullptr : &observed_[layer]; }
    void add_residual(const LayerPlan& layer, const NormPlan& norm, const StepBuffers& buffers, int n) const;

    ModelSpec spec_;
    const KernelTable& kernels_;
    std::shared_ptr<ThreadTeam> pool_;
    Weights weights_;
    ModelPlan plan_;
    KVCache cache_, window_cache_{true};
    std::vector<bool> windowed_;  // by layer; empty: none
    int widest_window_ = 0;       // of those
    StateStore states_;
    Keeper keeper_;
    std::vector<LayerInputs> observed_;  // empty: nobody asked
    Arena arena_, resumable_arena_;
    uint64_t num_resumable_ = 0;
};

}  // namespace kvarn
