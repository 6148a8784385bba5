// The model as data: models/spec.py in C++ structs, filled by bindings/spec.cpp. No names of architectures.
#pragma once
#include <algorithm>
#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace kvarn {

constexpr int kMaxExperts = 1024;   // of one layer
constexpr int kMaxConvKernel = 64;  // rows
constexpr int kMaxStreams = 64;

enum class Activation { silu, gelu, gelu_tanh, relu, relu2, swiglu_oai };
enum class MaskKind { causal, bidirectional, block_causal, canvas };
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

constexpr int kLatentGroup = 16;  // heads of latent attention that are computed together, at most

// One row per token is cached for all heads: rank values, which are keys and values, and rope_dim that are keys only.
struct LatentSpec {
    int rank = 0;        // 0: every head has keys and values of its own
    int query_rank = 0;  // 0: queries are projected at once
    int nope_dim = 0, rope_dim = 0, value_dim = 0;

    bool exists() const { return rank > 0; }
    int head_dim() const { return nope_dim + rope_dim; }
};

struct AttentionSpec {
    int num_heads = 0, num_kv_heads = 0, head_dim = 0;
    float scale = 1;
    std::optional<RopeSpec> rope;
    MaskKind mask = MaskKind::causal;
    int mask_block = 1;  // of block_causal
    int window = 0;      // 0: none
    bool is_chunked = false;
    bool has_qkv_bias = false, has_output_bias = false;
    std::optional<NormSpec> qk_norm;
    bool is_qk_norm_over_row = false, is_qk_norm_after_rope = false;
    float softcap = 0;         // 0: none
    std::vector<float> alibi;  // slopes by head, empty: none
    bool has_sinks = false;
    float temperature_beta = 0;  // 0: none
    int temperature_length = 1, temperature_offset = 0;
    bool has_output_gate = false;
    bool has_value_norm = false;
    float value_norm_eps = 0;
    int kv_source = -1;  // the layer whose keys and values these are, -1: its own
    LatentSpec latent;   // num_kv_heads is 1, head_dim that of a cached row, and qk_norm the latents'

    // Query heads that meet the same keys are computed in groups: those of a KV head, of latent attention some.
    int group() const {
        if (!latent.exists()) return num_heads / num_kv_heads;
        int heads = std::min(kLatentGroup, num_heads);
        while (num_heads % heads != 0) --heads;
        return heads;
    }
    int num_groups() const { return num_heads / group(); }
    int cached_head(int group) const { return latent.exists() ? 0 : group; }
    int value_dim() const { return latent.exists() ? latent.rank : head_dim; }
    bool exists() const { return num_heads > 0; }
    // Under which layer the keys and values of this one, number `index`, are cached.
    size_t kv_layer(size_t index) const { return kv_source < 0 ? index : static_cast<size_t>(kv_source); }
};

enum class RecurrentKind { short_conv, delta_net, state_space, selective };

constexpr int kSelectiveColumns = 64;  // channels of a selective layer that are one head here, so that threads share it

// A layer whose state leads from token to token, in the place of attention or beside it. A short convolution has no
// heads. A projection's row, (offset of what the convolution reads):
//   short_conv  b, c, v (0)      delta_net  q, k, v (0)
//   state_space z, (v, B, C) (values), dt      selective  v (0), z
struct RecurrentSpec {
    RecurrentKind kind = RecurrentKind::short_conv;
    int kernel = 0;  // 0: the layer has no state
    int num_key_heads = 0, num_value_heads = 0, key_dim = 0, value_dim = 0;
    bool is_tiled = false;
    std::optional<NormSpec> norm;
    int conv_width = 0;  // of a short convolution or of a selective layer
    int rank = 0;        // of a selective layer's steps
    bool has_conv_bias = false, has_bias = false, has_output_bias = false;
    bool is_norm_first = false;
    float min_step = 0, max_step = std::numeric_limits<float>::infinity();
    bool has_parameter_norm = false;
    float parameter_norm_eps = 0;

