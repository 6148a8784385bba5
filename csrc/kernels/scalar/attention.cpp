// Attention over one tile of keys, and storing keys and values in their blocks.
#include "functions.h"
#include "math.h"

namespace kvarn::scalar {
namespace {

float to_float(uint16_t half) { return half_to_float(half); }
float to_float(float x) { return x; }

template <class Value>
float key_at(const KVTile& tile, int key, int d) {
    return to_float(static_cast<const Value*>(tile.k[key / kKVBlock])[d * kKVBlock + key % kKVBlock]);
}

template <class Value>
float value_at(const KVTile& tile, int key, int head_dim, int d) {
    return to_float(static_cast<const Value*>(tile.v[key / kKVBlock])[key % kKVBlock * head_dim + d]);
}

template <class Value>
float score(const float* q, int head_dim, const KVTile& tile, int key, float scale, float softcap) {
    float dot = 0;
    for (int d = 0; d < head_dim; ++d) dot += q[d] * key_at<Value>(tile, key, d);
    const float scaled = dot * scale;
    if (!(softcap > 0)) return scaled;
    return softcap * static_cast<float>(hyperbolic_tangent(scaled / softcap));
}

template <class Value>
void attend_head(const float* q, int head_dim, const KVTile& tile, int first, int last, float scale, float softcap,
                 float& m, float& l, float* acc, float* weights) {
    float tile_max = -__builtin_inff();
    for (int key = first; key < last; ++key) {
        weights[key] = score<Value>(q, head_dim, tile, key, scale, softcap);
        if (weights[key] > tile_max) tile_max = weights[key];
    }
    float tile_sum = 0;
    for (int key = first; key < last; ++key) {
        weights[key] = static_cast<float>(exponential(weights[key] - tile_max));
        tile_sum += weights[key];
    }
    // Merge: both sides are rescaled to the larger maximum.
    const float new_max = m > tile_max ? m : tile_max;
    const float keep = static_cast<float>(exponential(m - new_max));
    const float take = static_cast<float>(exponential(tile_max - new_max));
    for (int d = 0; d < head_dim; ++d) {
        float sum = 0;
        for (int key = first; key < last; ++key) sum += weights[key] * value_at<Value>(tile, key, head_dim, d);
        acc[d] = acc[d] * keep + sum * take;
    }
    l = l * keep + tile_sum * take;
    m = new_max;
}

template <class Value>
void attend(const float* q, int num_heads, int head_dim, const KVTile& tile, int first, int last, float scale,
            float softcap, float* m, float* l, float* acc, float* scratch) {
    for (int head = 0; head < num_heads; ++head) {
        const size_t at = static_cast<size_t>(head) * head_dim;
        attend_head<Value>(q + at, head_dim, tile, first, last, scale, softcap, m[head], l[head], acc + at,
                           scratch + head * kKeyTile);
    }
}

}  // namespace

void attend_f16(const float* q, int num_heads, int head_dim, const KVTile& tile, int first, int last, float scale,
                float softcap, float* m, float* l, float* acc, float* scratch) noexcept {
    attend<uint16_t>(q, num_heads, head_dim, tile, first, last, scale, softcap, m, l, acc, scratch);
}

void attend_f32(const float* q, int num_heads, int head_dim, const KVTile& tile, int first, int last, float scale,
                float softcap, float* m, float* l, float* acc, float* scratch) noexcept {
    attend<float>(q, num_heads, head_dim, tile, first, last, scale, softcap, m, l, acc, scratch);
}

void store_kv_f16(const float* k, const float* v, int head_dim, int slot, void* k_block, void* v_block) noexcept {
    uint16_t* keys = static_cast<uint16_t*>(k_block) + slot;
    uint16_t* values = static_cast<uint16_t*>(v_block) + slot * head_dim;
    for (int d = 0; d < head_dim; ++d) {
        keys[d * kKVBlock] = float_to_half(k[d]);
        values[d] = float_to_half(v[d]);
    }
}

void store_kv_f32(const float* k, const float* v, int head_dim, int slot, void* k_block, void* v_block) noexcept {
    float* keys = static_cast<float*>(k_block) + slot;
    float* values = static_cast<float*>(v_block) + slot * head_dim;
    for (int d = 0; d < head_dim; ++d) {
        keys[d * kKVBlock] = k[d];
        values[d] = v[d];
    }
}

}  // namespace kvarn::scalar
