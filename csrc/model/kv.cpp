#include "kv.h"

#include <cstring>

#include "../base/check.h"

namespace kvarn {

void KVCache::reserve(const std::vector<std::pair<int, int>>& layers, bool is_f32, int num_blocks, size_t block_bytes) {
    value_bytes_ = is_f32 ? 4 : 2;
    layers_.clear();
    size_t offset = 0;
    for (auto [heads, dim] : layers) {
        size_t half = static_cast<size_t>(heads) * static_cast<size_t>(dim) * kKVBlock * value_bytes_;
        layers_.push_back({heads, dim, offset, offset + half});
        offset += 2 * half;
    }
    require(offset <= block_bytes,
            "a KV block of " + std::to_string(block_bytes) + " bytes cannot hold " + std::to_string(offset) + " bytes");
    block_bytes_ = block_bytes;
    num_blocks_ = num_blocks;
    region_ = PageRegion(block_bytes * static_cast<size_t>(num_blocks), false);
}

void KVCache::copy(int source, int target) noexcept {
    std::memcpy(region_.data() + static_cast<size_t>(target) * block_bytes_,
                region_.data() + static_cast<size_t>(source) * block_bytes_, block_bytes_);
}

void KVCache::release_pages(int block) noexcept {
    region_.release_pages(static_cast<size_t>(block) * block_bytes_, block_bytes_);
}

}  // namespace kvarn
