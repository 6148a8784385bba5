// Attention over one tile of keys.
#include "../table.h"
#include "math.h"

namespace kvarn::scalar {
namespace {

float to_float(uint16_t half) { return half_to_float(half); }
float to_float(float x) { return x; }

int num_groups(int head_dim) { return (head_dim + kQuantBlock - 1) / kQuantBlock; }

// Value: uint16_t (f16), float, or int8_t with scales behind the values (q8_0).
template <class Value>
float key_at(const KVTile& tile, int key, int head_dim, int d) {
    const Value* block = static_cast<const Value*>(tile.k[key / kKVBlock]);
    const int slot = key % kKVBlock;
    if constexpr (sizeof(Value) > 1) return to_float(block[d * kKVBlock + slot]);
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(block + head_dim * kKVBlock);
    return static_cast<float>(block[d * kKVBlock + slot]) * half_to_float(scales[d / kQuantBlock * kKVBlock + slot]);
}

template <class Value>
float value_at(const KVTile& tile, int key, int head_dim, int d) {
    const Value* block = static_cast<const Value*>(tile.v[key / kKVBlock]);
    const int slot = key % kKVBlock;
    if constexpr (sizeof(Value) > 1) return to_float(block[slot * head_dim + d]);
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(block + head_dim * kKVBlock);
    const float scale = half_to_float(scales[slot * num_groups(head_dim) + d / kQuantBlock]);
    return static_cast<float>(block[slot * head_dim + d]) * scale;
}

template <class Value>
float score(const float* q, int head_dim, const KVTile& tile, int key, float scale, float softcap, const float* bias) {
    float dot = 0;
    for (int d = 0; d < head_dim; ++d) dot += q[d] * key_at<Value>(tile, key, head_dim, d);
    float scaled = dot * scale;
    if (softcap > 0) scaled = softcap * static_cast<float>(hyperbolic_tangent(scaled / softcap));
    return bias == nullptr ? scaled : scaled + bias[key];
}

template <class Value>
void attend_head(const float* q, int head_dim, const KVTile& tile, int first, int last, float scale, float softcap,
                 const float* bias, float& m, float& l, float* acc, float* weights) {
    float tile_max = -__builtin_inff();
    for (int key = first; key < last; ++key) {
        weights[key] = score<Value>(q, head_dim, tile, key, scale, softcap, bias);
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
            float softcap, const float* bias, float* m, float* l, float* acc, float* scratch) noexcept {
    for (int head = 0; head < num_heads; ++head) {
        const size_t at = static_cast<size_t>(head) * head_dim;
        attend_head<Value>(q + at, head_dim, tile, first, last, scale, softcap,
                           bias == nullptr ? nullptr : bias + head * kKeyTile, m[head], l[head], acc + at,
                           scratch + head * kKeyTile);
    }
}

constexpr KernelTable make_attention_kernels() {
    KernelTable t{};
    t.attend_f16 = attend<uint16_t>;
    t.attend_f32 = attend<float>;
    t.attend_q8_0 = attend<int8_t>;
    return t;
}

}  // namespace

constinit const KernelTable attention_kernels = make_attention_kernels();

}  // namespace kvarn::scalar
