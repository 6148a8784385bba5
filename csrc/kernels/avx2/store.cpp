// Storing K and V of one token in a block of the cache, rounded to the cache's type.
#include "functions.h"
#include "math.h"

namespace kvarn::avx2 {
namespace {

constexpr uint16_t kHalfNaN = 0x7e00;

// One group of n <= 32 values into q, which is filled up with zeros; the scale as f16.
inline uint16_t quantize_group(const float* x, int n, int8_t* q) {
    __m256 value[4];
    for (int j = 0; j < 4; ++j) {
        const __m256i mask = first_lanes(n - 8 * j);
        value[j] = _mm256_maskload_ps(x + 8 * j, mask);
    }
    const float absmax = __builtin_bit_cast(float, largest_magnitude_bits(value));
    const uint16_t half = _cvtss_sh(absmax / 127.0f, 0);
    const float scale = _cvtsh_ss(half);
    const bool has_values = scale > 0 && scale < __builtin_inff();  // NaN has none
    const __m256 inverse = set(has_values ? 1.0f / scale : 0.0f);
    __m256i whole[4];
    for (int j = 0; j < 4; ++j) {
        const __m256 limited = _mm256_max_ps(_mm256_min_ps(_mm256_mul_ps(value[j], inverse), set(127)), set(-127));
        whole[j] = has_values ? _mm256_cvtps_epi32(limited) : _mm256_setzero_si256();
    }
    // The packs work within halves of 128 bits; the permutation puts the words of four back in order.
    const __m256i words =
        _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_store_si256(reinterpret_cast<__m256i*>(q), _mm256_permutevar8x32_epi32(words, order));
    return has_values || scale == 0 ? half : kHalfNaN;
}

}  // namespace

void store_kv_f16(const float* k, const float* v, int head_dim, int slot, void* k_block, void* v_block) noexcept {
    uint16_t* keys = static_cast<uint16_t*>(k_block) + slot;
    uint16_t* values = static_cast<uint16_t*>(v_block) + slot * head_dim;
    int d = 0;
    for (; d + 8 <= head_dim; d += 8) {
        alignas(16) uint16_t column[8];
        _mm_store_si128(reinterpret_cast<__m128i*>(column), _mm256_cvtps_ph(_mm256_loadu_ps(k + d), 0));
        for (int i = 0; i < 8; ++i) keys[(d + i) * kKVBlock] = column[i];
        _mm_storeu_si128(reinterpret_cast<__m128i*>(values + d), _mm256_cvtps_ph(_mm256_loadu_ps(v + d), 0));
    }
    for (; d < head_dim; ++d) {
        keys[d * kKVBlock] = _cvtss_sh(k[d], 0);
        values[d] = _cvtss_sh(v[d], 0);
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

}  // namespace kvarn::avx2
