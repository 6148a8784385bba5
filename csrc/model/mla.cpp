#include "mla.h"

#include <algorithm>
#include <cstring>

#include "../quant/half.h"
#include "forward.h"
#include "rope.h"

namespace kvarn {

namespace {

size_t offset(int row, int columns) { return static_cast<size_t>(row) * static_cast<size_t>(columns); }

template <class Value>
void turn(const Value* k, int head_dim, int first, Value* v) {
    for (int slot = 0; slot < kKVBlock; ++slot)
        for (int d = first; d < head_dim; ++d) v[slot * head_dim + d] = k[d * kKVBlock + slot];
}

using U16x8 = uint16_t __attribute__((vector_size(16)));

// Eight rows of eight values become columns: three times, each is interleaved with the one four rows below.
void turn_eight(const uint16_t* k, int head_dim, uint16_t* v) {
    U16x8 rows[8], mixed[8];
    for (int i = 0; i < 8; ++i) std::memcpy(&rows[i], k + i * kKVBlock, sizeof(U16x8));
    for (int round = 0; round < 3; ++round) {
        for (int i = 0; i < 4; ++i) {
            mixed[2 * i] = __builtin_shufflevector(rows[i], rows[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
            mixed[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
        }
        std::copy_n(mixed, 8, rows);
    }
    for (int i = 0; i < 8; ++i) std::memcpy(v + i * head_dim, &rows[i], sizeof(U16x8));
}

void turn_f16(const uint16_t* k, int head_dim, uint16_t* v) {
    int whole = head_dim / 8 * 8;
    for (int slot = 0; slot < kKVBlock; slot += 8)
        for (int d = 0; d < whole; d += 8) turn_eight(k + d * kKVBlock + slot, head_dim, v + slot * head_dim + d);
    turn(k, head_dim, whole, v);
}

// One token's row as a column of a block of keys.
void store_latent(KVType type, const float* row, int head_dim, int slot, uint8_t* block) {
    float* f32 = reinterpret_cast<float*>(block) + slot;
    uint16_t* f16 = reinterpret_cast<uint16_t*>(block) + slot;
    for (int d = 0; d < head_dim; ++d) {
        if (type == KVType::f32) f32[d * kKVBlock] = row[d];
        else f16[d * kKVBlock] = float_to_half(row[d]);
    }
}

}  // namespace

void turn_latents(KVType type, int head_dim, KVTile& tile, uint8_t* values) {
    const size_t block = kv_token_bytes(type, head_dim) * kKVBlock;
    for (int b = 0; b * kKVBlock < tile.num_keys; ++b) {
        uint8_t* out = values + static_cast<size_t>(b) * block;
        if (type == KVType::f32) turn(static_cast<const float*>(tile.k[b]), head_dim, 0, reinterpret_cast<float*>(out));
        else turn_f16(static_cast<const uint16_t*>(tile.k[b]), head_dim, reinterpret_cast<uint16_t*>(out));
        tile.v[b] = out;
    }
}

size_t HeadScratch::arena_bytes(const KernelTable& kernels, int columns, int num_threads) {
    const int rows = num_threads * kTileTokens;
    return Arena::padded(offset(rows, columns) * sizeof(float)) + QuantBuffers::arena_bytes(kernels, rows, columns);
}

HeadScratch HeadScratch::take(Arena& arena, const KernelTable& kernels, int columns, int num_threads) {
    const int rows = num_threads * kTileTokens;
    float* values = arena.take<float>(offset(rows, columns));
    return {values, QuantBuffers::take(arena, kernels, rows, columns), columns};
}

float* HeadScratch::values_of(int worker) const { return values + offset(worker * kTileTokens, columns); }

// kTileTokens rows are whole blocks, whatever the number of columns.
QuantBuffers HeadScratch::quants_of(int worker) const { return quants.from(offset(worker * kTileTokens, columns)); }

void project_heads(const Compute& compute, const std::vector<Matrix>& weights, const HeadRows& in, const HeadRows& out,
                   int n, const HeadScratch& scratch) {
    compute.pool.run(static_cast<int>(weights.size()), [&](int head, int worker) {
        const Matrix& weight = weights[static_cast<size_t>(head)];
        float* values = scratch.values_of(worker);
        for (int first = 0; first < n; first += kTileTokens) {
            const int rows = std::min(kTileTokens, n - first);
            Projection one{&weight, out.at(first, head), static_cast<size_t>(out.row_stride), nullptr};
            Activations tile = reserve(scratch.quants_of(worker), values, rows, weight.columns, {&one, 1});
            for (int row = 0; row < rows; ++row) {
                std::copy_n(in.at(first + row, head), weight.columns, values + offset(row, weight.columns));
                tile.quantize(compute.kernels, row, 0, weight.columns);
            }
            detail::project_tile(compute, tile, 0, one, 0, weight.groups());
        }
    });
}

// Queries of the batch's rows in the latent space; what is cached of the rows goes into the cache.
void Model::compute_latent(size_t index, const BatchView& batch, const StepBuffers& buffers) {
    const LayerPlan& layer = plan_.layers[index];
    const AttentionSpec& spec = layer.attention;
    const LatentSpec& latent = spec.latent;
    const int n = batch.num_tokens, query = spec.num_heads * latent.head_dim(), low = latent.query_rank;
    Projection first[] = {
        {layer.q, low > 0 ? buffers.v : buffers.latent, static_cast<size_t>(low > 0 ? low : query), nullptr},
        {layer.k, buffers.k, static_cast<size_t>(spec.head_dim), nullptr}};
    Activations in = normed(buffers.x, layer.attention_in, buffers, n, first);
    if (LayerInputs* observed = observed_of(index)) observed->qkv.add(compute(), in.values, in.n);
    project(compute(), in, first);
    if (low > 0) {
        Projection second{layer.q_b, buffers.latent, static_cast<size_t>(query), nullptr};
        Activations normed = reserve(buffers.quants, buffers.v, n, low, {&second, 1});
        for_rows(compute(), n, [&](int row) {
            layer.q_norm.apply(kernels_, buffers.v + offset(row, low), low, buffers.v + offset(row, low));
            normed.quantize(kernels_, row, 0, low);
        });
        project(compute(), normed, {&second, 1});
    }
    project_heads(compute(), *layer.k_b, {buffers.latent, query, latent.head_dim()},
                  {buffers.q, spec.num_heads * spec.head_dim, spec.head_dim}, n, buffers.heads);
    rotate_and_store_latent(index, batch, buffers);
}

void Model::rotate_and_store_latent(size_t index, const BatchView& batch, const StepBuffers& buffers) {
    const LayerPlan& layer = plan_.layers[index];
    const AttentionSpec& spec = layer.attention;
    const LatentSpec& latent = spec.latent;
    const RopeSpec& rope = plan_.ropes[static_cast<size_t>(layer.rope)];
    const HeadRows from{buffers.latent, spec.num_heads * latent.head_dim(), latent.head_dim()};
    const HeadRows to{buffers.q, spec.num_heads * spec.head_dim, spec.head_dim};
    for_rows(compute(), batch.num_tokens, [&](int row) {
        const float* table = buffers.rope_tables[static_cast<size_t>(layer.rope)] + offset(row, latent.rope_dim);
        for (int head = 0; head < spec.num_heads; ++head) {
            float* q = to.at(row, head) + latent.rank;
            std::copy_n(from.at(row, head) + latent.nope_dim, latent.rope_dim, q);
            rotate(rope, table, q);
        }
        float* k = buffers.k + offset(row, spec.head_dim);
        layer.k_norm.apply(kernels_, k, latent.rank, k);
        rotate(rope, table, k + latent.rank);
        const int sequence = batch.sequence_of(row), slot = batch.positions[row] - batch.shift(sequence);
        uint8_t* block = cache_.k(batch.blocks(sequence)[slot / kKVBlock], index, 0);
        store_latent(cache_.type(), k, spec.head_dim, slot % kKVBlock, block);
    });
}

// What the heads took from the rows as values of the heads, which the output projection reads.
void Model::mix_latents(const LayerPlan& layer, const StepBuffers& buffers, const Activations& out) const {
    const AttentionSpec& spec = layer.attention;
    const LatentSpec& latent = spec.latent;
    project_heads(compute(), *layer.v_b, {buffers.latent, spec.num_heads * latent.rank, latent.rank},
                  {buffers.mixed, spec.num_heads * latent.value_dim, latent.value_dim}, out.n, buffers.heads);
    for_rows(compute(), out.n, [&](int row) { out.quantize(kernels_, row, 0, out.k); });
}

}  // namespace kvarn
