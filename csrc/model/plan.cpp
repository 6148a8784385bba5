#include "plan.h"

#include <algorithm>
#include <cmath>

namespace kvarn {

namespace {

class LayerPlanner {
public:
    LayerPlanner(const ModelSpec& spec, const BlockSpec& block, const Weights& weights, size_t index)
        : spec_(spec), block_(block), weights_(weights), prefix_("blk." + std::to_string(index) + "."),
          width_(spec.width) {}

    LayerPlan plan() {
        LayerPlan layer{};
        layer.attention = block_.attention;
        layer.recurrent = block_.recurrent;
        layer.feed_forward = block_.feed_forward;
        layer.placement = block_.placement;
        layer.residual_scale = block_.residual_scale;
        add_norms(layer);
        if (block_.attention.latent.exists()) add_latent_attention(layer);
        else if (block_.attention.exists()) add_attention(layer);
        if (block_.recurrent.exists()) add_recurrent(layer, weights_, prefix_, width_);
        if (block_.feed_forward.num_experts > 0) add_experts(layer);
        else if (block_.feed_forward.exists()) add_feed_forward(layer);
        if (block_.beside.num_experts > 0) add_beside(layer);
        if (block_.per_layer_length > 0) add_per_layer(layer);
        if (block_.laurel_rank > 0) add_laurel(layer);
        if (spec_.num_streams > 1) add_streams(layer);
        if (block_.has_output_scale) layer.output_scale = weights_.vector(prefix_ + "layer_output_scale.weight", 1);
        if (block_.has_text_scale) layer.text_scale = weights_.vector(prefix_ + "enc_layer_output_scale.weight", 1);
        return layer;
    }

private:
    NormPlan norm(const std::string& name) const { return make_norm(block_.norm, weights_, prefix_ + name, width_); }
    const float* bias(bool has_bias, const std::string& name, int size) const {
        return has_bias ? weights_.vector(prefix_ + name + ".bias", size) : nullptr;
    }
    const Matrix* matrix(const std::string& name, int rows, int columns) const {
        return &weights_.matrix(prefix_ + name + ".weight", rows, columns);
    }

    void add_norms(LayerPlan& layer) const {
        if (block_.placement == Placement::residual) {
            layer.attention_out = norm("attn_output_norm");
            if (block_.has_second_norm) layer.attention_second = norm("attn_norm_2");
            layer.ffn_out = norm("layer_output_norm");
            return;
        }
        if (block_.placement != Placement::post) {
            if (block_.has_mixer() && block_.has_attention_norm) layer.attention_in = norm("attn_norm");
            if (block_.feed_forward.exists()) layer.ffn_in = norm("ffn_norm");
        }
        if (block_.placement == Placement::sandwich || block_.placement == Placement::post) {
            layer.attention_out = norm("post_attention_norm");
            layer.ffn_out = norm("post_ffw_norm");
        }
    }

    void add_attention(LayerPlan& layer) const {
        const AttentionSpec& a = block_.attention;
        int query = a.num_heads * a.head_dim, kv = a.num_kv_heads * a.head_dim;
        layer.q = matrix("attn_q", query, width_);
        layer.o = matrix("attn_output", width_, query);
        layer.q_bias = bias(a.has_qkv_bias, "attn_q", query);
        if (a.kv_source < 0) add_keys(layer, kv);
        layer.o_bias = bias(a.has_output_bias, "attn_output", width_);
        if (a.has_output_gate) layer.output_gate = matrix("attn_gate", query, width_);
        layer.output_gate_bias = bias(a.has_output_gate && a.has_qkv_bias, "attn_gate", query);
        if (a.has_sinks) layer.sinks = weights_.vector(prefix_ + "attn_sinks.weight", a.num_heads);
        if (!a.qk_norm) return;
        bool is_row = a.is_qk_norm_over_row;
        layer.q_norm = make_norm(*a.qk_norm, weights_, prefix_ + "attn_q_norm", is_row ? query : a.head_dim);
        if (a.kv_source < 0)
            layer.k_norm = make_norm(*a.qk_norm, weights_, prefix_ + "attn_k_norm", is_row ? kv : a.head_dim);
    }

