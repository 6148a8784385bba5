// Attention over one tile of keys. Heads of one KV head share the loads: a register tile is up to 4 heads wide.
// Every score is one chain of fmas over ascending d and every output one over ascending keys, whatever the tile.
#include "functions.h"
#include "math.h"

namespace kvarn::neon {
namespace {

// Eight neighbouring values as floats.
inline void load8(const float* at, float32x4_t out[2]) {
    out[0] = vld1q_f32(at);
    out[1] = vld1q_f32(at + 4);
}
inline void load8(const uint16_t* at, float32x4_t out[2]) {
    const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(at));
    out[0] = vcvt_f32_f16(vget_low_f16(halves));
    out[1] = vcvt_high_f32_f16(halves);
}
inline void load8(const int8_t* at, float32x4_t out[2]) {
    const int16x8_t wide = vmovl_s8(vld1_s8(at));
    out[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
    out[1] = vcvtq_f32_s32(vmovl_high_s16(wide));
}
inline float half_to_float(uint16_t half) {
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(half))), 0);
}
inline float load1(const uint16_t* at) { return half_to_float(*at); }
inline float load1(const float* at) { return *at; }
inline float load1(const int8_t* at) { return *at; }

inline int num_groups(int head_dim) { return (head_dim + kQuantBlock - 1) / kQuantBlock; }

// The scales of one group of dimensions: of the 16 keys of a block, and of one value row. f16 and f32 have none and
// one group of any length. An int8 times an f16 is exact in float, so q8_0 sums what a cache of floats would.
template <class Value>
struct Scales {
    static constexpr int kGroup = 1 << 30;
    void load(const Value*, int, int) {}
    float32x4_t scaled(float32x4_t keys, int) const { return keys; }
    static float of_row(const Value*, int, int, int) { return 1; }
    static float32x4_t scaled_row(float32x4_t value, float) { return value; }
    static float scaled1(float value, float) { return value; }
};

template <>
struct Scales<int8_t> {
    static constexpr int kGroup = kQuantBlock;
    float32x4_t of_keys[4];

    void load(const int8_t* block, int head_dim, int d) {
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(block + head_dim * kKVBlock);
        load8(scales + d / kQuantBlock * kKVBlock, of_keys);
        load8(scales + d / kQuantBlock * kKVBlock + 8, of_keys + 2);
    }
    float32x4_t scaled(float32x4_t keys, int i) const { return vmulq_f32(keys, of_keys[i]); }
    static float of_row(const int8_t* block, int slot, int head_dim, int d) {
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(block + head_dim * kKVBlock);
        return half_to_float(scales[slot * num_groups(head_dim) + d / kQuantBlock]);
    }
    static float32x4_t scaled_row(float32x4_t value, float scale) { return vmulq_n_f32(value, scale); }
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
    float32x4_t sum[kHeads][kBlocks][4];
    Scales<Value> scales[kBlocks];
    const Value* keys[kBlocks];
    for (int b = 0; b < kBlocks; ++b) {
        keys[b] = static_cast<const Value*>(tile.k[block + b]);
        for (int h = 0; h < kHeads; ++h)
            for (int i = 0; i < 4; ++i) sum[h][b][i] = set(0);
    }
    for (int begin = 0; begin < head_dim; begin += Scales<Value>::kGroup) {
        const int end = head_dim - begin < Scales<Value>::kGroup ? head_dim : begin + Scales<Value>::kGroup;
        for (int b = 0; b < kBlocks; ++b) scales[b].load(keys[b], head_dim, begin);
        for (int d = begin; d < end; ++d)
            for (int b = 0; b < kBlocks; ++b) {
                float32x4_t key[4];
                load8(keys[b] + d * kKVBlock, key);
                load8(keys[b] + d * kKVBlock + 8, key + 2);
                for (int i = 0; i < 4; ++i) key[i] = scales[b].scaled(key[i], i);
                for (int h = 0; h < kHeads; ++h)
                    for (int i = 0; i < 4; ++i) sum[h][b][i] = vfmaq_n_f32(sum[h][b][i], key[i], q[h * head_dim + d]);
            }
    }
    // Unrolled: an index left over would keep the sums in memory throughout the loop above.
#pragma GCC unroll 16
    for (int n = 0; n < kHeads * kBlocks * 4; ++n) {
        const int h = n / 4 / kBlocks, b = n / 4 % kBlocks, i = n % 4;
        vst1q_f32(scores + h * kKeyTile + (block + b) * kKVBlock + 4 * i, sum[h][b][i]);
    }
}