    bool exists() const { return kernel > 0; }
    bool is(RecurrentKind one) const { return kind == one; }
    int keys() const { return num_key_heads * key_dim; }
    int values() const { return conv_width > 0 ? conv_width : num_value_heads * value_dim; }
    int channels() const { return conv_width > 0 ? conv_width : 2 * keys() + values(); }  // of the convolution
    int conv_offset() const { return is(RecurrentKind::state_space) ? values() : 0; }
    int input_width() const {  // of the projection
        switch (kind) {
            case RecurrentKind::short_conv: return 3 * conv_width;
            case RecurrentKind::state_space: return values() + channels() + num_value_heads;
            case RecurrentKind::selective: return 2 * conv_width;
            default: return channels();
        }
    }
    int parameters() const { return is(RecurrentKind::selective) ? rank + 2 * key_dim : 0; }  // of a selective row
    int key_head(int h) const { return is_tiled ? h % num_key_heads : h / (num_value_heads / num_key_heads); }
    int head_columns(int h) const { return std::min(value_dim, values() - h * value_dim); }
    // (kernel - 1, channels) of what the convolution reads, then (value heads, key_dim, value_dim).
    size_t conv_floats() const { return static_cast<size_t>(kernel - 1) * static_cast<size_t>(channels()); }
    size_t head_floats() const { return static_cast<size_t>(key_dim) * static_cast<size_t>(value_dim); }
    size_t state_floats() const {
        return exists() ? conv_floats() + static_cast<size_t>(key_dim) * static_cast<size_t>(values()) : 0;
    }
};

struct FeedForwardSpec {
    int hidden = 0;
    Activation activation = Activation::silu;
    bool is_gated = true, has_bias = false;
    int num_experts = 0, num_active = 0;  // 0: a plain feed-forward
    bool exists() const { return hidden > 0; }
    bool renormalise = false, is_sigmoid = false, has_router_bias = false, has_selection_bias = false;
    bool has_expert_bias = false, has_shared_gate = false, has_expert_scale = false, has_output_bias = false;
    int num_groups = 1, num_active_groups = 1, num_judged = 2;
    float scale = 1;
    bool weighs_input = false;  // the rows that experts read are multiplied by the weights, not what they give
    float mixer_margin = -1;    // -1: none
    int shared_hidden = 0;      // of the expert that every row meets, 0: none
    bool has_gate_cutoff = false;
    float gate_cutoff = 0;  // standard deviations above the mean of a row's gate
};

struct BlockSpec {
    AttentionSpec attention;  // all zeros where there is none
    RecurrentSpec recurrent;
    FeedForwardSpec feed_forward;
    NormSpec norm;
    Placement placement = Placement::pre;
    bool has_attention_norm = true;  // of pre
    bool has_second_norm = false;    // of residual
    float residual_scale = 1;
    FeedForwardSpec beside;    // experts beside the feed-forward; without experts: none
    int per_layer_length = 0;  // of the layer's own input, 0: none
    Activation per_layer_activation = Activation::silu;
    bool has_output_scale = false, has_text_scale = false;
    int laurel_rank = 0;  // of the low-rank map beside attention, 0: none

    bool has_mixer() const { return attention.exists() || recurrent.exists(); }
};

// What rows of canvases read of the last step.
struct CanvasSpec {
    FeedForwardSpec feed_forward;  // hidden 0: the model has no canvases
    NormSpec norm;
};

struct ModelSpec {
    int width = 0, vocab_size = 0;
    float embedding_scale = 1;
    int num_positions = 0;  // learned positions, 0: none
    bool has_token_types = false;
    std::optional<NormSpec> embedding_norm;
    std::optional<NormSpec> joined_norm;  // rows come as an embedding and a state, which a matrix joins, not as tokens
    int per_layer_length = 0, per_layer_vocab_size = 0;  // of the layers' own inputs, 0: they have none
    NormSpec per_layer_norm;
    int num_streams = 1, active_stream = 0;  // residual streams, of which a layer computes one
    NormSpec stream_norm;
    bool has_stream_scale = false;
    std::vector<BlockSpec> blocks;
    std::optional<NormSpec> output_norm;
    bool has_head = false, is_head_tied = false;
    bool has_head_bias = false;
    float head_scale = 1, head_softcap = 0;
    CanvasSpec canvas;
};

}  // namespace kvarn