    void add_keys(LayerPlan& layer, int kv) const {
        const AttentionSpec& a = block_.attention;
        layer.k = matrix("attn_k", kv, width_);
        layer.v = matrix("attn_v", kv, width_);
        layer.k_bias = bias(a.has_qkv_bias, "attn_k", kv);
        layer.v_bias = bias(a.has_qkv_bias, "attn_v", kv);
        if (a.has_value_norm) layer.value_unit.assign(static_cast<size_t>(a.head_dim), 1.0f);
    }

    void add_beside(LayerPlan& layer) const {
        auto beside = std::make_shared<LayerPlan>();
        beside->feed_forward = block_.beside;
        add_experts(*beside);
        layer.beside = std::move(beside);
        layer.dense_out = norm("post_ffw_norm_1");
        layer.beside_in = norm("pre_ffw_norm_2");
        layer.beside_out = norm("post_ffw_norm_2");
        layer.beside_router_in = norm("ffn_gate_inp_norm");
    }

    void add_per_layer(LayerPlan& layer) const {
        layer.per_layer_length = block_.per_layer_length;
        layer.per_layer_activation = block_.per_layer_activation;
        layer.per_layer_gate = matrix("inp_gate", block_.per_layer_length, width_);
        layer.per_layer_out = matrix("proj", width_, block_.per_layer_length);
        layer.per_layer_norm = norm("post_norm");
    }

    void add_laurel(LayerPlan& layer) const {
        layer.laurel_in = matrix("laurel_l", block_.laurel_rank, width_);
        layer.laurel_out = matrix("laurel_r", width_, block_.laurel_rank);
        layer.laurel_norm = norm("laurel_post_norm");
    }

    void add_streams(LayerPlan& layer) const {
        const int s = spec_.num_streams;
        layer.stream_norm = make_norm(spec_.stream_norm, weights_, prefix_ + "altup_router_norm", width_);
        layer.stream_router = weights_.vector(prefix_ + "altup_router.weight", s * width_);
        layer.stream_predict = weights_.vector(prefix_ + "altup_predict_coef.weight", s * s * s);
        layer.stream_correct = weights_.vector(prefix_ + "altup_correct_coef.weight", s * s);
        if (spec_.has_stream_scale)
            layer.stream_scale = weights_.vector(prefix_ + "altup_correct_scale.weight", width_);
    }

    void add_latent_attention(LayerPlan& layer) const {
        const AttentionSpec& a = block_.attention;
        const LatentSpec& l = a.latent;
        int query = a.num_heads * l.head_dim();
        layer.q = l.query_rank > 0 ? matrix("attn_q_a", l.query_rank, width_) : matrix("attn_q", query, width_);
        if (l.query_rank > 0) {
            layer.q_norm = make_norm(*a.qk_norm, weights_, prefix_ + "attn_q_a_norm", l.query_rank);
            layer.q_b = matrix("attn_q_b", query, l.query_rank);
        }
        layer.k = matrix("attn_kv_a_mqa", a.head_dim, width_);
        layer.k_norm = make_norm(*a.qk_norm, weights_, prefix_ + "attn_kv_a_norm", l.rank);
        layer.k_b = &weights_.matrices(prefix_ + "attn_k_b.weight", a.num_heads, l.rank, l.nope_dim);
        layer.v_b = &weights_.matrices(prefix_ + "attn_v_b.weight", a.num_heads, l.value_dim, l.rank);
        layer.o = matrix("attn_output", width_, a.num_heads * l.value_dim);
    }

    void add_feed_forward(LayerPlan& layer) const {
        const FeedForwardSpec& f = block_.feed_forward;
        if (f.is_gated) layer.gate = matrix("ffn_gate", f.hidden, width_);
        layer.up = matrix("ffn_up", f.hidden, width_);
        layer.down = matrix("ffn_down", width_, f.hidden);
        layer.gate_bias = bias(f.has_bias && f.is_gated, "ffn_gate", f.hidden);
        layer.up_bias = bias(f.has_bias, "ffn_up", f.hidden);
        layer.down_bias = bias(f.has_bias, "ffn_down", width_);
    }

