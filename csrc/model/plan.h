// The execution plan: every layer with its weights resolved to pointers, built once at load and reused each step.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "spec.h"
#include "weights.h"

namespace kvarn {

struct NormPlan {
    bool is_rms;
    float eps;
    const float* weight;
    const float* bias;

    void apply(const KernelTable& kernels, const float* x, int n, float* y) const {
        if (is_rms) kernels.rms_norm(x, weight, eps, n, y);
        else kernels.layer_norm(x, weight, bias, eps, n, y);
    }
};

struct LayerPlan {
    AttentionSpec attention;
    RecurrentSpec recurrent;
    FeedForwardSpec feed_forward;
    Placement placement;
    float residual_scale;

    // before / after each sublayer, as the placement says; unused ones have a null weight
    NormPlan attention_in, attention_out, ffn_in, ffn_out;
    NormPlan attention_second;  // null: none
    const Matrix *q, *k, *v, *o;
    const float *q_bias, *k_bias, *v_bias, *o_bias;
    NormPlan q_norm, k_norm;
    // of latent attention: q is the first or only projection of queries, k that of the row that is cached
    const Matrix* q_b;
    const std::vector<Matrix>*k_b, *v_b;  // by head
    const float* sinks;                   // by query head, null: none
    int rope = -1;                        // index into ModelPlan::ropes, -1: none
    const Matrix* output_gate;            // of attention, or of a delta net
    const float* output_gate_bias;

    // of a layer with a state; where there is no attention o is its output, too
    const Matrix *state_in, *state_out;
    const float *state_in_bias, *state_out_bias;
    const Matrix *beta, *alpha;                  // of a delta net
    const float *conv, *conv_bias, *dt, *a, *d;  // (kernel, channels), (channels), (value heads)
    NormPlan state_norm;
    const Matrix *parameters, *steps;  // of a selective layer
    const float* steps_bias;
    std::vector<float> decays, parameter_unit;  // by head (key_dim, columns); weights of an rms norm: ones
    std::vector<float> query_unit, key_unit;    // weights of rms norms that make unit vectors

    const Matrix *gate, *up, *down, *router;
    const std::vector<Matrix>*gate_experts, *up_experts, *down_experts;
    const float *gate_bias, *up_bias, *down_bias;  // of a mixture: one after the other for all experts
    const float *router_bias, *selection_bias;
    const Matrix *shared_gate, *shared_up, *shared_down;
    const float* shared_share;  // (width), null: the shared expert counts whole
    const float* expert_scale;  // (experts), null: none
    const float* experts_bias;  // (width), null: none

    std::vector<float> value_unit;            // weights of the rms norm of values: ones; empty: none
    std::shared_ptr<const LayerPlan> beside;  // the experts beside the feed-forward: of it, only these are set
    NormPlan dense_out, beside_in, beside_router_in, beside_out;
    int per_layer_length = 0;
    Activation per_layer_activation = Activation::silu;
    const Matrix *per_layer_gate, *per_layer_out;
    NormPlan per_layer_norm;
    const float *output_scale, *text_scale;  // (1), null: none; of rows that are not those of a canvas
    const Matrix *laurel_in, *laurel_out;    // null: none
    NormPlan laurel_norm;

    // of several residual streams
    NormPlan stream_norm;
    const float *stream_router, *stream_predict, *stream_correct;  // (S, width), (S x S, S), (S, S)
    const float* stream_scale;                                     // (width), null: none
};

struct ModelPlan {
    std::vector<LayerPlan> layers;
    std::vector<RopeSpec> ropes;        // distinct ones
    const Matrix* embedding = nullptr;  // null: rows are joined
    const Matrix* joined = nullptr;     // (width, 2 x width)
    NormPlan joined_token_norm{}, joined_state_norm{};
    const float* positions = nullptr;
    const float* token_types = nullptr;
    NormPlan embedding_norm{}, output_norm{};
    const Matrix* head = nullptr;
    const float* head_bias = nullptr;
    bool needs_entry = false, has_beside = false;

    const Matrix *per_layer_tokens = nullptr, *per_layer_projection = nullptr;  // null: layers have no inputs
    NormPlan per_layer_norm{};
    int per_layer_width = 0;  // of the inputs of all layers
    int num_streams = 1;
    const std::vector<Matrix>*streams_in = nullptr, *streams_out = nullptr;  // null: one stream

    std::shared_ptr<const LayerPlan> canvas;  // what canvas rows read: of it, ffn_in and the feed-forward are set
    std::vector<float> unit;                  // weights of their last norm: ones

    int max_channels = 0, max_gate = 0, max_state_heads = 0, max_head_state = 0;  // of layers with a state or a gate
    int max_parameters = 0, max_steps = 0;                                        // of selective ones
    int max_latent = 0, max_head_input = 0;  // of latent attention: all heads, and what one matrix of a head reads
    int max_query = 0, max_kv = 0, max_hidden = 0, max_experts = 0, max_active = 0;  // widths over all layers
    int joined_width() const { return joined == nullptr ? 0 : joined->columns; }
    int widest_input() const;  // the largest number of columns a product of a step has
    int width = 0;
};

inline NormPlan make_norm(const NormSpec& spec, const Weights& weights, const std::string& name, int size) {
    const float* bias = spec.has_bias ? weights.vector(name + ".bias", size) : nullptr;
    return {spec.is_rms, spec.eps, weights.vector(name + ".weight", size), bias};
}

// What a layer with a state needs; prefix: of its tensors.
void add_recurrent(LayerPlan& layer, const Weights& weights, const std::string& prefix, int width);

ModelPlan make_plan(const ModelSpec& spec, const Weights& weights);  // throws when a weight is missing or misshapen

}  // namespace kvarn