template <class Value, int kHeads, int kBlocks>
inline void dot_span(const float* q, int head_dim, const KVTile& tile, Span span, float* scores) {
    int block = span.begin();
    for (; block + kBlocks <= span.end(); block += kBlocks)
        dot_keys<Value, kHeads, kBlocks>(q, head_dim, tile, block, scores);
    for (; block < span.end(); ++block) dot_keys<Value, kHeads, 1>(q, head_dim, tile, block, scores);
}

// sum[h][d ..] = sum over keys of weight[h][key] * V[key][d ..] for kEights * 8 columns, d a multiple of that.
template <class Value, int kHeads, int kEights>
inline void sum_values(const float* weights, const KVTile& tile, Span span, int head_dim, int d, const float* keep,
                       const float* take, float* acc) {
    float32x4_t sum[kHeads][kEights][2];
    for (int h = 0; h < kHeads; ++h)
        for (int i = 0; i < kEights; ++i) sum[h][i][0] = sum[h][i][1] = set(0);
    for (int key = span.first; key < span.last; ++key) {
        const Value* block = static_cast<const Value*>(tile.v[key / kKVBlock]);
        const Value* row = block + key % kKVBlock * head_dim + d;
        float scale = 1;
        for (int i = 0; i < kEights; ++i) {
            if (i % 4 == 0) scale = Scales<Value>::of_row(block, key % kKVBlock, head_dim, d + 8 * i);
            float32x4_t value[2];
            load8(row + 8 * i, value);
            for (float32x4_t& part : value) part = Scales<Value>::scaled_row(part, scale);
            for (int h = 0; h < kHeads; ++h)
                for (int half = 0; half < 2; ++half)
                    sum[h][i][half] = vfmaq_n_f32(sum[h][i][half], value[half], weights[h * kKeyTile + key]);
        }
    }
#pragma GCC unroll 16
    for (int n = 0; n < kHeads * kEights * 2; ++n) {
        const int h = n / 2 / kEights, i = n / 2 % kEights, half = n % 2;
        float* to = acc + h * head_dim + d + 8 * i + 4 * half;
        vst1q_f32(to, vfmaq_n_f32(vmulq_n_f32(vld1q_f32(to), keep[h]), sum[h][i][half], take[h]));
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
            const float scale = Scales<Value>::of_row(block, key % kKVBlock, head_dim, d);
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
    const uint32x4_t first = vdupq_n_u32(static_cast<uint32_t>(span.first));
    const uint32x4_t last = vdupq_n_u32(static_cast<uint32_t>(span.last));
    float32x4_t max = set(-__builtin_inff());
    for (int key = begin; key < end; key += 4) {
        float32x4_t score = vmulq_n_f32(vld1q_f32(scores + key), scale);
        if (softcap > 0) score = vmulq_n_f32(tanh_f32x4(vdivq_f32(score, set(softcap))), softcap);
        const uint32x4_t at = vaddq_u32(vdupq_n_u32(static_cast<uint32_t>(key)), lane_numbers());
        const uint32x4_t is_visible = vandq_u32(vcgeq_u32(at, first), vcltq_u32(at, last));
        score = vbslq_f32(is_visible, score, set(-__builtin_inff()));
        max = vmaxnmq_f32(max, score);  // passes over NaN, whose weight below is NaN
        vst1q_f32(scores + key, score);
    }
    const float tile_max = vmaxnmvq_f32(max);
    float32x4_t sum = set(0);
    for (int key = begin; key < end; key += 4) {
        const float32x4_t weight = exp_f32x4(vsubq_f32(vld1q_f32(scores + key), set(tile_max)));
        sum = vaddq_f32(sum, weight);
        vst1q_f32(scores + key, weight);
    }
    return {tile_max, vaddvq_f32(sum)};
}

// kBlocks and kEights fill the registers when there are few heads.
template <class Value, int kHeads, int kBlocks, int kEights>
void attend_heads(const float* q, int head_dim, const KVTile& tile, Span span, float scale, float softcap, float* m,
                  float* l, float* acc, float* scratch) {
    dot_span<Value, kHeads, kBlocks>(q, head_dim, tile, span, scratch);
    float keep[kHeads], take[kHeads];
    for (int h = 0; h < kHeads; ++h) {
        const Softmax part = exponentiate(span, scale, softcap, scratch + h * kKeyTile);
        const float max = m[h] > part.max ? m[h] : part.max;
        keep[h] = exp_f32(m[h] - max);
        take[h] = exp_f32(part.max - max);
        m[h] = max;
        l[h] = __builtin_fmaf(part.sum, take[h], l[h] * keep[h]);
    }
    int d = 0;
    for (; d + 8 * kEights <= head_dim; d += 8 * kEights)
        sum_values<Value, kHeads, kEights>(scratch, tile, span, head_dim, d, keep, take, acc);
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

}  // namespace kvarn::neon
