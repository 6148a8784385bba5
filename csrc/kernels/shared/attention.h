// Attention over one tile of keys. Heads of one KV head share the loads: a register tile is several heads wide.
// Every score is one chain of fmas over ascending d and every output one over ascending keys, whatever the tile.
//
// Beside what lanes.h lists, Lanes has
//   kMaxHeads                              heads of a register tile, at most
//   key_blocks(heads, is_quantized)        blocks of keys of a register tile, a power of two
//   value_vectors(heads)                   vectors of values, likewise
//   kLoadsWholeTile                        whether keys and values of the whole register tile are loaded before their
//   use half_to_float                          of one f16 hide_outside(x, first, last)           -inf in all lanes but
//   [first, last); both may lie outside the vector running_max(max, x), accumulate(sum, x)    max of finite numbers;
//   sum in the order of the set
#pragma once
#include "math.h"

namespace kvarn::shared {
namespace {

// Value: uint16_t (f16), float, or int8_t with f16 scales behind the values (q8_0). An int8 times an f16 is exact in
// float, so q8_0 sums what a cache of floats would.
template <class Value>
constexpr bool kHasScales = sizeof(Value) == 1;

inline int num_scale_groups(int head_dim) { return (head_dim + kQuantBlock - 1) / kQuantBlock; }

template <class Value>
inline const uint16_t* scales_of(const Value* block, int head_dim) {
    return reinterpret_cast<const uint16_t*>(block + head_dim * kKVBlock);
}

struct Span {
    int first, last;  // visible keys of the tile
    int begin() const { return first / kKVBlock; }
    int end() const { return (last + kKVBlock - 1) / kKVBlock; }
};

// scores[h][16 b ..] = q . k for kHeads heads and kBlocks blocks of keys from `block` on.
template <class L, class Value, int kHeads, int kBlocks>
inline void dot_keys(const float* q, int head_dim, const KVTile& tile, int block, float* scores) {
    using Floats = typename L::Floats;
    constexpr int kWidth = L::kWidth, kParts = kKVBlock / kWidth, kLoaded = L::kLoadsWholeTile ? kBlocks : 1;
    constexpr int kGroup = kHasScales<Value> ? kQuantBlock : 1 << 30;  // dimensions with one scale
    Floats sum[kHeads][kBlocks][kParts];
    [[maybe_unused]] Floats scales[kBlocks][kParts];
    const Value* keys[kBlocks];
    for (int b = 0; b < kBlocks; ++b) {
        keys[b] = static_cast<const Value*>(tile.k[block + b]);
        for (int h = 0; h < kHeads; ++h)
            for (int i = 0; i < kParts; ++i) sum[h][b][i] = L::set(0);
    }
    for (int begin = 0; begin < head_dim; begin += kGroup) {
        const int end = head_dim - begin < kGroup ? head_dim : begin + kGroup;
        if constexpr (kHasScales<Value>)
            for (int b = 0; b < kBlocks; ++b)
                for (int i = 0; i < kParts; ++i)
                    scales[b][i] = L::load(scales_of(keys[b], head_dim) + begin / kGroup * kKVBlock + kWidth * i);
        for (int d = begin; d < end; ++d)
            for (int first = 0; first < kBlocks; first += kLoaded) {
                Floats key[kLoaded][kParts];
                for (int b = 0; b < kLoaded; ++b)
                    for (int i = 0; i < kParts; ++i) {
                        key[b][i] = L::load(keys[first + b] + d * kKVBlock + kWidth * i);
                        if constexpr (kHasScales<Value>) key[b][i] = L::mul(key[b][i], scales[first + b][i]);
                    }
                for (int h = 0; h < kHeads; ++h) {
                    const Floats query = L::set(q[h * head_dim + d]);
                    for (int b = 0; b < kLoaded; ++b)
                        for (int i = 0; i < kParts; ++i)
                            sum[h][first + b][i] = L::fma(query, key[b][i], sum[h][first + b][i]);
                }
            }
    }
    // Unrolled: an index left over would keep the sums in memory throughout the loop above.
#pragma GCC unroll 32
    for (int n = 0; n < kHeads * kBlocks * kParts; ++n) {
        const int h = n / kParts / kBlocks, b = n / kParts % kBlocks, i = n % kParts;
        L::store(scores + h * kKeyTile + (block + b) * kKVBlock + kWidth * i, sum[h][b][i]);
    }
}

// Blocks from `block` on, kBlocks at a time, then half as many, down to one.
template <class L, class Value, int kHeads, int kBlocks>
inline void dot_span(const float* q, int head_dim, const KVTile& tile, int block, int end, float* scores) {
    for (; block + kBlocks <= end; block += kBlocks)
        dot_keys<L, Value, kHeads, kBlocks>(q, head_dim, tile, block, scores);
    if constexpr (kBlocks > 1) dot_span<L, Value, kHeads, kBlocks / 2>(q, head_dim, tile, block, end, scores);
}

// Factors of what was there and of this tile when both are merged.
struct Merge {
    float keep, take;
};

// acc[h][d ..] = keep * acc + take * (sum over keys of weight[h][key] * V[key][d ..]) for kVectors vectors of columns.
// d is a multiple of their columns, so that those of one vector have one scale.
template <class L, class Value, int kHeads, int kVectors, class Extent>
inline void sum_values(const float* weights, const KVTile& tile, Span span, int head_dim, int d, const Merge* merge,
                       float* acc, Extent extent) {
    using Floats = typename L::Floats;
    constexpr int kWidth = L::kWidth, kLoaded = L::kLoadsWholeTile ? kVectors : 1;
    Floats sum[kHeads][kVectors];
    for (int h = 0; h < kHeads; ++h)
        for (int i = 0; i < kVectors; ++i) sum[h][i] = L::set(0);
    for (int key = span.first; key < span.last;) {
        const Value* block = static_cast<const Value*>(tile.v[key / kKVBlock]);
        const int block_end = (key / kKVBlock + 1) * kKVBlock, end = block_end < span.last ? block_end : span.last;
        for (; key < end; ++key) {
            const int slot = key % kKVBlock;
            [[maybe_unused]] Floats scale = L::set(1);
            for (int first = 0; first < kVectors; first += kLoaded) {
                Floats value[kLoaded];
                for (int i = 0; i < kLoaded; ++i) {
                    const int column = d + kWidth * (first + i);
                    value[i] = L::load(block + slot * head_dim + column, extent);
                    if constexpr (kHasScales<Value>) {
                        if ((first + i) % (kQuantBlock / kWidth) == 0) {
                            const int at = slot * num_scale_groups(head_dim) + column / kQuantBlock;
                            scale = L::set_half(scales_of(block, head_dim)[at]);
                        }
                        value[i] = L::mul(value[i], scale);
                    }
                }
                for (int h = 0; h < kHeads; ++h) {
                    const Floats weight = L::set(weights[h * kKeyTile + key]);
                    for (int i = 0; i < kLoaded; ++i) sum[h][first + i] = L::fma(weight, value[i], sum[h][first + i]);
                }
            }
        }
    }
#pragma GCC unroll 32
    for (int n = 0; n < kHeads * kVectors; ++n) {
        const int h = n / kVectors, i = n % kVectors;
        float* to = acc + h * head_dim + d + kWidth * i;
        const Floats kept = L::mul(L::load(to, extent), L::set(merge[h].keep));
        L::store(to, L::fma(sum[h][i], L::set(merge[h].take), kept), extent);
    }
}

// Columns from d on, kVectors vectors at a time, then half as many, down to the end of a row within a vector.
template <class L, class Value, int kHeads, int kVectors>
inline void sum_columns(const float* weights, const KVTile& tile, Span span, int head_dim, int d, const Merge* merge,
                        float* acc) {
    for (; d + L::kWidth * kVectors <= head_dim; d += L::kWidth * kVectors)
        sum_values<L, Value, kHeads, kVectors>(weights, tile, span, head_dim, d, merge, acc, Whole{});
    if constexpr (kVectors > 1)
        sum_columns<L, Value, kHeads, kVectors / 2>(weights, tile, span, head_dim, d, merge, acc);
    else if (d < head_dim)
        sum_values<L, Value, kHeads, 1>(weights, tile, span, head_dim, d, merge, acc, First{head_dim - d});
}

template <class L>
inline typename L::Floats scaled_scores(const float* scores, float scale, float softcap, const float* bias) {
    auto scaled = L::mul(L::load(scores), L::set(scale));
    if (softcap > 0) scaled = L::mul(L::set(softcap), tanh<L>(L::div(scaled, L::set(softcap))));
    return bias == nullptr ? scaled : L::add(scaled, L::load(bias));
}

inline const float* at_key(const float* bias, int key) { return bias == nullptr ? nullptr : bias + key; }

struct Softmax {
    float max, sum;
};

// A tile of four vectors of which all keys are visible: its scores never leave the registers.
template <class L>
inline Softmax exponentiate_tile(float scale, float softcap, const float* bias, float* scores) {
    typename L::Floats x[4], sum = L::set(0);
    for (int i = 0; i < 4; ++i)
        x[i] = scaled_scores<L>(scores + L::kWidth * i, scale, softcap, at_key(bias, L::kWidth * i));
    const float max = L::max_lanes(L::max(L::max(x[0], x[1]), L::max(x[2], x[3])));
    for (int i = 0; i < 4; ++i) {
        x[i] = exp<L>(L::sub(x[i], L::set(max)));
        L::accumulate(sum, x[i]);
        L::store(scores + L::kWidth * i, x[i]);
    }
    return {max, L::sum_lanes(sum)};
}

// Turn the scores of one head into exp(score - maximum), zero outside the span; return maximum and sum.
template <class L>
inline Softmax exponentiate(Span span, float scale, float softcap, const float* bias, float* scores) {
    using Floats = typename L::Floats;
    if constexpr (4 * L::kWidth == kKeyTile)
        if (span.first == 0 && span.last == kKeyTile) return exponentiate_tile<L>(scale, softcap, bias, scores);
    const int begin = span.begin() * kKVBlock, end = span.end() * kKVBlock;
    Floats max = L::set(-__builtin_inff());
    for (int key = begin; key < end; key += L::kWidth) {
        Floats score = scaled_scores<L>(scores + key, scale, softcap, at_key(bias, key));
        score = L::hide_outside(score, span.first - key, span.last - key);
        max = L::running_max(max, score);
        L::store(scores + key, score);
    }
    const float tile_max = L::max_lanes(max);
    Floats sum = L::set(0);
    for (int key = begin; key < end; key += L::kWidth) {
        const Floats weight = exp<L>(L::sub(L::load(scores + key), L::set(tile_max)));
        L::accumulate(sum, weight);
        L::store(scores + key, weight);
    }
    return {tile_max, L::sum_lanes(sum)};
}

template <class L, class Value, int kHeads>
void attend_heads(const float* q, int head_dim, const KVTile& tile, Span span, float scale, float softcap,
                  const float* bias, float* m, float* l, float* acc, float* scratch) {
    dot_span<L, Value, kHeads, L::key_blocks(kHeads, kHasScales<Value>)>(q, head_dim, tile, span.begin(), span.end(),
                                                                         scratch);
    // Of each head: how far its old maximum and the tile's are below the new one. One exp serves several heads.
    constexpr int kNumExps = (2 * kHeads + L::kWidth - 1) / L::kWidth;
    alignas(64) float below[kNumExps * L::kWidth] = {};
    float sums[kHeads];
    for (int h = 0; h < kHeads; ++h) {
        const Softmax part = exponentiate<L>(span, scale, softcap, at_key(bias, h * kKeyTile), scratch + h * kKeyTile);
        const float max = m[h] > part.max ? m[h] : part.max;
        below[2 * h] = m[h] - max;
        below[2 * h + 1] = part.max - max;
        m[h] = max;
        sums[h] = part.sum;
    }
    for (int i = 0; i < kNumExps; ++i) L::store(below + L::kWidth * i, exp<L>(L::load(below + L::kWidth * i)));
    Merge merge[kHeads];
    for (int h = 0; h < kHeads; ++h) {
        merge[h] = {below[2 * h], below[2 * h + 1]};
        l[h] = __builtin_fmaf(sums[h], merge[h].take, l[h] * merge[h].keep);
    }
    sum_columns<L, Value, kHeads, L::value_vectors(kHeads)>(scratch, tile, span, head_dim, 0, merge, acc);
}

// As many of the heads as a register tile holds, kHeads at most; returns how many.
template <class L, class Value, int kHeads>
inline int attend_some(const float* q, int num_heads, int head_dim, const KVTile& tile, Span span, float scale,
                       float softcap, const float* bias, float* m, float* l, float* acc, float* scratch) {
    if constexpr (kHeads > 1)
        if (num_heads < kHeads)
            return attend_some<L, Value, kHeads - 1>(q, num_heads, head_dim, tile, span, scale, softcap, bias, m, l,
                                                     acc, scratch);
    attend_heads<L, Value, kHeads>(q, head_dim, tile, span, scale, softcap, bias, m, l, acc, scratch);
    return kHeads;
}

template <class L, class Value>
void attend(const float* q, int num_heads, int head_dim, const KVTile& tile, int first, int last, float scale,
            float softcap, const float* bias, float* m, float* l, float* acc, float* scratch) noexcept {
    for (int head = 0; head < num_heads;) {
        const size_t at = static_cast<size_t>(head) * head_dim;
        head += attend_some<L, Value, L::kMaxHeads>(q + at, num_heads - head, head_dim, tile, {first, last}, scale,
                                                    softcap, at_key(bias, head * kKeyTile), m + head, l + head,
                                                    acc + at, scratch + head * kKeyTile);
    }
}

template <class L>
constexpr KernelTable attention_kernels() {
    KernelTable t{};
    t.attend_f16 = attend<L, uint16_t>;
    t.attend_f32 = attend<L, float>;
    t.attend_q8_0 = attend<L, int8_t>;
    return t;
}

}  // namespace
}  // namespace kvarn::shared
