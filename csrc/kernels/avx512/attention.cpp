// Attention over one tile of keys, 16 keys or 16 dimensions to a vector. Heads of one KV head share the loads.
// Every score is one chain of fmas over ascending d and every output one over ascending keys, whatever the tile.
#include "functions.h"
#include "math.h"

namespace kvarn::avx512 {
namespace {

inline __m512 load16(const uint16_t* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}
inline __m512 load16(const float* at) { return _mm512_loadu_ps(at); }
inline __m512 load16(const int8_t* at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
}
// The first lanes of a row that ends.
inline __m512 load_some(const uint16_t* at, __mmask16 mask) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, at));
}
inline __m512 load_some(const float* at, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, at); }
inline __m512 load_some(const int8_t* at, __mmask16 mask) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, at)));
}

inline int num_groups(int head_dim) { return (head_dim + kQuantBlock - 1) / kQuantBlock; }

// Scales of a group of dimensions: of the 16 keys of a block, and of one value row. f16 and f32 have none and one group
// of any length. An int8 times an f16 is exact in float, so q8_0 sums what a cache of floats would.
template <class Value>
struct Scales {
    static constexpr int kGroup = 1 << 30;
    static __m512 of_keys(const Value*, int, int) { return set(1); }
    static __m512 of_row(const Value*, int, int, int) { return set(1); }
    static __m512 scaled(__m512 value, __m512) { return value; }
};

template <>
struct Scales<int8_t> {
    static constexpr int kGroup = kQuantBlock;
    static const uint16_t* of_block(const int8_t* block, int head_dim) {
        return reinterpret_cast<const uint16_t*>(block + head_dim * kKVBlock);
    }
    static __m512 of_keys(const int8_t* block, int head_dim, int d) {
        return load16(of_block(block, head_dim) + d / kQuantBlock * kKVBlock);
    }
    static __m512 of_row(const int8_t* block, int slot, int head_dim, int d) {
        const uint16_t scale = of_block(block, head_dim)[slot * num_groups(head_dim) + d / kQuantBlock];
        return set(_cvtsh_ss(scale));
    }
    static __m512 scaled(__m512 value, __m512 scale) { return _mm512_mul_ps(value, scale); }
};

struct Span {
    int first, last;  // visible keys of the tile
    int begin() const { return first / kKVBlock; }
    int end() const { return (last + kKVBlock - 1) / kKVBlock; }
};

// scores[h][16 b ..] = q . k for kHeads heads and kBlocks blocks of keys from `block` on.
template <class Value, int kHeads, int kBlocks>
inline void dot_keys(const float* q, int head_dim, const KVTile& tile, int block, float* scores) {
    __m512 sum[kHeads][kBlocks], scales[kBlocks];
    const Value* keys[kBlocks];
    for (int b = 0; b < kBlocks; ++b) {
        keys[b] = static_cast<const Value*>(tile.k[block + b]);
        for (int h = 0; h < kHeads; ++h) sum[h][b] = set(0);
    }
    for (int begin = 0; begin < head_dim; begin += Scales<Value>::kGroup) {
        const int end = head_dim - begin < Scales<Value>::kGroup ? head_dim : begin + Scales<Value>::kGroup;
        for (int b = 0; b < kBlocks; ++b) scales[b] = Scales<Value>::of_keys(keys[b], head_dim, begin);
        for (int d = begin; d < end; ++d) {
            __m512 key[kBlocks];
            for (int b = 0; b < kBlocks; ++b) key[b] = Scales<Value>::scaled(load16(keys[b] + d * kKVBlock), scales[b]);
            for (int h = 0; h < kHeads; ++h) {
                const __m512 query = set(q[h * head_dim + d]);
                for (int b = 0; b < kBlocks; ++b) sum[h][b] = _mm512_fmadd_ps(query, key[b], sum[h][b]);
            }
        }
    }
    // Unrolled: an index left over would keep the sums in memory throughout the loop above.
#pragma GCC unroll 32
    for (int i = 0; i < kHeads * kBlocks; ++i)
        _mm512_storeu_ps(scores + i / kBlocks * kKeyTile + (block + i % kBlocks) * kKVBlock,
                         sum[i / kBlocks][i % kBlocks]);
}

