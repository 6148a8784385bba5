// The model as data: models/spec.py in C++ structs, filled by bindings/spec.cpp. No names of architectures.
#pragma once
#include <optional>
#include <string>
#include <vector>

namespace kvarn {

constexpr int kMaxExperts = 1024;  // of one layer

enum class Activation { silu, gelu, gelu_tanh, relu2, swiglu_oai };
enum class MaskKind { causal, bidirectional, block_causal };
enum class Placement { pre, sandwich, residual, post, parallel };

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
    bool is_qk_norm_over_row = false, is_qk_norm_after_rope = false;
    float softcap = 0;  // 0: none
    bool has_sinks = false;
    float temperature_beta = 0;  // 0: none
    int temperature_length = 1;
};

struct FeedForwardSpec {
    int hidden = 0;
    Activation activation = Activation::silu;
    bool is_gated = true, has_bias = false;
    int num_experts = 0, num_active = 0;  // 0: a plain feed-forward
    bool renormalise = false, is_sigmoid = false, has_router_bias = false, has_selection_bias = false;
    bool has_expert_bias = false, has_shared_gate = false;
    int num_groups = 1, num_active_groups = 1;
    float scale = 1;
    int shared_hidden = 0;  // of the expert that every row meets, 0: none
};

struct BlockSpec {
    AttentionSpec attention;
    FeedForwardSpec feed_forward;
    NormSpec norm;
    Placement placement = Placement::pre;
    float residual_scale = 1;
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
    bool has_head_bias = false;
    float head_scale = 1, head_softcap = 0;
};

}  // namespace kvarn
