// Attention over one tile of keys, and storing keys and values in their blocks.
#include "functions.h"
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
float score(const float* q, int head_dim, const KVTile& tile, int key, float scale, float softcap) {
    float dot = 0;
    for (int d = 0; d < head_dim; ++d) dot += q[d] * key_at<Value>(tile, key, head_dim, d);
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

// Adding 1.5 * 2^23 makes the float unit round to nearest even.
int8_t round_to_int8(float x) {
    const float limited = x > 127 ? 127 : x < -127 ? -127 : x;
    return static_cast<int8_t>((limited + 12582912.0f) - 12582912.0f);
}

// One group of at most 32 values: q[i * stride] and the scale as f16.
uint16_t quantize_group(const float* x, int n, int8_t* q, int stride) {
    float absmax = 0;
    bool is_finite_group = true;
    for (int i = 0; i < n; ++i) {
        is_finite_group = is_finite_group && is_finite(x[i]);
        if (absolute(x[i]) > absmax) absmax = absolute(x[i]);
    }
    const uint16_t half = float_to_half(absmax / 127);
    const float scale = half_to_float(half);
    is_finite_group = is_finite_group && is_finite(scale);
    const float inverse = is_finite_group && scale > 0 ? 1 / scale : 0;
    for (int i = 0; i < n; ++i) q[i * stride] = inverse > 0 ? round_to_int8(x[i] * inverse) : int8_t{0};
    return is_finite_group ? half : uint16_t{0x7e00};
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

void attend_q8_0(const float* q, int num_heads, int head_dim, const KVTile& tile, int first, int last, float scale,
                 float softcap, float* m, float* l, float* acc, float* scratch) noexcept {
    attend<int8_t>(q, num_heads, head_dim, tile, first, last, scale, softcap, m, l, acc, scratch);
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

void store_kv_q8_0(const float* k, const float* v, int head_dim, int slot, void* k_block, void* v_block) noexcept {
    int8_t* keys = static_cast<int8_t*>(k_block);
    int8_t* values = static_cast<int8_t*>(v_block);
    uint16_t* key_scales = reinterpret_cast<uint16_t*>(keys + head_dim * kKVBlock);
    uint16_t* value_scales = reinterpret_cast<uint16_t*>(values + head_dim * kKVBlock);
    for (int group = 0; group < num_groups(head_dim); ++group) {
        const int d = group * kQuantBlock, n = head_dim - d < kQuantBlock ? head_dim - d : kQuantBlock;
        key_scales[group * kKVBlock + slot] = quantize_group(k + d, n, keys + d * kKVBlock + slot, kKVBlock);
        value_scales[slot * num_groups(head_dim) + group] = quantize_group(v + d, n, values + slot * head_dim + d, 1);
    }
}

}  // namespace kvarn::scalar
