// Storing K and V of one token in a block of the cache.
#include "../shared/quantize.h"
#include "math.h"

namespace kvarn::scalar {
namespace {

// Adding 1.5 * 2^23 makes the float unit round to nearest even.
int8_t round_to_int8(float x) {
    const float limited = x > 127 ? 127 : x < -127 ? -127 : x;
    return static_cast<int8_t>((limited + 12582912.0f) - 12582912.0f);
}

// One group of at most 32 values; returns the scale as f16.
uint16_t quantize_group(const float* x, int n, int8_t* q) {
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
    for (int i = 0; i < n; ++i) q[i] = inverse > 0 ? round_to_int8(x[i] * inverse) : int8_t{0};
    return is_finite_group ? half : shared::kHalfNaN;
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
    shared::store_kv_groups(k, v, head_dim, slot, k_block, v_block, quantize_group);
}

constexpr KernelTable make_store_kernels() {
    KernelTable t{};
    t.store_kv_f16 = store_kv_f16;
    t.store_kv_f32 = store_kv_f32;
    t.store_kv_q8_0 = store_kv_q8_0;
    return t;
}

}  // namespace

constinit const KernelTable store_kernels = make_store_kernels();

}  // namespace kvarn::scalar
