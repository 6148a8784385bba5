#include "keep.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace kvarn {

namespace {

// Keys as floats. Half bits times 2^112 is exact for every finite half and, unlike a conversion with cases, goes
// through the vector unit; infinity and NaN become large numbers, which only decides what a damaged model keeps.
float widened(uint16_t half) {
    uint32_t magnitude = std::bit_cast<uint32_t>(std::bit_cast<float>((half & 0x7fffu) << 13) * 0x1p112f);
    return std::bit_cast<float>(magnitude | (half & 0x8000u) << 16);
}

void load_keys(const uint16_t* keys, float* out) {
    for (int slot = 0; slot < kKVBlock; ++slot) out[slot] = widened(keys[slot]);
}
void load_keys(const float* keys, float* out) { std::copy_n(keys, kKVBlock, out); }

// sums[slot] = q . key of that slot, added over ascending d; K of a block is [head_dim][16].
template <class Value>
void dot_block(const float* q, int head_dim, const void* block, float* sums) {
    const Value* keys = static_cast<const Value*>(block);
    std::fill_n(sums, kKVBlock, 0.0f);
    for (int d = 0; d < head_dim; ++d) {
        float key[kKVBlock];
        load_keys(keys + d * kKVBlock, key);
        for (int slot = 0; slot < kKVBlock; ++slot) sums[slot] += q[d] * key[slot];
    }
}

void dot_block_q8_0(const float* q, int head_dim, const void* block, float* sums) {
    const int8_t* keys = static_cast<const int8_t*>(block);
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(keys + head_dim * kKVBlock);
    std::fill_n(sums, kKVBlock, 0.0f);
    for (int d = 0; d < head_dim; ++d)
        for (int slot = 0; slot < kKVBlock; ++slot)
            sums[slot] += q[d] * (static_cast<float>(keys[d * kKVBlock + slot]) *
                                  widened(scales[d / kQuantBlock * kKVBlock + slot]));
}

void dot_keys(KVType type, const float* q, int head_dim, const void* block, float* sums) {
    switch (type) {
        case KVType::f32: return dot_block<float>(q, head_dim, block, sums);
        case KVType::q8_0: return dot_block_q8_0(q, head_dim, block, sums);
        default: return dot_block<uint16_t>(q, head_dim, block, sums);
    }
}

// One Keep in one layer. Outside keys are numbered without the gap of the active block: index -> slot.
class Keeping {
public:
    Keeping(const AttentionSpec& spec, const KVCache& cache, size_t layer, const BatchView& batch, const Keep& keep)
        : spec_(spec), cache_(cache), layer_(layer), keep_(keep), blocks_(batch.blocks(keep.sequence)),
          context_(batch.context_lens[keep.sequence]), group_(spec.num_heads / spec.num_kv_heads) {
        int first = batch.row_starts[keep.sequence];
        row_ = first + keep.block_start - batch.positions[first];
    }

    int num_outside() const { return context_ - (keep_.block_end - keep_.block_start); }

    // mean (head_dim): of the block's queries of one head, rows in ascending order.
    void average(const float* q, int head, float* mean) const {
        size_t stride = static_cast<size_t>(spec_.num_heads * spec_.head_dim);
        int count = keep_.block_end - keep_.block_start;
        std::fill_n(mean, spec_.head_dim, 0.0f);
        for (int i = 0; i < count; ++i) {
            const float* row = q + static_cast<size_t>(row_ + i) * stride + static_cast<size_t>(head * spec_.head_dim);
            for (int d = 0; d < spec_.head_dim; ++d) mean[d] += row[d];
        }
        for (int d = 0; d < spec_.head_dim; ++d) mean[d] /= static_cast<float>(count);
    }

