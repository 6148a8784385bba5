// The paged cache's memory. Knows blocks and layers; who owns a block is decided in Python.
//
// A block is contiguous and page-aligned: for each layer K then V; K is [kv_head][head_dim][16], a column per token,
// so that one query meets 16 keys without horizontal sums; V is [kv_head][16][head_dim]. In q8_0 the scales of a head
// lie behind its values (kernels/table.h). Latent attention has K only.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "../base/memory.h"
#include "../kernels/table.h"

namespace kvarn {

enum class KVType { f16, f32, q8_0 };

KVType kv_type_named(const std::string& name);     // throws on an unknown one
size_t kv_token_bytes(KVType type, int head_dim);  // K (or V) of one head of one token
AttendFn attend_kernel(const KernelTable& kernels, KVType type);
StoreKVFn store_kernel(const KernelTable& kernels, KVType type);

// Layers that keep a window have a cache of their own, with the blocks of BatchView::window_tables.
class KVCache {
public:
    explicit KVCache(bool is_windowed = false) : is_windowed_(is_windowed) {}

    struct Layer {
        size_t head_bytes;  // of K, and of V
        int head_dim;
        size_t k_offset, v_offset;
    };

    struct Shape {
        int num_heads, head_dim;
        bool has_values;  // beside the keys; of latent attention they are a part of them
    };
    void reserve(const std::vector<Shape>& layers, KVType type, int num_blocks, size_t block_bytes);

    bool is_windowed() const { return is_windowed_; }
    int num_blocks() const { return num_blocks_; }
    KVType type() const { return type_; }
    void check_block(int block) const;  // throws where there is none
    void copy(int source, int target) noexcept;
    // All bytes of a block, as they are; what lies behind its last layer is zero.
    std::span<uint8_t> bytes(int block) const {
        return {region_.data() + static_cast<size_t>(block) * block_bytes_, block_bytes_};
    }

    struct Place {
        int block, slot;
    };
    // Copy K and V of one token, one layer and one head, bit for bit.
    void copy_slot(Place source, Place target, size_t layer, int head) const noexcept;
    void release_pages(int block) noexcept;
    void populate(int first, int count) noexcept;

    uint8_t* k(int block, size_t layer, int head) const { return at(block, layers_[layer].k_offset, layer, head); }
    uint8_t* v(int block, size_t layer, int head) const { return at(block, layers_[layer].v_offset, layer, head); }

private:
    uint8_t* at(int block, size_t offset, size_t layer, int head) const {
        return region_.data() + static_cast<size_t>(block) * block_bytes_ + offset +
               static_cast<size_t>(head) * layers_[layer].head_bytes;
    }

    bool is_windowed_;
    PageRegion region_;
    std::vector<Layer> layers_;
    KVType type_ = KVType::f16;
    int num_blocks_ = 0;
    size_t block_bytes_ = 0;
};

}  // namespace kvarn
