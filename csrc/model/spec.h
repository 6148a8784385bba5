// The model as data: models/spec.py in C++ structs, filled by bindings/spec.cpp. No names of architectures.
#pragma once
#include <optional>
#include <string>
#include <vector>

namespace kvarn {

enum class Activation { silu, gelu, gelu_tanh };
enum class MaskKind { causal, bidirectional, block_causal };
enum class Placement { pre, sandwich, residual };

struct NormSpec {
    bool is_rms = true;
    float eps = 0;
    bool has_bias = false;
};

struct RopeSpec {
    bool is_interleaved = false;
    std::vector<float> inverse_frequencies;
    float magnitude = 1;
    bool operator==(const RopeSpec&) const = default;
};

struct AttentionSpec {
    int num_heads = 0, num_kv_heads = 0, head_dim = 0;
    float scale = 1;
    std::optional<RopeSpec> rope;
    MaskKind mask = MaskKind::causal;
    int mask_block = 1;  // of block_causal
    int window = 0;      // 0: none
    bool has_qkv_bias = false, has_output_bias = false;
    std::optional<NormSpec> qk_norm;
    float softcap = 0;  // 0: none
};

struct FeedForwardSpec {
    int hidden = 0;
    Activation activation = Activation::silu;
    bool is_gated = true, has_bias = false;
    int num_experts = 0, num_active = 0;  // 0: a plain feed-forward
    bool renormalise = false;
};

struct BlockSpec {
    AttentionSpec attention;
    FeedForwardSpec feed_forward;
    NormSpec norm;
    Placement placement = Placement::pre;
};

struct ModelSpec {
    int width = 0, vocab_size = 0;
    float embedding_scale = 1;
    int num_positions = 0;  // learned positions, 0: none
    bool has_token_types = false;
    std::optional<NormSpec> embedding_norm;
    std::vector<BlockSpec> blocks;
    std::optional<NormSpec> output_norm;
    bool has_head = false, is_head_tied = false;
    float head_softcap = 0;
};

}  // namespace kvarn
