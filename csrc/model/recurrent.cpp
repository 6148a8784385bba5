// Layers with a state: their weights, and their part of a step around states.cpp.
#include <cmath>

#include "forward.h"

namespace kvarn {

namespace {

class RecurrentPlanner {
public:
    RecurrentPlanner(LayerPlan& layer, const Weights& weights, const std::string& prefix, int width)
        : layer_(layer), spec_(layer.recurrent), weights_(weights), prefix_(prefix), width_(width) {}

    void add_short_conv() const {
        layer_.state_in = matrix("shortconv.in_proj", 3 * spec_.conv_width, width_);
        layer_.state_out = matrix("shortconv.out_proj", width_, spec_.conv_width);
        layer_.conv = vector("shortconv.conv.weight", spec_.kernel * spec_.conv_width);
    }

    void add_delta_net() const {
        const int heads = spec_.num_value_heads;
        layer_.state_in = matrix("attn_qkv", spec_.channels(), width_);
        layer_.state_out = matrix("ssm_out", width_, spec_.values());
        layer_.output_gate = matrix("attn_gate", spec_.values(), width_);
        layer_.beta = matrix("ssm_beta", heads, width_);
        layer_.alpha = matrix("ssm_alpha", heads, width_);
        layer_.conv = vector("ssm_conv1d.weight", spec_.kernel * spec_.channels());
        layer_.dt = vector("ssm_dt.bias", heads);
        layer_.a = vector("ssm_a", heads);
        layer_.state_norm = make_norm(*spec_.norm, weights_, prefix_ + "ssm_norm", spec_.value_dim);
        const size_t size = static_cast<size_t>(spec_.key_dim);
        layer_.key_unit.assign(size, 1.0f / std::sqrt(static_cast<float>(spec_.key_dim)));
        layer_.query_unit.assign(size, 1.0f / static_cast<float>(spec_.key_dim));
    }

    void add_state_space() const {
        const int heads = spec_.num_value_heads;
        add_projections();
        layer_.dt = vector("ssm_dt.bias", heads);
        layer_.a = vector("ssm_a", heads);
        layer_.d = vector("ssm_d", heads);
        if (spec_.norm) layer_.state_norm = make_norm(*spec_.norm, weights_, prefix_ + "ssm_norm", spec_.values());
    }

    void add_selective() const {
        const int values = spec_.values();
        add_projections();
        layer_.parameters = matrix("ssm_x", spec_.parameters(), values);
        layer_.steps = matrix("ssm_dt", values, spec_.rank);
        layer_.steps_bias = vector("ssm_dt.bias", values);
        layer_.d = vector("ssm_d", values);
        const float* a = vector("ssm_a", values * spec_.key_dim);  // (channels, key_dim)
        for (int h = 0; h < spec_.num_value_heads; ++h)
            for (int i = 0; i < spec_.key_dim; ++i)
                for (int c = 0; c < spec_.head_columns(h); ++c)
                    layer_.decays.push_back(a[(h * spec_.value_dim + c) * spec_.key_dim + i]);
        layer_.parameter_unit.assign(static_cast<size_t>(std::max(spec_.rank, spec_.key_dim)), 1.0f);
    }

private:
    // What both kinds of state spaces have.
    void add_projections() const {
        layer_.state_in = matrix("ssm_in", spec_.input_width(), width_);
        layer_.state_in_bias = spec_.has_bias ? vector("ssm_in.bias", spec_.input_width()) : nullptr;
        layer_.state_out = matrix("ssm_out", width_, spec_.values());
        layer_.state_out_bias = spec_.has_output_bias ? vector("ssm_out.bias", width_) : nullptr;
        layer_.conv = vector("ssm_conv1d.weight", spec_.kernel * spec_.channels());
        layer_.conv_bias = spec_.has_conv_bias ? vector("ssm_conv1d.bias", spec_.channels()) : nullptr;
    }

    const float* vector(const std::string& name, int size) const { return weights_.vector(prefix_ + name, size); }
    const Matrix* matrix(const std::string& name, int rows, int columns) const {
        return &weights_.matrix(prefix_ + name + ".weight", rows, columns);
    }

    LayerPlan& layer_;
    const RecurrentSpec& spec_;
    const Weights& weights_;
    const std::string& prefix_;
    int width_;
};

}  // namespace

void add_recurrent(LayerPlan& layer, const Weights& weights, const std::string& prefix, int width) {
    const RecurrentPlanner planner(layer, weights, prefix, width);
    switch (layer.recurrent.kind) {
        case RecurrentKind::short_conv: planner.add_short_conv(); break;
        case RecurrentKind::delta_net: planner.add_delta_net(); break;
        case RecurrentKind::state_space: planner.add_state_space(); break;
        case RecurrentKind::selective: planner.add_selective(); break;
    }
    if (layer.attention.exists()) return;
    layer.o = layer.state_out;
    layer.o_bias = layer.state_out_bias;
}

// All of a layer with a state but its output projection; beside attention that, too.
void Model::compute_recurrent(size_t index, const BatchView& batch, const StepBuffers& buffers) {
    const LayerPlan& layer = plan_.layers[index];
    const RecurrentSpec& spec = layer.recurrent;
    const size_t heads = static_cast<size_t>(spec.num_value_heads), values = static_cast<size_t>(spec.values());
    Projection inputs[] = {{layer.state_in, buffers.q, static_cast<size_t>(spec.input_width()), layer.state_in_bias},
                           {layer.output_gate, buffers.output_gate, values, nullptr},
                           {layer.beta, buffers.beta, heads, nullptr},
                           {layer.alpha, buffers.decay, heads, nullptr}};
    const size_t count = spec.is(RecurrentKind::delta_net) ? 4 : 1;
    Activations in = normed(buffers.x, layer.attention_in, buffers, batch.num_tokens, {inputs, count});
    if (LayerInputs* observed = observed_of(index)) observed->qkv.add(compute(), in.values, in.n);
    project(compute(), in, {inputs, count});
    Projection output{layer.state_out, buffers.entry, static_cast<size_t>(spec_.width), layer.state_out_bias};
    Activations out = reserve(buffers.quants, buffers.mixed, batch.num_tokens, spec.values(), {&output, 1});
    run_recurrent(compute(), layer, states_, index, batch, buffers, out);
    if (layer.attention.exists()) project(compute(), out, {&output, 1});
}

}  // namespace kvarn
