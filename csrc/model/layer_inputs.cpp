// What a layer has beside attention and feed-forward: an input of its own, experts beside it, a factor behind it.
#include <cmath>

#include "../base/check.h"
#include "ffn.h"
#include "forward.h"

namespace kvarn {

namespace {

size_t offset(int row, int columns) { return static_cast<size_t>(row) * static_cast<size_t>(columns); }

}  // namespace

void Model::embed_tokens(std::span<const int32_t> ids, float* out) const {
    require(plan_.embedding != nullptr, "the model has no embedding");
    const int width = spec_.width;
    for (int32_t id : ids) require(id >= 0 && id < spec_.vocab_size, "a token id is outside the vocabulary");
    std::lock_guard turn(pool_->turn());
    for_rows(compute(), static_cast<int>(ids.size()), [&](int row) {
        float* x = out + offset(row, width);
        unpack_row(plan_.embedding->type, plan_.embedding->packed, width, ids[static_cast<size_t>(row)], x);
        for (int i = 0; i < width; ++i) x[i] *= spec_.embedding_scale;
    });
}

// x = projection(norm(embedding), norm(state)) of rows that come as both, one behind the other.
void Model::join_inputs(const BatchView& batch, const StepBuffers& buffers) const {
    const int n = batch.num_tokens, width = spec_.width;
    Projection projection{plan_.joined, buffers.x, static_cast<size_t>(width), nullptr};
    Activations in = reserve(buffers.quants, buffers.joined, n, 2 * width, {&projection, 1});
    for_rows(compute(), n, [&](int row) {
        const float* from = batch.inputs + offset(row, 2 * width);
        float* to = buffers.joined + offset(row, 2 * width);
        plan_.joined_token_norm.apply(kernels_, from, width, to);
        plan_.joined_state_norm.apply(kernels_, from + width, width, to + width);
        in.quantize(kernels_, row, 0, 2 * width);
    });
    project(compute(), in, {&projection, 1});
}

// (table[token] * sqrt(length) + norm(projection(x) / sqrt(width))) / sqrt(2), a norm for each layer's part.
void Model::embed_layer_inputs(const BatchView& batch, const StepBuffers& buffers) const {
    const int n = batch.num_tokens, all = plan_.per_layer_width, length = spec_.per_layer_length;
    Projection projection{plan_.per_layer_projection, buffers.per_layer, static_cast<size_t>(all), nullptr};
    project(compute(), prepare(compute(), buffers.quants, buffers.x, n, spec_.width, {&projection, 1}),
            {&projection, 1});
    const float scale = 1.0f / std::sqrt(static_cast<float>(spec_.width));
    const float table_scale = std::sqrt(static_cast<float>(length)), half = std::sqrt(0.5f);
    pool_->run(n, [&](int row, int worker) {
        float* out = buffers.per_layer + offset(row, all);
        float* table = buffers.per_layer_work + offset(worker, all);
        int token = batch.token_ids[row] < spec_.per_layer_vocab_size ? batch.token_ids[row] : 0;
        unpack_row(plan_.per_layer_tokens->type, plan_.per_layer_tokens->packed, all, token, table);
        for (int i = 0; i < all; ++i) out[i] *= scale;
        for (int begin = 0; begin < all; begin += length)
            plan_.per_layer_norm.apply(kernels_, out + begin, length, out + begin);
        for (int i = 0; i < all; ++i) out[i] = (table[i] * table_scale + out[i]) * half;
    });
}

// The feed-forward and the experts read the same x; a norm behind each, and one behind their sum.
void Model::run_beside(size_t index, const BatchView& batch, const StepBuffers& buffers) {
    const LayerPlan& layer = plan_.layers[index];
    const int n = batch.num_tokens, width = spec_.width;
    Activations in = normed(buffers.x, layer.ffn_in, buffers, n, first_products(layer, buffers));
    LayerInputs* observed = observed_of(index);
    if (observed != nullptr) observed->ffn_in.add(compute(), in.values, n);
    feed_forward(compute(), layer, buffers, in, nullptr, observed);
    for_rows(compute(), n, [&](int row) {
        size_t at = offset(row, width);
        layer.dense_out.apply(kernels_, buffers.result + at, width, buffers.dense + at);
        layer.beside_in.apply(kernels_, buffers.x + at, width, buffers.beside_in + at);
    });
    Activations routed = normed(buffers.x, layer.beside_router_in, buffers, n, first_products(*layer.beside, buffers));
    mixture_of_experts(compute(), *layer.beside, buffers, routed, buffers.beside_in, nullptr);
    for_rows(compute(), n, [&](int row) {
        size_t at = offset(row, width);
        layer.beside_out.apply(kernels_, buffers.result + at, width, buffers.result + at);
        kernels_.add(buffers.dense + at, width, buffers.result + at);
    });
    add_residual(layer, layer.ffn_out, buffers, n);
}

// result = norm(out(act(gate(x)) * the layer's input)).
void Model::add_layer_input(size_t index, int n, const StepBuffers& buffers) const {
    const LayerPlan& layer = plan_.layers[index];
    const int width = spec_.width, length = layer.per_layer_length;
    Projection gate{layer.per_layer_gate, buffers.gate, static_cast<size_t>(length), nullptr};
    Projection out{layer.per_layer_out, buffers.result, static_cast<size_t>(width), nullptr};
    project(compute(), prepare(compute(), buffers.quants, buffers.x, n, width, {&gate, 1}), {&gate, 1});
    Activations gated = reserve(buffers.hidden_quants, buffers.gate, n, length, {&out, 1});
    for_rows(compute(), n, [&](int row) {
        const float* part =
            buffers.per_layer + offset(row, plan_.per_layer_width) + offset(static_cast<int>(index), length);
        activate_gated(kernels_, layer.per_layer_activation, part, length, buffers.gate + offset(row, length));
        gated.quantize(kernels_, row, 0, length);
    });
    project(compute(), gated, {&out, 1});
    for_rows(compute(), n, [&](int row) {
        float* found = buffers.result + offset(row, width);
        layer.per_layer_norm.apply(kernels_, found, width, found);
    });
}

// What comes behind the feed-forward: the other streams, the layer's own input, its factor.
void Model::finish_layer(size_t index, const BatchView& batch, const StepBuffers& buffers) {
    const LayerPlan& layer = plan_.layers[index];
    const int n = batch.num_tokens, width = spec_.width;
    if (buffers.streams != nullptr) return correct_streams(index, n, buffers);
    if (layer.per_layer_length > 0) {
        add_layer_input(index, n, buffers);
        for_rows(compute(), n, [&](int row) {
            kernels_.add(buffers.result + offset(row, width), width, buffers.x + offset(row, width));
        });
    }
    if (layer.output_scale == nullptr) return;
    for_rows(compute(), n, [&](int row) {
        float* x = buffers.x + offset(row, width);
        const int s = layer.text_scale == nullptr ? -1 : batch.sequence_of(row);
        const float scale = s < 0 || row >= batch.first_canvas_row(s) ? *layer.output_scale : *layer.text_scale;
        for (int i = 0; i < width; ++i) x[i] *= scale;
    });
}

// With y, what attention read, still in `normed`: x = (x + y + norm(out(in(y)))) / sqrt(2).
void Model::add_laurel(const LayerPlan& layer, int n, const StepBuffers& buffers) const {
    const int width = spec_.width, rank = layer.laurel_in->rows;
    Projection in{layer.laurel_in, buffers.gate, static_cast<size_t>(rank), nullptr};
    Projection out{layer.laurel_out, buffers.result, static_cast<size_t>(width), nullptr};
    project(compute(), prepare(compute(), buffers.quants, buffers.normed, n, width, {&in, 1}), {&in, 1});
    project(compute(), prepare(compute(), buffers.hidden_quants, buffers.gate, n, rank, {&out, 1}), {&out, 1});
    const float half = std::sqrt(0.5f);
    for_rows(compute(), n, [&](int row) {
        size_t at = offset(row, width);
        float *x = buffers.x + at, *found = buffers.result + at;
        layer.laurel_norm.apply(kernels_, found, width, found);
        for (int i = 0; i < width; ++i) x[i] = (x[i] + buffers.normed[at + static_cast<size_t>(i)] + found[i]) * half;
    });
}

}  // namespace kvarn
