// Storing K and V of one token in a block of the cache, rounded to the cache's type.
#include "functions.h"
#include "math.h"

namespace kvarn::neon {
namespace {

constexpr uint16_t kHalfNaN = 0x7e00;

inline uint16x4_t halves(float32x4_t x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }

// One group of n <= 32 values into q, which is filled up with zeros; the scale as f16.
inline uint16_t quantize_group(const float* x, int n, int8_t* q) {
    float32x4_t value[8];
    for (int j = 0; j < 8; ++j) {
        const int left = n - 4 * j;
        value[j] = left >= 4 ? load(x + 4 * j, Four{}) : left > 0 ? load(x + 4 * j, Last{left}) : set(0);
    }
    const float absmax = __builtin_bit_cast(float, largest_magnitude_bits(value));
    const float16x4_t half = vcvt_f16_f32(set(absmax / 127.0f));
    const float scale = vgetq_lane_f32(vcvt_f32_f16(half), 0);
    const bool has_values = scale > 0 && scale < __builtin_inff();  // NaN has none
    int8x16_t quants[2] = {vdupq_n_s8(0), vdupq_n_s8(0)};
    if (has_values) {
        for (float32x4_t& v : value) v = vmulq_n_f32(v, 1.0f / scale);
        round_to_int8(value, quants);
    }
    vst1q_s8(q, quants[0]);
    vst1q_s8(q + 16, quants[1]);
    return has_values || scale == 0 ? vget_lane_u16(vreinterpret_u16_f16(half), 0) : kHalfNaN;
}

}  // namespace

void store_kv_f16(const float* k, const float* v, int head_dim, int slot, void* k_block, void* v_block) noexcept {
    uint16_t* keys = static_cast<uint16_t*>(k_block) + slot;
    uint16_t* values = static_cast<uint16_t*>(v_block) + slot * head_dim;
    int d = 0;
    for (; d + 4 <= head_dim; d += 4) {
        uint16_t column[4];
        vst1_u16(column, halves(vld1q_f32(k + d)));
        for (int i = 0; i < 4; ++i) keys[(d + i) * kKVBlock] = column[i];
        vst1_u16(values + d, halves(vld1q_f32(v + d)));
    }
    for (; d < head_dim; ++d) {
        keys[d * kKVBlock] = vget_lane_u16(halves(set(k[d])), 0);
        values[d] = vget_lane_u16(halves(set(v[d])), 0);
    }
}

void store_kv_q8_0(const float* k, const float* v, int head_dim, int slot, void* k_block, void* v_block) noexcept {
    int8_t* keys = static_cast<int8_t*>(k_block);
    int8_t* values = static_cast<int8_t*>(v_block);
    uint16_t* key_scales = reinterpret_cast<uint16_t*>(keys + head_dim * kKVBlock);
    uint16_t* value_scales = reinterpret_cast<uint16_t*>(values + head_dim * kKVBlock);
    const int groups = (head_dim + kQuantBlock - 1) / kQuantBlock;
    for (int group = 0; group < groups; ++group) {
        const int d = group * kQuantBlock, n = head_dim - d < kQuantBlock ? head_dim - d : kQuantBlock;
        int8_t q[kQuantBlock];
        key_scales[group * kKVBlock + slot] = quantize_group(k + d, n, q);
        for (int i = 0; i < n; ++i) keys[(d + i) * kKVBlock + slot] = q[i];
        value_scales[slot * groups + group] = quantize_group(v + d, n, q);
        for (int i = 0; i < n; ++i) values[slot * head_dim + d + i] = q[i];
    }
}

}  // namespace kvarn::neon