    // scores (num_outside) of one KV head: the largest over its query heads.
    void score(const float* q, int kv_head, float* mean, float* scores) const {
        std::fill_n(scores, num_outside(), -std::numeric_limits<float>::infinity());
        for (int g = 0; g < group_; ++g) {
            average(q, kv_head * group_ + g, mean);
            for (int slot = 0; slot < context_; slot += kKVBlock) {
                float sums[kKVBlock];
                dot_keys(cache_.type(), mean, spec_.head_dim, cache_.k(blocks_[slot / kKVBlock], layer_, kv_head),
                         sums);
                for (int i = 0; i < std::min(kKVBlock, context_ - slot); ++i) {
                    if (is_active(slot + i)) continue;
                    float& best = scores[index_of(slot + i)];
                    best = std::max(best, sums[i] * spec_.scale);  // NaN never wins
                }
            }
        }
    }

    void pool(const float* scores, float* pooled) const {
        int reach = keep_.pool_kernel / 2, count = num_outside();
        for (int i = 0; i < count; ++i)
            pooled[i] = *std::max_element(scores + std::max(0, i - reach), scores + std::min(count, i + reach + 1));
    }

    // The num_kept best indices, ascending.
    void choose(const float* pooled, int32_t* order) const {
        for (int i = 0; i < num_outside(); ++i) order[i] = i;
        std::nth_element(order, order + keep_.num_kept, order + num_outside(),
                         [&](int32_t a, int32_t b) { return pooled[a] != pooled[b] ? pooled[a] > pooled[b] : a < b; });
        std::sort(order, order + keep_.num_kept);
    }

    void copy(const int32_t* order, int kv_head) const {
        for (int i = 0; i < keep_.num_kept; ++i) {
            int slot = order[i] < keep_.block_start ? order[i] : order[i] + keep_.block_end - keep_.block_start;
            cache_.copy_slot({blocks_[slot / kKVBlock], slot % kKVBlock},
                             {keep_.table[static_cast<size_t>(i / kKVBlock)], i % kKVBlock}, layer_, kv_head);
        }
    }

private:
    bool is_active(int slot) const { return slot >= keep_.block_start && slot < keep_.block_end; }
    int index_of(int slot) const {
        return slot < keep_.block_start ? slot : slot - (keep_.block_end - keep_.block_start);
    }

    const AttentionSpec& spec_;
    const KVCache& cache_;
    size_t layer_;
    const Keep& keep_;
    const int32_t* blocks_;
    int context_, group_, row_;
};

}  // namespace

void Keeper::pack(const Compute& compute, const AttentionSpec& spec, const KVCache& cache, size_t layer,
                  const BatchView& batch, const float* q) {
    for (const Keep& keep : batch.keep) {
        if (keep.num_kept == 0) continue;
        Keeping keeping(spec, cache, layer, batch, keep);
        size_t heads = static_cast<size_t>(spec.num_kv_heads), count = static_cast<size_t>(keeping.num_outside());
        mean_.resize(std::max(mean_.size(), heads * static_cast<size_t>(spec.head_dim)));
        scores_.resize(std::max(scores_.size(), heads * count));
        pooled_.resize(std::max(pooled_.size(), heads * count));
        order_.resize(std::max(order_.size(), heads * count));
        auto keep_best = [&](size_t kv_head) {
            keeping.pool(scores_.data() + kv_head * count, pooled_.data() + kv_head * count);
            keeping.choose(pooled_.data() + kv_head * count, order_.data() + kv_head * count);
        };
        compute.pool.run(spec.num_kv_heads, [&](int head, int) {
            size_t h = static_cast<size_t>(head);
            keeping.score(q, head, mean_.data() + h * static_cast<size_t>(spec.head_dim), scores_.data() + h * count);
            if (!keep.is_per_head) return;
            keep_best(h);
            keeping.copy(order_.data() + h * count, head);
        });
        if (keep.is_per_head) continue;
        for (size_t h = 1; h < heads; ++h)
            for (size_t i = 0; i < count; ++i) scores_[i] += scores_[h * count + i];
        keep_best(0);
        compute.pool.run(spec.num_kv_heads, [&](int head, int) { keeping.copy(order_.data(), head); });
    }
}

}  // namespace kvarn
