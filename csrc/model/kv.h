// The paged cache's memory. Knows blocks and layers; who owns a block is decided in Python.
//
// A block is contiguous and page-aligned: for each layer K then V; K is [kv_head][head_dim][16], a column per token,
// so that one query meets 16 keys without horizontal sums; V is [kv_head][16][head_dim].
#pragma once
#include <vector>

#include "../base/memory.h"
#include "../kernels/table.h"

namespace kvarn {

class KVCache {
public:
    struct Layer {
        int num_kv_heads, head_dim;
        size_t k_offset, v_offset;
    };

    void reserve(const std::vector<std::pair<int, int>>& layers, bool is_f32, int num_blocks, size_t block_bytes);

    int num_blocks() const { return num_blocks_; }
    bool is_f32() const { return value_bytes_ == 4; }
    void copy(int source, int target) noexcept;
    void release_pages(int block) noexcept;

    uint8_t* k(int block, size_t layer, int head) const { return at(block, layers_[layer].k_offset, layer, head); }
    uint8_t* v(int block, size_t layer, int head) const { return at(block, layers_[layer].v_offset, layer, head); }

private:
    uint8_t* at(int block, size_t offset, size_t layer, int head) const {
        size_t head_bytes = static_cast<size_t>(layers_[layer].head_dim * kKVBlock) * value_bytes_;
        return region_.data() + static_cast<size_t>(block) * block_bytes_ + offset +
               static_cast<size_t>(head) * head_bytes;
    }

    PageRegion region_;
    std::vector<Layer> layers_;
    int num_blocks_ = 0;
    size_t block_bytes_ = 0, value_bytes_ = 2;
};

}  // namespace kvarn
