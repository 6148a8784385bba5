#include "kv.h"

#include <algorithm>
#include <cstring>

#include "../base/check.h"

namespace kvarn {

size_t kv_token_bytes(KVType type, int head_dim) {
    size_t dim = static_cast<size_t>(head_dim);
    if (type == KVType::q8_0) return dim + 2 * ((dim + kQuantBlock - 1) / kQuantBlock);
    return dim * (type == KVType::f32 ? 4 : 2);
}

KVType kv_type_named(const std::string& name) {
    if (name == "f16") return KVType::f16;
    if (name == "f32") return KVType::f32;
    require(name == "q8_0", "no KV cache of type '" + name + "'");
    return KVType::q8_0;
}

void KVCache::reserve(const std::vector<Shape>& layers, KVType type, int num_blocks, size_t block_bytes) {
    type_ = type;
    layers_.clear();
    size_t offset = 0;
    for (auto [heads, dim, has_values] : layers) {
        require(has_values || type != KVType::q8_0, "the cache of latent attention is f16 or f32");
        size_t head = kv_token_bytes(type, dim) * kKVBlock, half = static_cast<size_t>(heads) * head;
        layers_.push_back({head, dim, offset, offset + half});
        offset += has_values ? 2 * half : half;
    }
    require(offset <= block_bytes,
            "a KV block of " + std::to_string(block_bytes) + " bytes cannot hold " + std::to_string(offset) + " bytes");
    block_bytes_ = block_bytes;
    num_blocks_ = num_blocks;
    region_ = PageRegion(block_bytes * static_cast<size_t>(num_blocks), true);
}

AttendFn attend_kernel(const KernelTable& kernels, KVType type) {
    switch (type) {
        case KVType::f32: return kernels.attend_f32;
        case KVType::q8_0: return kernels.attend_q8_0;
        default: return kernels.attend_f16;
    }
}

StoreKVFn store_kernel(const KernelTable& kernels, KVType type) {
    switch (type) {
        case KVType::f32: return kernels.store_kv_f32;
        case KVType::q8_0: return kernels.store_kv_q8_0;
        default: return kernels.store_kv_f16;
    }
}

void KVCache::check_block(int block) const {
    require(block >= 0 && block < num_blocks_,
            [&] { return "block id " + std::to_string(block) + " is outside the cache"; });
}

void KVCache::copy(int source, int target) noexcept {
    std::memcpy(region_.data() + static_cast<size_t>(target) * block_bytes_,
                region_.data() + static_cast<size_t>(source) * block_bytes_, block_bytes_);
}

namespace {

// A column of K, [n][16], and a row of V, [16][n].
template <class Value>
void copy_token(const uint8_t* k, const uint8_t* v, int from, int to, size_t n, uint8_t* k_out, uint8_t* v_out) {
    const Value* keys = reinterpret_cast<const Value*>(k);
    Value* target = reinterpret_cast<Value*>(k_out);
    for (size_t d = 0; d < n; ++d)
        target[d * kKVBlock + static_cast<size_t>(to)] = keys[d * kKVBlock + static_cast<size_t>(from)];
    std::memcpy(v_out + static_cast<size_t>(to) * n * sizeof(Value), v + static_cast<size_t>(from) * n * sizeof(Value),
                n * sizeof(Value));
}

}  // namespace

void KVCache::copy_slot(Place source, Place target, size_t layer, int head) const noexcept {
    size_t dim = static_cast<size_t>(layers_[layer].head_dim);
    const uint8_t *k = this->k(source.block, layer, head), *v = this->v(source.block, layer, head);
    uint8_t *k_out = this->k(target.block, layer, head), *v_out = this->v(target.block, layer, head);
    if (type_ == KVType::f32) return copy_token<float>(k, v, source.slot, target.slot, dim, k_out, v_out);
    if (type_ == KVType::f16) return copy_token<uint16_t>(k, v, source.slot, target.slot, dim, k_out, v_out);
    copy_token<int8_t>(k, v, source.slot, target.slot, dim, k_out, v_out);
    size_t scales = dim * kKVBlock, groups = (dim + kQuantBlock - 1) / kQuantBlock;
    copy_token<uint16_t>(k + scales, v + scales, source.slot, target.slot, groups, k_out + scales, v_out + scales);
}

void KVCache::release_pages(int block) noexcept {
    region_.release_pages(static_cast<size_t>(block) * block_bytes_, block_bytes_);
}

void KVCache::populate(int first, int count) noexcept {
    count = std::min(count, num_blocks_ - first);
    if (count < 1) return;
    region_.populate(static_cast<size_t>(first) * block_bytes_, static_cast<size_t>(count) * block_bytes_);
}

}  // namespace kvarn
