// Attention over one tile of keys. Heads of one KV head share the loads: a register tile is up to 4 heads wide.
// Every score is one chain of fmas over ascending d and every output one over ascending keys, whatever the tile.
#include "functions.h"
#include "math.h"

namespace kvarn::avx2 {
namespace {

inline __m256 load8(const uint16_t* at) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}
inline __m256 load8(const float* at) { return _mm256_loadu_ps(at); }
inline __m256 load8(const int8_t* at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
}
inline float load1(const uint16_t* at) { return _cvtsh_ss(*at); }
inline float load1(const float* at) { return *at; }
inline float load1(const int8_t* at) { return *at; }

inline int num_groups(int head_dim) { return (head_dim + kQuantBlock - 1) / kQuantBlock; }

// The scales of one group of dimensions: of the 16 keys of a block, and of one value row. f16 and f32 have none and
// one group of any length. An int8 times an f16 is exact in float, so q8_0 sums what a cache of floats would.
template <class Value>
struct Scales {
    static constexpr int kGroup = 1 << 30;
    Scales() = default;
    Scales(const Value*, int, int) {}
    __m256 low(__m256 keys) const { return keys; }
    __m256 high(__m256 keys) const { return keys; }
    static __m256 of_row(const Value*, int, int, int) { return set(1); }
    static __m256 scaled(__m256 value, __m256) { return value; }
    static float scaled1(float value, float) { return value; }
};

template <>
struct Scales<int8_t> {
    static constexpr int kGroup = kQuantBlock;
    __m256 low_f32x8, high_f32x8;

