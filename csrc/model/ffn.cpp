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

struct Hidden {
    const Matrix *gate, *up;
    const float *gate_bias, *up_bias;
};

// buffers.gate (n, hidden) = act(gate x) * up x, or act(up x) without a gate.
void expand(const Compute& compute, const FeedForwardSpec& spec, const Hidden& weights, const StepBuffers& buffers,
            const float* input, int n, int width) {
    size_t stride = static_cast<size_t>(spec.hidden);
    Projection up{weights.up, spec.is_gated ? buffers.up : buffers.gate, stride, weights.up_bias};
    if (!spec.is_gated) {
        Activations in = prepare(compute, buffers.quants, input, n, width, {&up, 1});
        project(compute, in, {&up, 1}, [&](size_t, int begin, int end) {
            for (int row = 0; row < n; ++row) {
                float* values = buffers.gate + static_cast<size_t>(row) * stride + begin;
                compute.kernels.gelu(values, end - begin, values);
            }
        });
        return;
    }
    Projection gate{weights.gate, buffers.gate, stride, weights.gate_bias};
    Projection both[] = {gate, up};
    Activations in = prepare(compute, buffers.quants, input, n, width, both);
    project_pair(compute, in, gate, up, [&](int begin, int end) {
        for (int row = 0; row < n; ++row) {
            size_t at = static_cast<size_t>(row) * stride + static_cast<size_t>(begin);
            activate_gated(compute.kernels, spec.activation, buffers.up + at, end - begin, buffers.gate + at);
        }
    });
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

void feed_forward(const Compute& compute, const LayerPlan& layer, const StepBuffers& buffers, const float* input, int n,
                  int width, float* residual) {
    const FeedForwardSpec& spec = layer.feed_forward;
    expand(compute, spec, {layer.gate, layer.up, layer.gate_bias, layer.up_bias}, buffers, input, n, width);
    Projection down{layer.down, buffers.result, static_cast<size_t>(width), layer.down_bias};
    Activations in = prepare(compute, buffers.quants, buffers.gate, n, spec.hidden, {&down, 1});
    project(compute, in, {&down, 1}, [&](size_t, int begin, int end) {
        if (residual == nullptr) return;
        for (int row = 0; row < n; ++row) {
            size_t at = static_cast<size_t>(row) * static_cast<size_t>(width) + static_cast<size_t>(begin);
            compute.kernels.add(buffers.result + at, end - begin, residual + at);
        }
    });
}

void mixture_of_experts(const Compute& compute, const LayerPlan& layer, const StepBuffers& buffers, const float* input,
                        int n, int width) {
    const FeedForwardSpec& spec = layer.feed_forward;
    size_t active = static_cast<size_t>(spec.num_active), columns = static_cast<size_t>(width);
    Projection router{layer.router, buffers.router, static_cast<size_t>(spec.num_experts), nullptr};
    project(compute, prepare(compute, buffers.quants, input, n, width, {&router, 1}), {&router, 1});
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
                        input + static_cast<size_t>(row) * columns, columns * sizeof(float));
            buffers.expert_rows[count++] = row;
        }
        if (count == 0) continue;
        size_t part = static_cast<size_t>(e);
        expand(compute, spec, {&(*layer.gate_experts)[part], &(*layer.up_experts)[part], nullptr, nullptr}, buffers,
               buffers.expert_in, count, width);
        Projection down{&(*layer.down_experts)[part], buffers.expert_out, columns, nullptr};
        project(compute, prepare(compute, buffers.quants, buffers.gate, count, spec.hidden, {&down, 1}), {&down, 1});
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
