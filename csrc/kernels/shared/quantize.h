// Blocks of 32 floats to int8: activations, and keys and values of the cache.
//
// Beside what lanes.h lists, Lanes (eight wide) has
//   Quants, no_quants              32 int8; zeros
//   round_to_int8(x, factor)       x[4] * factor, rounded to nearest even and held to -127 .. 127
//   store(int8_t*, Quants), minus_sums(quants, sums)    minus the sums of the first and of the last 16
//   largest_magnitude_bits(x)      of x[4] as bits: magnitudes order like integers, NaN above infinity above all
//   numbers nearest(x), sum_by_halves      round to nearest even; lanes 0 + 4, 1 + 5, ..., then 0 + 2, 1 + 3, then both
//   store_halves, float_to_half, half_to_float    to f16, round to nearest even, and back
#pragma once
#include "lanes.h"

namespace kvarn::shared {
namespace {

constexpr float kHighestLevel = 127, kLowestLevel = 124;
constexpr float kSmallestAbsmax = 1e-36f;  // 127 / absmax stays finite
constexpr int kInfinityBits = 0x7f800000;
constexpr uint16_t kHalfNaN = 0x7e00;

// The level whose grid fits a block best; rounding_error(s) is the squared distance of its x * s from whole numbers.
template <class Error>
inline float best_level(float absmax, Error rounding_error) {
    float best = kHighestLevel, least = 0;
    for (float level = kHighestLevel; level >= kLowestLevel; --level) {
        const float d = absmax / level;
        const float error = rounding_error(level / absmax) * (d * d);
        if (level == kHighestLevel || error < least) least = error, best = level;
    }
    return best;
}

template <class L>
inline float rounding_error(const typename L::Floats x[4], float s) {
    typename L::Floats sum = L::set(0);
    for (int j = 0; j < 4; ++j) {
        const auto scaled = L::mul(x[j], L::set(s));
        const auto error = L::sub(scaled, L::nearest(scaled));
        sum = L::add(sum, L::mul(error, error));
    }
    return L::sum_by_halves(sum);
}

// A block with NaN or infinity gets q = 0 and scale NaN, so that every output it reaches is NaN.
template <class L>
void quantize_row(const float* x, int k, int t, int n, int8_t* q, float* scale, float* sum,
                  int32_t* minus_sums) noexcept {
    for (int b = 0; b < k / kQuantBlock; ++b) {
        const size_t at = static_cast<size_t>(b) * n + t;
        typename L::Floats values[4];
        for (int j = 0; j < 4; ++j) values[j] = L::load(x + kQuantBlock * b + L::kWidth * j);
        const int bits = L::largest_magnitude_bits(values);
        const float absmax = bits < kInfinityBits ? __builtin_bit_cast(float, bits) : __builtin_nanf("");
        const bool has_values = absmax >= kSmallestAbsmax;
        const float level =
            has_values ? best_level(absmax, [&](float s) { return rounding_error<L>(values, s); }) : kHighestLevel;
        const float d = has_values || bits >= kInfinityBits ? absmax / level : 0;
        const auto quants = has_values ? L::round_to_int8(values, level / absmax) : L::no_quants();
        L::store(q + at * kQuantBlock, quants);
        scale[at] = d;
        L::minus_sums(quants, minus_sums + 2 * at);
        sum[at] = d * static_cast<float>(-(minus_sums[2 * at] + minus_sums[2 * at + 1]));
    }
}

// One group of n <= 32 values into q, which is filled up with zeros; the scale as f16.
template <class L>
inline uint16_t quantize_group(const float* x, int n, int8_t* q) {
    typename L::Floats value[4];
    for (int j = 0; j < 4; ++j) value[j] = L::load(x + L::kWidth * j, First{n - L::kWidth * j});
    const float absmax = __builtin_bit_cast(float, L::largest_magnitude_bits(value));
    const uint16_t half = L::float_to_half(absmax / 127.0f);
    const float scale = L::half_to_float(half);
    const bool has_values = scale > 0 && scale < __builtin_inff();  // NaN has none
    L::store(q, has_values ? L::round_to_int8(value, 1.0f / scale) : L::no_quants());
    return has_values || scale == 0 ? half : kHalfNaN;
}

// quantize_group(x, n, q) returns the scale of a group as f16.
template <class Group>
inline void store_kv_groups(const float* k, const float* v, int head_dim, int slot, void* k_block, void* v_block,
                            Group quantize_group) {
    int8_t* keys = static_cast<int8_t*>(k_block);
    int8_t* values = static_cast<int8_t*>(v_block);
    uint16_t* key_scales = reinterpret_cast<uint16_t*>(keys + head_dim * kKVBlock);
    uint16_t* value_scales = reinterpret_cast<uint16_t*>(values + head_dim * kKVBlock);
    const int groups = (head_dim + kQuantBlock - 1) / kQuantBlock;
    for (int group = 0; group < groups; ++group) {
        const int d = group * kQuantBlock, n = head_dim - d < kQuantBlock ? head_dim - d : kQuantBlock;
        alignas(32) int8_t q[kQuantBlock];
        key_scales[group * kKVBlock + slot] = quantize_group(k + d, n, q);
        for (int i = 0; i < n; ++i) keys[(d + i) * kKVBlock + slot] = q[i];
        value_scales[slot * groups + group] = quantize_group(v + d, n, q);
        for (int i = 0; i < n; ++i) values[slot * head_dim + d + i] = q[i];
    }
}

template <class L>
void store_kv_f16(const float* k, const float* v, int head_dim, int slot, void* k_block, void* v_block) noexcept {
    uint16_t* keys = static_cast<uint16_t*>(k_block) + slot;
    uint16_t* values = static_cast<uint16_t*>(v_block) + slot * head_dim;
    int d = 0;
    for (; d + L::kWidth <= head_dim; d += L::kWidth) {
        alignas(16) uint16_t column[L::kWidth];
        L::store_halves(column, L::load(k + d));
        for (int i = 0; i < L::kWidth; ++i) keys[(d + i) * kKVBlock] = column[i];
        L::store_halves(values + d, L::load(v + d));
    }
    for (; d < head_dim; ++d) {
        keys[d * kKVBlock] = L::float_to_half(k[d]);
        values[d] = L::float_to_half(v[d]);
    }
}

template <class L>
void store_kv_q8_0(const float* k, const float* v, int head_dim, int slot, void* k_block, void* v_block) noexcept {
    store_kv_groups(k, v, head_dim, slot, k_block, v_block, quantize_group<L>);
}

// f32 needs no rounding: that one is the scalar table's.
template <class L>
constexpr KernelTable store_kernels() {
    KernelTable t{};
    t.store_kv_f16 = store_kv_f16<L>;
    t.store_kv_q8_0 = store_kv_q8_0<L>;
    return t;
}

}  // namespace
}  // namespace kvarn::shared