    void add_experts(LayerPlan& layer) const {
        const FeedForwardSpec& f = layer.feed_forward;
        if (f.has_expert_scale) layer.expert_scale = weights_.vector(prefix_ + "ffn_down_exps.scale", f.num_experts);
        layer.router = matrix("ffn_gate_inp", f.num_experts, width_);
        if (f.is_gated)
            layer.gate_experts = &weights_.matrices(prefix_ + "ffn_gate_exps.weight", f.num_experts, f.hidden, width_);
        layer.up_experts = &weights_.matrices(prefix_ + "ffn_up_exps.weight", f.num_experts, f.hidden, width_);
        layer.down_experts = &weights_.matrices(prefix_ + "ffn_down_exps.weight", f.num_experts, width_, f.hidden);
        layer.gate_bias = bias(f.has_expert_bias && f.is_gated, "ffn_gate_exps", f.num_experts * f.hidden);
        layer.up_bias = bias(f.has_expert_bias, "ffn_up_exps", f.num_experts * f.hidden);
        layer.down_bias = bias(f.has_expert_bias, "ffn_down_exps", f.num_experts * width_);
        layer.router_bias = bias(f.has_router_bias, "ffn_gate_inp", f.num_experts);
        layer.experts_bias = bias(f.has_output_bias, "ffn_exps", width_);
        layer.selection_bias = bias(f.has_selection_bias, "exp_probs_b", f.num_experts);
        if (f.shared_hidden == 0) return;
        if (f.is_gated) layer.shared_gate = matrix("ffn_gate_shexp", f.shared_hidden, width_);
        layer.shared_up = matrix("ffn_up_shexp", f.shared_hidden, width_);
        layer.shared_down = matrix("ffn_down_shexp", width_, f.shared_hidden);
        if (f.has_shared_gate) layer.shared_share = weights_.vector(prefix_ + "ffn_gate_inp_shexp.weight", width_);
    }

