#include "ffn.h"

#include <cmath>
#include <cstring>

namespace kvarn {

namespace {

void activate_gated(const KernelTable& kernels, Activation activation, const float* up, int n, float* gate) {
    if (activation == Activation::silu) return kernels.silu_mul(gate, up, n, gate);
    if (activation == Activation::gelu_tanh) return kernels.gelu_tanh_mul(gate, up, n, gate);
    kernels.gelu(gate, n, gate);
    for (int i = 0; i < n; ++i) gate[i] *= up[i];
}

// buffers.gate (in.n, hidden) = act(gate x) * up x, or act(up x) without a gate; quantised for `down` as it is made.
Activations expand(const Compute& compute, const FeedForwardSpec& spec, std::span<const Projection> products,
                   const StepBuffers& buffers, const Activations& in, const Projection& down) {
    size_t stride = static_cast<size_t>(spec.hidden);
    Activations hidden = reserve(buffers.hidden_quants, buffers.gate, in.n, spec.hidden, {&down, 1});
    if (!spec.is_gated) {
        project(compute, in, products, [&](size_t, Tokens tokens, int begin, int end) {
            for (int row = tokens.begin; row < tokens.end; ++row) {
                float* values = buffers.gate + static_cast<size_t>(row) * stride + begin;
                compute.kernels.gelu(values, end - begin, values);
                hidden.quantize(compute.kernels, row, begin, end);
            }
        });
        return hidden;
    }
    project_pair(compute, in, products[0], products[1], [&](Tokens tokens, int begin, int end) {
        for (int row = tokens.begin; row < tokens.end; ++row) {
            size_t at = static_cast<size_t>(row) * stride + static_cast<size_t>(begin);
            activate_gated(compute.kernels, spec.activation, buffers.up + at, end - begin, buffers.gate + at);
            hidden.quantize(compute.kernels, row, begin, end);
        }
    });
    return hidden;
}

// The num_active most probable experts of one row, in ascending index, with their weights.
void route(const FeedForwardSpec& spec, float* logits, int32_t* index, float* weight) {
    float largest = *std::max_element(logits, logits + spec.num_experts);
    float total = 0;
    for (int e = 0; e < spec.num_experts; ++e) total += logits[e] = std::exp(logits[e] - largest);
    for (int slot = 0; slot < spec.num_active; ++slot) {
        int best = -1;
        for (int e = 0; e < spec.num_experts; ++e)
            if (std::find(index, index + slot, e) == index + slot && (best < 0 || logits[e] > logits[best])) best = e;
        index[slot] = best;
    }
    std::sort(index, index + spec.num_active);
    float chosen = 0;
    for (int slot = 0; slot < spec.num_active; ++slot) chosen += weight[slot] = logits[index[slot]] / total;
    if (spec.renormalise)
        for (int slot = 0; slot < spec.num_active; ++slot) weight[slot] /= chosen;
}

}  // namespace

FirstProducts first_products(const LayerPlan& layer, const StepBuffers& buffers) {
    const FeedForwardSpec& spec = layer.feed_forward;
    size_t hidden = static_cast<size_t>(spec.hidden);
    if (spec.num_experts > 0)
        return {{{layer.router, buffers.router, static_cast<size_t>(spec.num_experts), nullptr}}, 1};
    if (!spec.is_gated) return {{{layer.up, buffers.gate, hidden, layer.up_bias}}, 1};
    return {{{layer.gate, buffers.gate, hidden, layer.gate_bias}, {layer.up, buffers.up, hidden, layer.up_bias}}, 2};
}

void feed_forward(const Compute& compute, const LayerPlan& layer, const StepBuffers& buffers, const Activations& in,
                  float* residual, LayerInputs* observed) {
    size_t width = static_cast<size_t>(in.k);
    Projection down{layer.down, buffers.result, width, layer.down_bias};
    Activations hidden = expand(compute, layer.feed_forward, first_products(layer, buffers), buffers, in, down);
    if (observed != nullptr) observed->ffn_down.add(compute, hidden.values, hidden.n);
    project(compute, hidden, {&down, 1}, [&](size_t, Tokens tokens, int begin, int end) {
        if (residual == nullptr) return;
        for (int row = tokens.begin; row < tokens.end; ++row) {
            size_t at = static_cast<size_t>(row) * width + static_cast<size_t>(begin);
            compute.kernels.add(buffers.result + at, end - begin, residual + at);
        }
    });
}

void mixture_of_experts(const Compute& compute, const LayerPlan& layer, const StepBuffers& buffers,
                        const Activations& in, LayerInputs* observed) {
    const FeedForwardSpec& spec = layer.feed_forward;
    int n = in.n, width = in.k;
    size_t active = static_cast<size_t>(spec.num_active), columns = static_cast<size_t>(width);
    size_t hidden = static_cast<size_t>(spec.hidden);
    project(compute, in, first_products(layer, buffers));
    for_rows(compute, n, [&](int row) {
        size_t r = static_cast<size_t>(row);
        route(spec, buffers.router + r * static_cast<size_t>(spec.num_experts), buffers.expert_index + r * active,
              buffers.expert_weight + r * active);
    });
    std::memset(buffers.result, 0, static_cast<size_t>(n) * columns * sizeof(float));

    // Experts in ascending index, each over the rows that chose it: every row adds its experts in the same order.
    for (int e = 0; e < spec.num_experts; ++e) {
        int count = 0;
        for (int row = 0; row < n; ++row) {
            const int32_t* index = buffers.expert_index + static_cast<size_t>(row) * active;
            if (std::find(index, index + active, e) == index + active) continue;
            std::memcpy(buffers.expert_in + static_cast<size_t>(count) * columns,
                        in.values + static_cast<size_t>(row) * columns, columns * sizeof(float));
            buffers.expert_rows[count++] = row;
        }
        if (count == 0) continue;
        size_t part = static_cast<size_t>(e);
        Projection gated[] = {{&(*layer.gate_experts)[part], buffers.gate, hidden, nullptr},
                              {&(*layer.up_experts)[part], buffers.up, hidden, nullptr}};
        Activations chosen = prepare(compute, buffers.quants, buffers.expert_in, count, width, gated);
        Projection down{&(*layer.down_experts)[part], buffers.expert_out, columns, nullptr};
        Activations inner = expand(compute, spec, gated, buffers, chosen, down);
        if (observed != nullptr) {
            observed->expert_in.add(compute, chosen.values, count, e);
            observed->ffn_down.add(compute, inner.values, count, e);
        }
        project(compute, inner, {&down, 1});
        for_rows(compute, count, [&](int i) {
            size_t row = static_cast<size_t>(buffers.expert_rows[i]);
            const int32_t* index = buffers.expert_index + row * active;
            float weight =
                buffers.expert_weight[row * active + static_cast<size_t>(std::find(index, index + active, e) - index)];
            const float* from = buffers.expert_out + static_cast<size_t>(i) * columns;
            float* to = buffers.result + row * columns;
            for (size_t c = 0; c < columns; ++c) to[c] += weight * from[c];
        });
    }
}

}  // namespace kvarn