template <class Value, int kHeads>
inline void dot_span(const float* q, int head_dim, const KVTile& tile, Span span, float* scores) {
    int block = span.begin();
    for (; block + 4 <= span.end(); block += 4) dot_keys<Value, kHeads, 4>(q, head_dim, tile, block, scores);
    for (; block + 2 <= span.end(); block += 2) dot_keys<Value, kHeads, 2>(q, head_dim, tile, block, scores);
    for (; block < span.end(); ++block) dot_keys<Value, kHeads, 1>(q, head_dim, tile, block, scores);
}

struct Merge {
    float keep, take;  // factors of what was there and of this tile
};

// acc[h][d ..] for kVectors * 16 columns; the last vector may end early.
template <class Value, int kHeads, int kVectors, bool kIsWhole>
inline void sum_values(const float* weights, const KVTile& tile, Span span, int head_dim, int d, const Merge* merge,
                       float* acc) {
    const __mmask16 mask = kIsWhole ? 0xffff : static_cast<__mmask16>((1u << (head_dim - d)) - 1);
    __m512 sum[kHeads][kVectors];
    for (int h = 0; h < kHeads; ++h)
        for (int i = 0; i < kVectors; ++i) sum[h][i] = set(0);
    for (int key = span.first; key < span.last;) {
        const Value* block = static_cast<const Value*>(tile.v[key / kKVBlock]);
        const int end = (key / kKVBlock + 1) * kKVBlock < span.last ? (key / kKVBlock + 1) * kKVBlock : span.last;
        for (; key < end; ++key) {
            const Value* row = block + key % kKVBlock * head_dim + d;
            __m512 value[kVectors];
            for (int i = 0; i < kVectors; ++i) {
                const __m512 scale = Scales<Value>::of_row(block, key % kKVBlock, head_dim, d + 16 * i);
                value[i] =
                    Scales<Value>::scaled(kIsWhole ? load16(row + 16 * i) : load_some(row + 16 * i, mask), scale);
            }
            for (int h = 0; h < kHeads; ++h) {
                const __m512 weight = set(weights[h * kKeyTile + key]);
                for (int i = 0; i < kVectors; ++i) sum[h][i] = _mm512_fmadd_ps(weight, value[i], sum[h][i]);
            }
        }
    }
#pragma GCC unroll 32
    for (int i = 0; i < kHeads * kVectors; ++i) {
        const int h = i / kVectors, vector = i % kVectors;
        float* to = acc + h * head_dim + d + 16 * vector;
        const __m512 kept = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, to), set(merge[h].keep));
        _mm512_mask_storeu_ps(to, mask, _mm512_fmadd_ps(sum[h][vector], set(merge[h].take), kept));
    }
}

// Turn the scores of one head into exp(score - maximum), zero outside the span; return maximum and sum.
struct Softmax {
    float max, sum;
};

// The same for a tile of which all keys are seen: its scores never leave the registers.
inline Softmax exponentiate_all(float scale, float softcap, float* scores) {
    __m512 x[4];
    for (int i = 0; i < 4; ++i) {
        x[i] = _mm512_mul_ps(_mm512_loadu_ps(scores + 16 * i), set(scale));
        if (softcap > 0) x[i] = _mm512_mul_ps(set(softcap), tanh_f32x16(_mm512_div_ps(x[i], set(softcap))));
    }
    const float max = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3])));
    __m512 sum = set(0);
    for (int i = 0; i < 4; ++i) {
        x[i] = exp_f32x16(_mm512_sub_ps(x[i], set(max)));
        sum = _mm512_add_ps(sum, x[i]);
        _mm512_storeu_ps(scores + 16 * i, x[i]);
    }
    return {max, sum_lanes(sum)};
}