    const ModelSpec& spec_;
    const BlockSpec& block_;
    const Weights& weights_;
    std::string prefix_;
    int width_;
};

int find_or_add(std::vector<RopeSpec>& ropes, const std::optional<RopeSpec>& rope) {
    if (!rope) return -1;
    auto found = std::find(ropes.begin(), ropes.end(), *rope);
    if (found == ropes.end()) found = ropes.insert(ropes.end(), *rope);
    return static_cast<int>(found - ropes.begin());
}

void widen(ModelPlan& plan, const LayerPlan& layer) {
    const AttentionSpec& a = layer.attention;
    const RecurrentSpec& r = layer.recurrent;
    plan.max_query = std::max(
        {plan.max_query, a.num_heads * a.head_dim, a.num_heads * a.latent.value_dim, r.exists() ? r.input_width() : 0});
    plan.max_latent = std::max(plan.max_latent, a.num_heads * std::max(a.latent.head_dim(), a.latent.rank));
    plan.max_head_input = std::max({plan.max_head_input, a.latent.nope_dim, a.latent.rank});
    if (r.exists()) plan.max_channels = std::max(plan.max_channels, r.channels());
    if (layer.output_gate != nullptr) plan.max_gate = std::max(plan.max_gate, layer.output_gate->rows);
    plan.max_state_heads = std::max(plan.max_state_heads, r.num_value_heads);
    plan.max_head_state = std::max(plan.max_head_state, r.key_dim * r.value_dim);
    plan.max_kv = std::max({plan.max_kv, a.num_kv_heads * a.head_dim, a.latent.query_rank});
    plan.max_hidden = std::max({plan.max_hidden, layer.feed_forward.hidden, layer.feed_forward.shared_hidden,
                                layer.per_layer_length, layer.laurel_in == nullptr ? 0 : layer.laurel_in->rows});
    const bool is_parallel = layer.placement == Placement::parallel || (a.exists() && r.exists());
    plan.needs_entry = plan.needs_entry || is_parallel || layer.attention_second.weight != nullptr;
    plan.max_parameters = std::max(plan.max_parameters, r.parameters());
    if (r.is(RecurrentKind::selective)) plan.max_steps = std::max(plan.max_steps, r.values());
    plan.max_experts = std::max(plan.max_experts, layer.feed_forward.num_experts);
    plan.max_active = std::max(plan.max_active, layer.feed_forward.num_active);
    if (layer.beside) widen(plan, *layer.beside);
    plan.has_beside = plan.has_beside || layer.beside;
}

void add_per_layer_embedding(ModelPlan& plan, const ModelSpec& spec, const Weights& weights) {
    if (spec.per_layer_length == 0) return;
    plan.per_layer_width = spec.per_layer_length * static_cast<int>(spec.blocks.size());
    plan.per_layer_tokens =
        &weights.matrix("per_layer_token_embd.weight", spec.per_layer_vocab_size, plan.per_layer_width);
    plan.per_layer_projection = &weights.matrix("per_layer_model_proj.weight", plan.per_layer_width, spec.width);
    plan.per_layer_norm = make_norm(spec.per_layer_norm, weights, "per_layer_proj_norm", spec.per_layer_length);
}

void add_canvas(ModelPlan& plan, const CanvasSpec& spec, const Weights& weights) {
    if (!spec.feed_forward.exists()) return;
    const int hidden = spec.feed_forward.hidden, width = plan.width;
    auto layer = std::make_shared<LayerPlan>();
    layer->feed_forward = spec.feed_forward;
    layer->ffn_in = make_norm(spec.norm, weights, "self_cond_pre_norm", width);
    layer->gate = &weights.matrix("self_cond_gate.weight", hidden, width);
    layer->up = &weights.matrix("self_cond_up.weight", hidden, width);
    layer->down = &weights.matrix("self_cond_down.weight", width, hidden);
    widen(plan, *layer);
    plan.canvas = std::move(layer);
    plan.unit.assign(static_cast<size_t>(width), 1.0f);
}

}  // namespace

int ModelPlan::widest_input() const { return std::max({width, joined_width(), max_query, max_kv, max_hidden}); }

ModelPlan make_plan(const ModelSpec& spec, const Weights& weights) {
    ModelPlan plan;
    plan.width = spec.width;
    for (size_t i = 0; i < spec.blocks.size(); ++i) {
        plan.layers.push_back(LayerPlanner(spec, spec.blocks[i], weights, i).plan());
        plan.layers.back().rope = find_or_add(plan.ropes, spec.blocks[i].attention.rope);
        widen(plan, plan.layers.back());
    }
    if (spec.joined_norm) {
        plan.joined = &weights.matrix("eh_proj.weight", spec.width, 2 * spec.width);
        plan.joined_token_norm = make_norm(*spec.joined_norm, weights, "enorm", spec.width);
        plan.joined_state_norm = make_norm(*spec.joined_norm, weights, "hnorm", spec.width);
    } else {
        plan.embedding = &weights.matrix("token_embd.weight", spec.vocab_size, spec.width);
    }
    add_per_layer_embedding(plan, spec, weights);
    add_canvas(plan, spec.canvas, weights);
    plan.num_streams = spec.num_streams;
    if (spec.num_streams > 1) {
        plan.streams_in = &weights.matrices("altup_proj.weight", spec.num_streams - 1, spec.width, spec.width);
        plan.streams_out = &weights.matrices("altup_unembd_proj.weight", spec.num_streams - 1, spec.width, spec.width);
    }
    if (spec.num_positions > 0)
        plan.positions = weights.vector("position_embd.weight", spec.num_positions * spec.width);
    if (spec.has_token_types) plan.token_types = weights.vector("token_types.weight", spec.width);
    if (spec.embedding_norm)
        plan.embedding_norm = make_norm(*spec.embedding_norm, weights, "token_embd_norm", spec.width);
    if (spec.output_norm) plan.output_norm = make_norm(*spec.output_norm, weights, "output_norm", spec.width);
    if (spec.has_head)
        plan.head = spec.is_head_tied ? plan.embedding : &weights.matrix("output.weight", spec.vocab_size, spec.width);
    if (spec.has_head_bias) plan.head_bias = weights.vector("output.bias", spec.vocab_size);
    return plan;
}

}  // namespace kvarn
