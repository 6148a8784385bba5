#include "ffn.h"

#include <cmath>
#include <cstring>

#include "route.h"

namespace kvarn {

namespace {

// (up + 1) * gate * sigmoid(1.702 gate), gate at most 7 and up within -7 .. 7.
void swiglu_oai(const float* up, int n, float* gate) {
    for (int i = 0; i < n; ++i) {
        float g = std::min(gate[i], 7.0f), u = std::clamp(up[i], -7.0f, 7.0f);
        gate[i] = (u + 1.0f) * (g / (1.0f + std::exp(-1.702f * g)));
    }
}

// What exceeds the mean by so many standard deviations.
void cut_off(float deviations, int n, float* x) {
    double sum = 0, squares = 0;
    for (int i = 0; i < n; ++i) sum += x[i];
    const double mean = sum / n;
    for (int i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
    const float least = static_cast<float>(mean + std::sqrt(squares / n) * deviations);
    for (int i = 0; i < n; ++i) x[i] = std::max(x[i] - least, 0.0f);
}

void relu(int n, float* x) {
    for (int i = 0; i < n; ++i) x[i] = std::max(x[i], 0.0f);
}

void square_relu(int n, float* x) {
    for (int i = 0; i < n; ++i) x[i] = x[i] > 0.0f ? x[i] * x[i] : 0.0f;
}

}  // namespace

void activate_gated(const KernelTable& kernels, Activation activation, const float* up, int n, float* gate) {
    switch (activation) {
        case Activation::silu: return kernels.silu_mul(gate, up, n, gate);
        case Activation::gelu_tanh: return kernels.gelu_tanh_mul(gate, up, n, gate);
        case Activation::swiglu_oai: return swiglu_oai(up, n, gate);
        case Activation::gelu: kernels.gelu(gate, n, gate); break;
        case Activation::relu: relu(n, gate); break;
        case Activation::relu2: square_relu(n, gate); break;
    }
    for (int i = 0; i < n; ++i) gate[i] *= up[i];
}

namespace {

// The gated kernels with a factor of one, a piece at a time.
void activate_plain(const KernelTable& kernels, Activation activation, int n, float* x) {
    if (activation == Activation::gelu) return kernels.gelu(x, n, x);
    if (activation == Activation::relu) return relu(n, x);
    if (activation == Activation::relu2) return square_relu(n, x);
    constexpr int kPiece = 64;
    float ones[kPiece];
    std::fill_n(ones, kPiece, 1.0f);
    for (int i = 0; i < n; i += kPiece) activate_gated(kernels, activation, ones, std::min(kPiece, n - i), x + i);
}

// act(gate x) * up x, or act(up x) without a gate, (in.n, hidden), quantised for `down` as it is made. The values
// themselves go to buffers.gate where they are wanted, or where `down` is of floats.
Activations expand(const Compute& compute, const FeedForwardSpec& spec, std::span<const Projection> products,
                   const StepBuffers& buffers, const Activations& in, const Projection& down, bool wants_values) {
    int columns = down.weight->columns;
    size_t stride = static_cast<size_t>(columns);
    Activations hidden = reserve(buffers.hidden_quants, buffers.gate, in.n, columns, {&down, 1});
    if (!spec.is_gated) {
        project(compute, in, products, [&](size_t, Tokens tokens, int begin, int end) {
            for (int row = tokens.begin; row < tokens.end; ++row) {
                float* values = buffers.gate + static_cast<size_t>(row) * stride + begin;
                activate_plain(compute.kernels, spec.activation, end - begin, values);
                hidden.quantize(compute.kernels, row, begin, end);
            }
        });
        return hidden;
    }
    if (spec.has_gate_cutoff) {
        project(compute, in, products);
        for_rows(compute, in.n, [&](int row) {
            float* gate = buffers.gate + static_cast<size_t>(row) * stride;
            cut_off(spec.gate_cutoff, columns, gate);
            activate_gated(compute.kernels, spec.activation, buffers.up + static_cast<size_t>(row) * stride, columns,
                           gate);
            hidden.quantize(compute.kernels, row, 0, columns);
        });
        return hidden;
    }
    const bool keeps_values = wants_values || hidden.q == nullptr;
    auto before = [&](int tile, int begin, int end) { hidden.fetch_to_write(tile, begin, end); };
    auto after = [&](Tokens tokens, int begin, OutputPiece& gate, OutputPiece& up) {
        activate_gated(compute.kernels, spec.activation, up.values, gate.size(), gate.values);
        for (int i = 0; i < gate.num_tokens; ++i) {
            const float* values = gate.of_token(i);
            const int row = tokens.begin + i;
            hidden.quantize(compute.kernels, row, begin, begin + gate.num_rows, values);
            if (keeps_values)
                std::copy_n(values, gate.num_rows, buffers.gate + static_cast<size_t>(row) * stride + begin);
        }
    };
    project_pair(compute, in, products[0], products[1], before, after);
    return hidden;
}

// result += share(row) * shared expert(row), where share is 1 or a sigmoid of its own.
void add_shared_expert(const Compute& compute, const LayerPlan& layer, const StepBuffers& buffers, const float* values,
                       const Activations& in) {
    size_t hidden = static_cast<size_t>(layer.feed_forward.shared_hidden), columns = static_cast<size_t>(in.k);
    const bool is_gated = layer.feed_forward.is_gated;
    Projection both[] = {{layer.shared_gate, buffers.gate, hidden, nullptr},
                         {layer.shared_up, is_gated ? buffers.up : buffers.gate, hidden, nullptr}};
    const std::span<const Projection> gated = std::span(both).subspan(is_gated ? 0 : 1);
    Projection down{layer.shared_down, buffers.expert_out, columns, nullptr};
    Activations all = prepare(compute, buffers.quants, values, in.n, in.k, gated);
    project(compute, expand(compute, layer.feed_forward, gated, buffers, all, down, false), {&down, 1});
    for_rows(compute, in.n, [&](int row) {
        size_t at = static_cast<size_t>(row) * columns;
        float share = 1;
        if (layer.shared_share != nullptr) {
            double logit = 0;
            for (size_t c = 0; c < columns; ++c) logit += double{layer.shared_share[c]} * double{values[at + c]};
            share = static_cast<float>(1.0 / (1.0 + std::exp(-logit)));
        }
        for (size_t c = 0; c < columns; ++c) buffers.result[at + c] += share * buffers.expert_out[at + c];
    });
}

}  // namespace

FirstProducts first_products(const LayerPlan& layer, const StepBuffers& buffers) {
    const FeedForwardSpec& spec = layer.feed_forward;
    size_t hidden = static_cast<size_t>(spec.hidden);
    if (spec.num_experts > 0)
        return {{{layer.router, buffers.router, static_cast<size_t>(spec.num_experts), layer.router_bias}}, 1};
    if (!spec.is_gated) return {{{layer.up, buffers.gate, hidden, layer.up_bias}}, 1};
    return {{{layer.gate, buffers.gate, hidden, layer.gate_bias}, {layer.up, buffers.up, hidden, layer.up_bias}}, 2};
}

void feed_forward(const Compute& compute, const LayerPlan& layer, const StepBuffers& buffers, const Activations& in,
                  float* residual, LayerInputs* observed) {
    size_t width = static_cast<size_t>(in.k);
    Projection down{layer.down, buffers.result, width, layer.down_bias};
    FirstProducts first = first_products(layer, buffers);
    if (buffers.adapters != nullptr) buffers.adapters->adapt(compute, in, {first.all, first.count});
    Activations hidden = expand(compute, layer.feed_forward, first, buffers, in, down,
                                observed != nullptr || buffers.adapters != nullptr);
    if (buffers.adapters != nullptr) buffers.adapters->adapt(compute, hidden, {&down, 1});
    if (observed != nullptr) observed->ffn_down.add(compute, hidden.values, hidden.n);
    if (residual == nullptr) project(compute, hidden, {&down, 1});
    else project_add(compute, hidden, down, residual);
}

void mixture_of_experts(const Compute& compute, const LayerPlan& layer, const StepBuffers& buffers,
                        const Activations& in, const float* values, LayerInputs* observed) {
    const FeedForwardSpec& spec = layer.feed_forward;
    int n = in.n, width = in.k;
    size_t active = static_cast<size_t>(spec.num_active), columns = static_cast<size_t>(width);
    size_t hidden = static_cast<size_t>(spec.hidden);
    project(compute, in, first_products(layer, buffers));
    for_rows(compute, n, [&](int row) {
        size_t r = static_cast<size_t>(row);
        route(spec, layer.selection_bias, layer.expert_scale,
              buffers.router + r * static_cast<size_t>(spec.num_experts), buffers.expert_index + r * active,
              buffers.expert_weight + r * active);
    });
    std::memset(buffers.result, 0, static_cast<size_t>(n) * columns * sizeof(float));

    auto weight_of = [&](size_t row, int e) {
        const int32_t* index = buffers.expert_index + row * active;
        return buffers.expert_weight[row * active + static_cast<size_t>(std::find(index, index + active, e) - index)];
    };
    // Experts in ascending index, each over the rows that chose it: every row adds its experts in the same order.
    for (int e = 0; e < spec.num_experts; ++e) {
        int count = 0;
        for (int row = 0; row < n; ++row) {
            const int32_t* index = buffers.expert_index + static_cast<size_t>(row) * active;
            if (std::find(index, index + active, e) == index + active) continue;
            float* read = buffers.expert_in + static_cast<size_t>(count) * columns;
            std::memcpy(read, values + static_cast<size_t>(row) * columns, columns * sizeof(float));
            if (spec.weighs_input)
                for (size_t c = 0; c < columns; ++c) read[c] *= weight_of(static_cast<size_t>(row), e);
            buffers.expert_rows[count++] = row;
        }
        if (count == 0) continue;
        size_t part = static_cast<size_t>(e);
        auto bias = [part](const float* all, size_t size) { return all == nullptr ? nullptr : all + part * size; };
        Projection both[] = {{nullptr, buffers.gate, hidden, bias(layer.gate_bias, hidden)},
                             {&(*layer.up_experts)[part], spec.is_gated ? buffers.up : buffers.gate, hidden,
                              bias(layer.up_bias, hidden)}};
        if (spec.is_gated) both[0].weight = &(*layer.gate_experts)[part];
        const std::span<const Projection> gated = std::span(both).subspan(spec.is_gated ? 0 : 1);
        Activations chosen = prepare(compute, buffers.quants, buffers.expert_in, count, width, gated);
        Projection down{&(*layer.down_experts)[part], buffers.expert_out, columns, bias(layer.down_bias, columns)};
        Activations inner = expand(compute, spec, gated, buffers, chosen, down, observed != nullptr);
        if (observed != nullptr) {
            observed->expert_in.add(compute, chosen.values, count, e);
            observed->ffn_down.add(compute, inner.values, count, e);
        }
        project(compute, inner, {&down, 1});
        for_rows(compute, count, [&](int i) {
            size_t row = static_cast<size_t>(buffers.expert_rows[i]);
            float weight = spec.weighs_input ? 1.0f : weight_of(row, e);
            const float* from = buffers.expert_out + static_cast<size_t>(i) * columns;
            float* to = buffers.result + row * columns;
            for (size_t c = 0; c < columns; ++c) to[c] += weight * from[c];
        });
    }
    if (spec.shared_hidden > 0) add_shared_expert(compute, layer, buffers, values, in);
    if (layer.experts_bias != nullptr)
        for_rows(compute, n, [&](int row) {
            compute.kernels.add(layer.experts_bias, width, buffers.result + static_cast<size_t>(row) * columns);
        });
}

}  // namespace kvarn