inline Softmax exponentiate(Span span, float scale, float softcap, float* scores) {
    if (span.first == 0 && span.last == kKeyTile) return exponentiate_all(scale, softcap, scores);
    const int begin = span.begin() * kKVBlock, end = span.end() * kKVBlock;
    const __m512 hidden = set(-__builtin_inff());
    __m512 max = hidden;
    for (int key = begin; key < end; key += 16) {
        __m512 score = _mm512_mul_ps(_mm512_loadu_ps(scores + key), set(scale));
        if (softcap > 0) {
            const __m512 cap = set(softcap);
            score = _mm512_mul_ps(cap, tanh_f32x16(_mm512_div_ps(score, cap)));
        }
        score = _mm512_mask_mov_ps(hidden, lanes_between(span.first - key, span.last - key), score);
        max = _mm512_max_ps(max, score);
        _mm512_storeu_ps(scores + key, score);
    }
    const float tile_max = _mm512_reduce_max_ps(max);
    __m512 sum = set(0);
    for (int key = begin; key < end; key += 16) {
        const __m512 weight = exp_f32x16(_mm512_sub_ps(_mm512_loadu_ps(scores + key), set(tile_max)));
        sum = _mm512_add_ps(sum, weight);
        _mm512_storeu_ps(scores + key, weight);
    }
    return {tile_max, sum_lanes(sum)};
}

template <class Value, int kHeads>
void attend_heads(const float* q, int head_dim, const KVTile& tile, Span span, float scale, float softcap, float* m,
                  float* l, float* acc, float* scratch) {
    dot_span<Value, kHeads>(q, head_dim, tile, span, scratch);
    Softmax part[kHeads];
    alignas(64) float below[16] = {};  // of each head: how far its old maximum and the tile's are below the new one
    static_assert(2 * kHeads <= 16);
    for (int h = 0; h < kHeads; ++h) {
        part[h] = exponentiate(span, scale, softcap, scratch + h * kKeyTile);
        const float max = m[h] > part[h].max ? m[h] : part[h].max;
        below[2 * h] = m[h] - max;
        below[2 * h + 1] = part[h].max - max;
        m[h] = max;
    }
    _mm512_store_ps(below, exp_f32x16(_mm512_load_ps(below)));
    Merge merge[kHeads];
    for (int h = 0; h < kHeads; ++h) {
        merge[h] = {below[2 * h], below[2 * h + 1]};
        l[h] = __builtin_fmaf(part[h].sum, merge[h].take, l[h] * merge[h].keep);
    }
    int d = 0;
    for (; d + 64 <= head_dim; d += 64)
        sum_values<Value, kHeads, 4, true>(scratch, tile, span, head_dim, d, merge, acc);
    for (; d + 32 <= head_dim; d += 32)
        sum_values<Value, kHeads, 2, true>(scratch, tile, span, head_dim, d, merge, acc);
    for (; d + 16 <= head_dim; d += 16)
        sum_values<Value, kHeads, 1, true>(scratch, tile, span, head_dim, d, merge, acc);
    if (d < head_dim) sum_values<Value, kHeads, 1, false>(scratch, tile, span, head_dim, d, merge, acc);
}

template <class Value>
void attend(const float* q, int num_heads, int head_dim, const KVTile& tile, int first, int last, float scale,
            float softcap, float* m, float* l, float* acc, float* scratch) {
    const Span span{first, last};
    for (int head = 0; head < num_heads;) {
        const float* query = q + static_cast<size_t>(head) * head_dim;
        float* sums = acc + static_cast<size_t>(head) * head_dim;
        float* scores = scratch + head * kKeyTile;
        const auto run = [&](auto kernel, int count) {
            kernel(query, head_dim, tile, span, scale, softcap, m + head, l + head, sums, scores);
            head += count;
        };
        const int left = num_heads - head;
        if (left >= 6) run(attend_heads<Value, 6>, 6);
        else if (left == 5) run(attend_heads<Value, 5>, 5);
        else if (left == 4) run(attend_heads<Value, 4>, 4);
        else if (left == 3) run(attend_heads<Value, 3>, 3);
        else if (left == 2) run(attend_heads<Value, 2>, 2);
        else run(attend_heads<Value, 1>, 1);
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

}  // namespace kvarn::avx512
