#include "forward.h"

#include <algorithm>
#include <cmath>

#include "../base/check.h"
#include "ffn.h"
#include "rope.h"

namespace kvarn {

namespace {

size_t offset(int row, int columns) { return static_cast<size_t>(row) * static_cast<size_t>(columns); }

// Without a norm or a factor behind the sublayer its output goes straight into the residual stream.
float* residual_of(const LayerPlan& layer, const StepBuffers& buffers) {
    bool is_plain = layer.placement == Placement::pre || layer.placement == Placement::parallel;
    return is_plain && layer.residual_scale == 1.0f ? buffers.x : nullptr;
}

// Queries of far positions are made longer, so that attention stays as sharp as it is in short texts.
void sharpen(const AttentionSpec& spec, int position, int n, float* q) {
    if (spec.temperature_beta == 0.0f) return;
    float turns = static_cast<float>((position + spec.temperature_offset) / spec.temperature_length);
    float factor = 1.0f + spec.temperature_beta * std::log(1.0f + turns);
    for (int i = 0; i < n; ++i) q[i] *= factor;
}

}  // namespace

void Model::forward_from(size_t first, const BatchView& batch, std::span<const int32_t> output_rows, float* out,
                         float* states) {
    check(batch, output_rows);
    require(states == nullptr || spec_.num_streams == 1, "the states of several residual streams are not kept");
    if (batch.num_tokens == 0) return;
    std::lock_guard turn(pool_->turn());
    StepBuffers buffers = prepare_step(arena_, batch);
    const size_t layer_size = offset(batch.num_tokens, spec_.width);
    if (first > 0) std::copy_n(states + first * layer_size, layer_size, buffers.x);
    for (size_t index = first; index < plan_.layers.size(); ++index) {
        if (first == 0 && states != nullptr) std::copy_n(buffers.x, layer_size, states + index * layer_size);
        compute_qkv(index, batch, buffers);
        run_attention(index, batch, buffers, buffers.runs);
        finish_attention(index, batch, buffers);
        run_feed_forward(index, batch, buffers);
        finish_layer(index, batch, buffers);
    }
    write_outputs(buffers, output_rows, out);
}

void Model::observe_inputs() {
    observed_.clear();
    for (const LayerPlan& layer : plan_.layers) {
        const FeedForwardSpec& ffn = layer.feed_forward;
        const int experts = ffn.num_experts, width = spec_.width;
        observed_.push_back({.qkv = {1, width},
                             .attention_output = {1, layer.o == nullptr ? 0 : layer.o->columns},
                             .ffn_in = {1, width},
                             .expert_in = experts > 0 ? ColumnSums(experts, width) : ColumnSums(),
                             .ffn_down = {std::max(experts, 1), ffn.hidden}});
    }
}

void Model::keep_windows(std::vector<bool> layers) {
    widest_window_ = 0;
    for (size_t i = 0; i < layers.size(); ++i)
        if (const AttentionSpec& a = spec_.blocks[i].attention; layers[a.kv_layer(i)])
            widest_window_ = std::max(widest_window_, a.window);
    windowed_ = std::move(layers);
}

// The arena grows to the largest step seen and stays: in steady state nothing is allocated.
StepBuffers Model::prepare_step(Arena& arena, const BatchView& batch) {
    int context = *std::max_element(batch.context_lens, batch.context_lens + batch.num_sequences);
    context = (context + kSplitKeys - 1) / kSplitKeys * kSplitKeys;
    int threads = pool_->num_threads();
    const bool has_tiles = kernels_.round_row != nullptr && batch.num_tokens > kTileTokens;  // a page for each row
    arena.reserve(StepBuffers::arena_bytes(kernels_, plan_, batch.num_tokens, threads, context), has_tiles);
    StepBuffers buffers = StepBuffers::take(arena, kernels_, plan_, batch.num_tokens, threads, context);
    buffers.runs = find_runs(batch, threads);
    if (!batch.adapters.empty()) buffers.adapters = std::make_shared<AdapterStep>(batch.adapters, batch.row_starts);
    if (plan_.joined != nullptr) join_inputs(batch, buffers);
    else embed(batch, buffers);
    if (batch.canvas_starts != nullptr) condition_canvases(batch, buffers);
    if (plan_.per_layer_tokens != nullptr) embed_layer_inputs(batch, buffers);
    if (buffers.streams != nullptr) split_streams(batch.num_tokens, buffers);
    for (size_t r = 0; r < plan_.ropes.size(); ++r)
        fill_rope_table(compute(), plan_.ropes[r], batch.positions, batch.num_tokens, buffers.rope_tables[r]);
    return buffers;
}

void Model::write_outputs(const StepBuffers& buffers, std::span<const int32_t> output_rows, float* out) const {
    for_rows(compute(), static_cast<int>(output_rows.size()), [&](int i) {
        const float* x = buffers.x + offset(output_rows[static_cast<size_t>(i)], spec_.width);
        float* y = out + offset(i, spec_.width);
        if (spec_.output_norm) plan_.output_norm.apply(kernels_, x, spec_.width, y);
        else std::copy_n(x, spec_.width, y);
    });
}

void Model::embed(const BatchView& batch, const StepBuffers& buffers) const {
    int width = spec_.width;
    for_rows(compute(), batch.num_tokens, [&](int row) {
        float* x = buffers.x + offset(row, width);
        unpack_row(plan_.embedding->type, plan_.embedding->packed, width, batch.token_ids[row], x);
        if (buffers.adapters != nullptr) buffers.adapters->embed(kernels_, row, batch.token_ids[row], width, x);
        if (spec_.embedding_scale != 1.0f)
            for (int i = 0; i < width; ++i) x[i] *= spec_.embedding_scale;
        if (plan_.positions != nullptr) kernels_.add(plan_.positions + offset(batch.positions[row], width), width, x);
        if (plan_.token_types != nullptr) kernels_.add(plan_.token_types, width, x);
        if (spec_.embedding_norm) plan_.embedding_norm.apply(kernels_, x, width, x);
    });
}

void Model::run_feed_forward(size_t index, const BatchView& batch, const StepBuffers& buffers) {
    const LayerPlan& layer = plan_.layers[index];
    if (!layer.feed_forward.exists()) return;
    if (layer.beside) return run_beside(index, batch, buffers);
    int n = batch.num_tokens, width = spec_.width;
    float* residual = residual_of(layer, buffers);
    const float* x = layer.placement == Placement::parallel ? buffers.entry : buffers.x;
    Activations in = normed(x, layer.ffn_in, buffers, n, first_products(layer, buffers));
    LayerInputs* observed = observed_of(index);
    if (observed != nullptr) observed->ffn_in.add(compute(), in.values, n);
    if (layer.feed_forward.num_experts == 0) {
        feed_forward(compute(), layer, buffers, in, residual, observed);
    } else {
        mixture_of_experts(compute(), layer, buffers, in, in.values, observed);
        if (residual != nullptr)
            for_rows(compute(), n, [&](int row) {
                kernels_.add(buffers.result + offset(row, width), width, residual + offset(row, width));
            });
    }
    add_residual(layer, layer.ffn_out, buffers, n);
}

// What a sublayer reads: normalised where there is a norm before it, and quantised for its first products.
Activations Model::normed(const float* x, const NormPlan& norm, const StepBuffers& buffers, int n,
                          std::span<const Projection> projections) const {
    int width = spec_.width;
    if (norm.weight == nullptr) return prepare(compute(), buffers.quants, x, n, width, projections);
    Activations in = reserve(buffers.quants, buffers.normed, n, width, projections);
    for_rows(compute(), n, [&](int row) {
        norm.apply(kernels_, x + offset(row, width), width, buffers.normed + offset(row, width));
        in.quantize(kernels_, row, 0, width);
    });
    return in;
}

// Queries, keys and values of the batch's rows; keys and values go into the cache.
void Model::compute_qkv(size_t index, const BatchView& batch, const StepBuffers& buffers) {
    const LayerPlan& layer = plan_.layers[index];
    if (buffers.streams != nullptr) predict_streams(index, batch.num_tokens, buffers);
    if (layer.recurrent.exists()) compute_recurrent(index, batch, buffers);
    if (!layer.attention.exists()) return;
    if (layer.attention.latent.exists()) return compute_latent(index, batch, buffers);
    const AttentionSpec& spec = layer.attention;
    size_t query = static_cast<size_t>(spec.num_heads * spec.head_dim);
    size_t kv = static_cast<size_t>(spec.num_kv_heads * spec.head_dim);
    const bool has_keys = spec.kv_source < 0;
    Projection qkv[4] = {{layer.q, buffers.q, query, layer.q_bias}};
    size_t count = 1;
    if (has_keys) {
        qkv[count++] = {layer.k, buffers.k, kv, layer.k_bias};
        qkv[count++] = {layer.v, buffers.v, kv, layer.v_bias};
    }
    if (layer.output_gate != nullptr)
        qkv[count++] = {layer.output_gate, buffers.output_gate, query, layer.output_gate_bias};
    Activations in = normed(buffers.x, layer.attention_in, buffers, batch.num_tokens, {qkv, count});
    if (LayerInputs* observed = observed_of(index)) observed->qkv.add(compute(), in.values, in.n);
    if (buffers.adapters != nullptr) buffers.adapters->adapt(compute(), in, {qkv, count});
    project(compute(), in, {qkv, count});
    rotate_and_store(index, batch, buffers);
    if (has_keys) keeper_.pack(compute(), spec, cache_of(index), index, batch, buffers.q);
}

void Model::run_attention(size_t index, const BatchView& batch, const StepBuffers& buffers,
                          std::span<const QueryRun> runs) const {
    const LayerPlan& layer = plan_.layers[index];
    if (!layer.attention.exists()) return;
    float* out = layer.attention.latent.exists() ? buffers.latent : buffers.mixed;
    const size_t source = layer.attention.kv_layer(index);
    attend(compute(), layer.attention, layer.sinks, cache_of(source), source, batch, runs, buffers.q, out,
           mixed(index, batch, buffers), buffers.attention);
}

void Model::finish_attention(size_t index, const BatchView& batch, const StepBuffers& buffers) {
    const LayerPlan& layer = plan_.layers[index];
    if (layer.o == nullptr) return;
    const bool has_both = layer.attention.exists() && layer.recurrent.exists();
    float* residual = residual_of(layer, buffers);
    Projection output = attention_output(index, buffers);
    int width = spec_.width;
    const bool is_kept = layer.placement == Placement::parallel || layer.attention_second.weight != nullptr;
    if (is_kept) std::copy_n(buffers.x, offset(batch.num_tokens, width), buffers.entry);
    Activations in = mixed(index, batch, buffers);
    if (layer.attention.latent.exists()) mix_latents(layer, buffers, in);
    if (layer.attention.has_output_gate)
        for_rows(compute(), in.n, [&](int row) {
            float* values = buffers.mixed + offset(row, in.k);
            kernels_.sigmoid_mul(buffers.output_gate + offset(row, in.k), values, in.k, values);
            in.quantize(kernels_, row, 0, in.k);
        });
    if (LayerInputs* observed = observed_of(index)) observed->attention_output.add(compute(), in.values, in.n);
    if (buffers.adapters != nullptr) buffers.adapters->adapt(compute(), in, {&output, 1});
    if (residual != nullptr && !has_both) project_add(compute(), in, output, residual);
    else
        project(compute(), in, {&output, 1}, [&](size_t, Tokens tokens, int begin, int end) {
            for (int row = tokens.begin; row < tokens.end; ++row) {
                size_t at = offset(row, width) + static_cast<size_t>(begin);
                if (has_both) kernels_.add(buffers.entry + at, end - begin, buffers.result + at);
                if (residual != nullptr) kernels_.add(buffers.result + at, end - begin, residual + at);
            }
        });
    add_residual(layer, layer.attention_out, buffers, batch.num_tokens);
    if (layer.attention_second.weight != nullptr)
        for_rows(compute(), batch.num_tokens, [&](int row) {
            float* x = buffers.x + offset(row, width);
            kernels_.add(buffers.entry + offset(row, width), width, x);
            layer.attention_second.apply(kernels_, x, width, x);
        });
    if (layer.laurel_in != nullptr) add_laurel(layer, batch.num_tokens, buffers);
}

Projection Model::attention_output(size_t index, const StepBuffers& buffers) const {
    const LayerPlan& layer = plan_.layers[index];
    return {layer.o, buffers.result, static_cast<size_t>(spec_.width), layer.o_bias};
}

// What attention makes and the output projection reads.
Activations Model::mixed(size_t index, const BatchView& batch, const StepBuffers& buffers) const {
    const LayerPlan& layer = plan_.layers[index];
    Projection output = attention_output(index, buffers);
    return reserve(buffers.quants, buffers.mixed, batch.num_tokens, layer.o->columns, {&output, 1});
}

// Q and K of one row.
void Model::normalise_heads(const LayerPlan& layer, float* q, float* k) const {
    const AttentionSpec& spec = layer.attention;
    if (!spec.qk_norm) return;
    auto apply = [&](const NormPlan& norm, int heads, float* x) {
        int count = spec.is_qk_norm_over_row ? 1 : heads, size = heads * spec.head_dim / count;
        for (int i = 0; i < count; ++i) norm.apply(kernels_, x + offset(i, size), size, x + offset(i, size));
    };
    apply(layer.q_norm, spec.num_heads, q);
    if (spec.kv_source < 0) apply(layer.k_norm, spec.num_kv_heads, k);
}

void Model::rotate_and_store(size_t index, const BatchView& batch, const StepBuffers& buffers) {
    const LayerPlan& layer = plan_.layers[index];
    const AttentionSpec& spec = layer.attention;
    const bool has_keys = spec.kv_source < 0;
    int dim = spec.head_dim;
    const KVCache& cache = cache_of(index);
    StoreKVFn store = store_kernel(kernels_, cache.type());
    for_rows(compute(), batch.num_tokens, [&](int row) {
        float* q = buffers.q + offset(row, spec.num_heads * dim);
        float* k = buffers.k + offset(row, spec.num_kv_heads * dim);
        float* v = buffers.v + offset(row, spec.num_kv_heads * dim);
        if (!spec.is_qk_norm_after_rope) normalise_heads(layer, q, k);
        if (layer.rope >= 0) {
            const RopeSpec& rope = plan_.ropes[static_cast<size_t>(layer.rope)];
            const float* table = buffers.rope_tables[static_cast<size_t>(layer.rope)] +
                                 offset(row, 2 * static_cast<int>(rope.inverse_frequencies.size()));
            for (int h = 0; h < spec.num_heads; ++h) rotate(rope, table, q + offset(h, dim));
            if (has_keys)
                for (int h = 0; h < spec.num_kv_heads; ++h) rotate(rope, table, k + offset(h, dim));
        }
        if (spec.is_qk_norm_after_rope) normalise_heads(layer, q, k);
        sharpen(spec, batch.positions[row], spec.num_heads * dim, q);
        if (!has_keys) return;
        if (!layer.value_unit.empty())
            for (int h = 0; h < spec.num_kv_heads; ++h)
                kernels_.rms_norm(v + offset(h, dim), layer.value_unit.data(), spec.value_norm_eps, dim,
                                  v + offset(h, dim));
        int sequence = batch.sequence_of(row), slot = batch.positions[row] - batch.shift(sequence);
        int block = batch.blocks(sequence, cache.is_windowed())[slot / kKVBlock];
        for (int h = 0; h < spec.num_kv_heads; ++h)
            store(k + offset(h, dim), v + offset(h, dim), dim, slot % kKVBlock, cache.k(block, index, h),
                  cache.v(block, index, h));
    });
}

void Model::add_residual(const LayerPlan& layer, const NormPlan& norm, const StepBuffers& buffers, int n) const {
    if (residual_of(layer, buffers) != nullptr) return;
    int width = spec_.width;
    bool is_residual = layer.placement == Placement::residual;
    for_rows(compute(), n, [&](int row) {
        float* x = buffers.x + offset(row, width);
        float* result = buffers.result + offset(row, width);
        if (!is_residual && norm.weight != nullptr) norm.apply(kernels_, result, width, result);
        if (layer.residual_scale != 1.0f)
            for (int i = 0; i < width; ++i) result[i] *= layer.residual_scale;
        kernels_.add(result, width, x);
        if (is_residual) norm.apply(kernels_, x, width, x);
    });
}

}  // namespace kvarn