    Scales() = default;
    Scales(const int8_t* block, int head_dim, int d) {
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(block + head_dim * kKVBlock);
        low_f32x8 = load8(scales + d / kQuantBlock * kKVBlock);
        high_f32x8 = load8(scales + d / kQuantBlock * kKVBlock + 8);
    }
    __m256 low(__m256 keys) const { return _mm256_mul_ps(keys, low_f32x8); }
    __m256 high(__m256 keys) const { return _mm256_mul_ps(keys, high_f32x8); }
    static __m256 of_row(const int8_t* block, int slot, int head_dim, int d) {
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(block + head_dim * kKVBlock);
        const uint16_t scale = scales[slot * num_groups(head_dim) + d / kQuantBlock];
        return _mm256_cvtph_ps(_mm_set1_epi16(static_cast<short>(scale)));
    }
    static __m256 scaled(__m256 value, __m256 scale) { return _mm256_mul_ps(value, scale); }
    static float scaled1(float value, float scale) { return value * scale; }
};

struct Span {
    int first, last;  // visible keys of the tile
    int begin() const { return first / kKVBlock; }
    int end() const { return (last + kKVBlock - 1) / kKVBlock; }
};

// scores[h][16 b ..] = q . k for kHeads heads and kBlocks blocks of keys from `block` on.
template <class Value, int kHeads, int kBlocks>
inline void dot_keys(const float* q, int head_dim, const KVTile& tile, int block, float* scores) {
    __m256 sum[kHeads][kBlocks][2];
    Scales<Value> scales[kBlocks];
    const Value* keys[kBlocks];
    for (int b = 0; b < kBlocks; ++b) {
        keys[b] = static_cast<const Value*>(tile.k[block + b]);
        for (int h = 0; h < kHeads; ++h) sum[h][b][0] = sum[h][b][1] = set(0);
    }
    for (int begin = 0; begin < head_dim; begin += Scales<Value>::kGroup) {
        const int end = head_dim - begin < Scales<Value>::kGroup ? head_dim : begin + Scales<Value>::kGroup;
        for (int b = 0; b < kBlocks; ++b) scales[b] = Scales<Value>(keys[b], head_dim, begin);
        for (int d = begin; d < end; ++d)
            for (int b = 0; b < kBlocks; ++b) {
                const __m256 low = scales[b].low(load8(keys[b] + d * kKVBlock));
                const __m256 high = scales[b].high(load8(keys[b] + d * kKVBlock + 8));
                for (int h = 0; h < kHeads; ++h) {
                    const __m256 query = _mm256_broadcast_ss(q + h * head_dim + d);
                    sum[h][b][0] = _mm256_fmadd_ps(query, low, sum[h][b][0]);
                    sum[h][b][1] = _mm256_fmadd_ps(query, high, sum[h][b][1]);
                }
            }
    }
    // Unrolled: an index left over would keep the sums in memory throughout the loop above.
#pragma GCC unroll 8
    for (int i = 0; i < kHeads * kBlocks; ++i) {
        const int h = i / kBlocks, b = i % kBlocks;
        float* to = scores + h * kKeyTile + (block + b) * kKVBlock;
        _mm256_storeu_ps(to, sum[h][b][0]);
        _mm256_storeu_ps(to + 8, sum[h][b][1]);
    }
}

template <class Value, int kHeads, int kBlocks>
inline void dot_span(const float* q, int head_dim, const KVTile& tile, Span span, float* scores) {
    int block = span.begin();
    for (; block + kBlocks <= span.end(); block += kBlocks)
        dot_keys<Value, kHeads, kBlocks>(q, head_dim, tile, block, scores);
    for (; block < span.end(); ++block) dot_keys<Value, kHeads, 1>(q, head_dim, tile, block, scores);
}

// sum[h][d ..] = sum over keys of weight[h][key] * V[key][d ..] for kVectors * 8 columns, d a multiple of that.
template <class Value, int kHeads, int kVectors>
inline void sum_values(const float* weights, const KVTile& tile, Span span, int head_dim, int d, const float* keep,
                       const float* take, float* acc) {
    __m256 sum[kHeads][kVectors];
    for (int h = 0; h < kHeads; ++h)
        for (int i = 0; i < kVectors; ++i) sum[h][i] = set(0);
    for (int key = span.first; key < span.last; ++key) {
        const Value* block = static_cast<const Value*>(tile.v[key / kKVBlock]);
        const Value* row = block + key % kKVBlock * head_dim + d;
        __m256 weight[kHeads];
        for (int h = 0; h < kHeads; ++h) weight[h] = _mm256_broadcast_ss(weights + h * kKeyTile + key);
        __m256 scale = set(1);
        for (int i = 0; i < kVectors; ++i) {
            if (i % 4 == 0) scale = Scales<Value>::of_row(block, key % kKVBlock, head_dim, d + 8 * i);
            const __m256 value = Scales<Value>::scaled(load8(row + 8 * i), scale);
            for (int h = 0; h < kHeads; ++h) sum[h][i] = _mm256_fmadd_ps(weight[h], value, sum[h][i]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kHeads * kVectors; ++i) {
        const int h = i / kVectors, vector = i % kVectors;
        float* to = acc + h * head_dim + d + 8 * vector;
        const __m256 kept = _mm256_mul_ps(_mm256_loadu_ps(to), set(keep[h]));
        _mm256_storeu_ps(to, _mm256_fmadd_ps(sum[h][vector], set(take[h]), kept));
    }
}

// The last head_dim % 8 columns of one head.
template <class Value>
void sum_values_tail(const float* weights, const KVTile& tile, Span span, int head_dim, int d, float keep, float take,
                     float* acc) {
    for (; d < head_dim; ++d) {
        float sum = 0;
        for (int key = span.first; key < span.last; ++key) {
            const Value* block = static_cast<const Value*>(tile.v[key / kKVBlock]);
            const float scale = first_lane(Scales<Value>::of_row(block, key % kKVBlock, head_dim, d));
            const float value = Scales<Value>::scaled1(load1(block + key % kKVBlock * head_dim + d), scale);
            sum = __builtin_fmaf(weights[key], value, sum);
        }
        acc[d] = __builtin_fmaf(sum, take, acc[d] * keep);
    }
}

// Turn the scores of one head into exp(score - maximum), zero outside the span; return maximum and sum.
struct Softmax {
    float max, sum;
};

inline Softmax exponentiate(Span span, float scale, float softcap, float* scores) {
    const int begin = span.begin() * kKVBlock, end = span.end() * kKVBlock;
    __m256 max = set(-__builtin_inff());
    for (int key = begin; key < end; key += 8) {
        __m256 score = _mm256_mul_ps(_mm256_loadu_ps(scores + key), set(scale));
        if (softcap > 0) {
            const __m256 cap = set(softcap);
            score = _mm256_mul_ps(cap, tanh_f32x8(_mm256_div_ps(score, cap)));
        }
        const __m256i at = _mm256_add_epi32(_mm256_set1_epi32(key), lane_numbers());
        const __m256i hidden = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(span.first), at),
                                               _mm256_cmpgt_epi32(at, _mm256_set1_epi32(span.last - 1)));
        score = _mm256_blendv_ps(score, set(-__builtin_inff()), _mm256_castsi256_ps(hidden));
        max = _mm256_max_ps(max, score);
        _mm256_storeu_ps(scores + key, score);
    }
    const float tile_max = max_lanes(max);
    __m256 sum = set(0);
    for (int key = begin; key < end; key += 8) {
        const __m256 weight = exp_f32x8(_mm256_sub_ps(_mm256_loadu_ps(scores + key), set(tile_max)));
        sum = _mm256_add_ps(sum, weight);
        _mm256_storeu_ps(scores + key, weight);
    }
    return {tile_max, sum_lanes(sum)};
}

// kBlocks and kVectors fill the registers when there are few heads.
template <class Value, int kHeads, int kBlocks, int kVectors>
void attend_heads(const float* q, int head_dim, const KVTile& tile, Span span, float scale, float softcap, float* m,
                  float* l, float* acc, float* scratch) {
    dot_span<Value, kHeads, kBlocks>(q, head_dim, tile, span, scratch);
    float keep[kHeads], take[kHeads];
    for (int h = 0; h < kHeads; ++h) {
        const Softmax part = exponentiate(span, scale, softcap, scratch + h * kKeyTile);
        const float max = m[h] > part.max ? m[h] : part.max;
        keep[h] = first_lane(exp_f32x8(set(m[h] - max)));
        take[h] = first_lane(exp_f32x8(set(part.max - max)));
        m[h] = max;
        l[h] = __builtin_fmaf(part.sum, take[h], l[h] * keep[h]);
    }
    int d = 0;
    for (; d + 8 * kVectors <= head_dim; d += 8 * kVectors)
        sum_values<Value, kHeads, kVectors>(scratch, tile, span, head_dim, d, keep, take, acc);
    for (; d + 8 <= head_dim; d += 8) sum_values<Value, kHeads, 1>(scratch, tile, span, head_dim, d, keep, take, acc);
    for (int h = 0; h < kHeads && d < head_dim; ++h)
        sum_values_tail<Value>(scratch + h * kKeyTile, tile, span, head_dim, d, keep[h], take[h], acc + h * head_dim);
}

template <class Value>
void attend(const float* q, int num_heads, int head_dim, const KVTile& tile, int first, int last, float scale,
            float softcap, float* m, float* l, float* acc, float* scratch) {
    const Span span{first, last};
    for (int head = 0; head < num_heads;) {
        const float* query = q + static_cast<size_t>(head) * head_dim;
        float* sums = acc + static_cast<size_t>(head) * head_dim;
        float* scores = scratch + head * kKeyTile;
        const auto run = [&](auto kernel) {
            kernel(query, head_dim, tile, span, scale, softcap, m + head, l + head, sums, scores);
        };
        const int left = num_heads - head;
        if (left >= 4) run(attend_heads<Value, 4, 1, 2>);
        else if (left == 3) run(attend_heads<Value, 3, 1, 2>);
        else if (left == 2) run(attend_heads<Value, 2, 2, 4>);
        else run(attend_heads < Value, 1, sizeof(Value) == 1 ? 2 : 4, 8 >);  // q8_0 also keeps its scales
        head += left < 4 ? left : 4;
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

void attend_q8_0(const float* q, int num_heads, int head_dim, const KVTile& tile, int first, int last, float scale,
                 float softcap, float* m, float* l, float* acc, float* scratch) noexcept {
    attend<int8_t>(q, num_heads, head_dim, tile, first, last, scale, softcap, m, l, acc, scratch);
}

}  // namespace kvarn::avx2
