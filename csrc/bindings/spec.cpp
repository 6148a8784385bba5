#include "spec.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "../base/check.h"
#include "spec_recurrent.h"

namespace kvarn {

namespace {

std::optional<RopeSpec> read_rope(nb::handle rope) {
    if (rope.is_none()) return std::nullopt;
    return RopeSpec{field<std::string>(rope, "style") == "interleaved",
                    nb::cast<std::vector<float>>(nb::list(rope.attr("inverse_frequencies"))),
                    field<float>(rope, "magnitude")};
}

MaskKind read_mask(nb::handle attention) {
    auto name = field<std::string>(attention, "mask");
    return name == "causal"          ? MaskKind::causal
           : name == "bidirectional" ? MaskKind::bidirectional
           : name == "canvas"        ? MaskKind::canvas
                                     : MaskKind::block_causal;
}

AttentionSpec read_attention(nb::handle attention) {
    AttentionSpec a;
    a.num_heads = field<int>(attention, "num_heads");
    a.num_kv_heads = field<int>(attention, "num_kv_heads");
    a.head_dim = field<int>(attention, "head_dim");
    a.scale = field<float>(attention, "scale");
    a.rope = read_rope(attention.attr("rope"));
    a.mask = read_mask(attention);
    if (a.mask == MaskKind::block_causal) a.mask_block = field<int>(attention, "mask_block");
    require(a.mask_block > 0 && a.mask_block <= 1 << 20, "a block-causal mask needs blocks of 1 to 1,048,576 tokens");
    a.window = or_zero<int>(attention, "window");
    a.is_chunked = field<bool>(attention, "is_chunked");
    a.has_qkv_bias = field<bool>(attention, "qkv_bias");
    a.has_output_bias = field<bool>(attention, "output_bias");
    a.qk_norm = read_optional_norm(attention, "qk_norm");
    a.is_qk_norm_over_row = field<std::string>(attention, "qk_norm_span") == "row";
    a.is_qk_norm_after_rope = field<bool>(attention, "qk_norm_after_rope");
    a.softcap = or_zero<float>(attention, "softcap");
    if (nb::object slopes = attention.attr("alibi"); !slopes.is_none())
        a.alibi = nb::cast<std::vector<float>>(nb::list(slopes));
    require(a.alibi.empty() || static_cast<int>(a.alibi.size()) == a.num_heads, "every head needs a slope");
    a.has_sinks = field<bool>(attention, "sinks");
    a.has_output_gate = field<bool>(attention, "output_gate");
    a.has_value_norm = !attention.attr("value_norm_eps").is_none();
    a.value_norm_eps = or_zero<float>(attention, "value_norm_eps");
    if (nb::object source = attention.attr("kv_source"); !source.is_none()) a.kv_source = nb::cast<int>(source);
    if (nb::object temperature = attention.attr("temperature"); !temperature.is_none()) {
        a.temperature_beta = field<float>(temperature, "beta");
        a.temperature_length = field<int>(temperature, "length");
        a.temperature_offset = field<int>(temperature, "offset");
        require(a.temperature_length > 0 && a.temperature_offset >= 0, "the length of a temperature must be positive");
    }
    require(a.num_heads > 0 && a.num_kv_heads > 0 && a.head_dim > 0 && a.num_heads % a.num_kv_heads == 0,
            "attention heads do not divide evenly over the KV heads");
    require(!a.rope || 2 * static_cast<int>(a.rope->inverse_frequencies.size()) <= a.head_dim,
            "rope rotates more dimensions than a head has");
    return a;
}

AttentionSpec read_latent_attention(nb::handle mixer) {
    AttentionSpec a;
    LatentSpec& l = a.latent;
    l.rank = field<int>(mixer, "rank");
    l.query_rank = or_zero<int>(mixer, "query_rank");
    l.nope_dim = field<int>(mixer, "nope_dim");
    l.rope_dim = field<int>(mixer, "rope_dim");
    l.value_dim = field<int>(mixer, "value_dim");
    a.num_heads = field<int>(mixer, "num_heads");
    a.num_kv_heads = 1;
    a.head_dim = l.rank + l.rope_dim;
    a.scale = field<float>(mixer, "scale");
    a.rope = read_rope(mixer.attr("rope"));
    a.qk_norm = read_norm(mixer.attr("norm"));
    require(a.num_heads > 0 && l.rank > 0 && l.query_rank >= 0 && l.nope_dim > 0 && l.value_dim > 0,
            "latent attention needs heads, and dimensions of all their parts");
    require(a.rope && 2 * static_cast<int>(a.rope->inverse_frequencies.size()) == l.rope_dim,
            "the rope of latent attention rotates all of its dimensions");
    return a;
}

Activation read_activation(nb::handle object) {
    auto name = field<std::string>(object, "activation");
    return name == "silu"        ? Activation::silu
           : name == "gelu"      ? Activation::gelu
           : name == "gelu_tanh" ? Activation::gelu_tanh
           : name == "relu"      ? Activation::relu
           : name == "relu2"     ? Activation::relu2
                                 : Activation::swiglu_oai;
}

void read_experts(nb::handle object, FeedForwardSpec& f) {
    f.num_experts = field<int>(object, "num_experts");
    f.num_active = field<int>(object, "num_active");
    f.renormalise = field<bool>(object, "renormalise");
    f.is_sigmoid = field<std::string>(object, "scoring") == "sigmoid";
    f.has_router_bias = field<bool>(object, "router_bias");
    f.has_selection_bias = field<bool>(object, "selection_bias");
    f.has_expert_bias = field<bool>(object, "expert_bias");
    f.has_expert_scale = field<bool>(object, "expert_scale");
    f.has_output_bias = field<bool>(object, "output_bias");
    f.scale = field<float>(object, "scale");
    f.weighs_input = field<bool>(object, "weighs_input");
    if (nb::object margin = object.attr("mixer_margin"); !margin.is_none()) f.mixer_margin = nb::cast<float>(margin);
    if (nb::object groups = object.attr("groups"); !groups.is_none()) {
        f.num_groups = field<int>(groups, "count");
        f.num_active_groups = field<int>(groups, "num_active");
        f.num_judged = field<int>(groups, "num_judged");
        require(f.num_judged == 1 || f.num_judged == 2, "a group of experts is judged by its best one or two");
    }
    if (nb::object shared = object.attr("shared"); !shared.is_none()) {
        f.shared_hidden = field<int>(shared, "hidden");
        f.has_shared_gate = field<bool>(shared, "gate");
    }
    require(f.num_active > 0 && f.num_active <= f.num_experts && f.num_experts <= kMaxExperts,
            "more active experts than there are, or more experts than are allowed");
    require(f.num_groups > 0 && f.num_experts % f.num_groups == 0 && f.num_active_groups > 0 &&
                f.num_active_groups <= f.num_groups &&
                f.num_active <= f.num_experts / f.num_groups * f.num_active_groups,
            "experts do not divide evenly into groups that hold the active ones");
}

FeedForwardSpec read_feed_forward(nb::handle object) {
    FeedForwardSpec f;
    f.hidden = field<int>(object, "hidden");
    f.activation = read_activation(object);
    f.is_gated = field<bool>(object, "gated");
    if (nb::hasattr(object, "num_experts")) {
        read_experts(object, f);
    } else {
        f.has_bias = field<bool>(object, "bias");
        f.has_gate_cutoff = f.is_gated && !object.attr("gate_cutoff").is_none();
        f.gate_cutoff = or_zero<float>(object, "gate_cutoff");
    }
    return f;
}

Placement read_placement(nb::handle block) {
    auto name = field<std::string>(block, "placement");
    return name == "pre"        ? Placement::pre
           : name == "sandwich" ? Placement::sandwich
           : name == "residual" ? Placement::residual
           : name == "post"     ? Placement::post
                                : Placement::parallel;
}

BlockSpec read_block(nb::handle block) {
    nb::object mixer = block.attr("mixer");
    const bool has_state = nb::hasattr(mixer, "kernel");
    const bool is_latent = nb::hasattr(mixer, "rank");
    BlockSpec b;
    if (has_state) b.recurrent = read_recurrent(mixer);
    else if (nb::hasattr(mixer, "num_heads"))
        b.attention = is_latent ? read_latent_attention(mixer) : read_attention(mixer);
    if (nb::object state = block.attr("state"); !state.is_none()) b.recurrent = read_recurrent(state);
    b.feed_forward = read_feed_forward(block.attr("feed_forward"));
    b.norm = read_norm(block.attr("norm"));
    b.placement = read_placement(block);
    b.has_attention_norm = field<bool>(block, "attn_norm");
    require(b.has_attention_norm || b.placement == Placement::pre,
            "a layer may lack its first norm if it has no other");
    b.has_second_norm = field<bool>(block, "second_norm");
    require(!b.has_second_norm || b.placement == Placement::residual, "only norms of sums have a second one");
    b.residual_scale = field<float>(block, "residual_scale");
    const bool is_whole = b.attention.exists() != b.recurrent.exists() && b.feed_forward.exists();
    require(is_whole || b.placement == Placement::pre,
            "only layers with norms before their sublayers may lack one, or have a state beside attention");
    if (nb::object beside = block.attr("beside"); !beside.is_none()) {
        b.beside = read_feed_forward(beside);
        require(b.placement == Placement::sandwich && b.feed_forward.num_experts == 0 && b.beside.num_experts > 0,
                "experts stand beside a feed-forward between two norms");
    }
    if (nb::object per_layer = block.attr("per_layer"); !per_layer.is_none()) {
        b.per_layer_length = field<int>(per_layer, "length");
        b.per_layer_activation = read_activation(per_layer);
    }
    b.has_output_scale = field<bool>(block, "output_scale");
    b.has_text_scale = field<bool>(block, "text_scale");
    require(b.has_output_scale || !b.has_text_scale, "a factor of text stands beside one of canvases");
    b.laurel_rank = or_zero<int>(block, "laurel");
    require(b.laurel_rank == 0 || (b.placement == Placement::sandwich && !has_state),
            "a low-rank map stands beside attention between two norms");
    return b;
}

// Keys and values are shared with an earlier layer that has its own, in heads of the same shape.
void check_sources(const ModelSpec& m) {
    for (size_t i = 0; i < m.blocks.size(); ++i) {
        const AttentionSpec& a = m.blocks[i].attention;
        if (a.kv_source < 0) continue;
        require(static_cast<size_t>(a.kv_source) < i, "a layer reads the keys of a later one");
        const BlockSpec& block = m.blocks[static_cast<size_t>(a.kv_source)];
        const AttentionSpec& source = block.attention;
        require(!block.recurrent.exists() && source.kv_source < 0 && source.num_kv_heads == a.num_kv_heads &&
                    source.head_dim == a.head_dim,
                "a layer reads the keys of one that has none of this shape");
    }
}

void read_per_layer(nb::handle embedding, ModelSpec& m) {
    nb::object per_layer = embedding.attr("per_layer");
    if (!per_layer.is_none()) {
        m.per_layer_length = field<int>(per_layer, "length");
        m.per_layer_vocab_size = field<int>(per_layer, "vocab_size");
        m.per_layer_norm = read_norm(per_layer.attr("norm"));
        require(m.per_layer_length > 0 && m.per_layer_vocab_size > 0, "inputs of layers have a length");
    }
    for (const BlockSpec& block : m.blocks)
        require(block.per_layer_length == 0 || block.per_layer_length == m.per_layer_length,
                "a layer has an input of its own that the model has not");
}

}  // namespace

ModelSpec read_spec(nb::handle spec) {
    ModelSpec m;
    m.width = field<int>(spec, "width");
    m.vocab_size = field<int>(spec, "vocab_size");
    nb::object embedding = spec.attr("embedding");
    m.embedding_scale = field<float>(embedding, "scale");
    m.num_positions = or_zero<int>(embedding, "positions");
    m.has_token_types = field<bool>(embedding, "token_types");
    m.embedding_norm = read_optional_norm(embedding, "norm");
    m.joined_norm = read_optional_norm(embedding, "joined");
    for (nb::handle block : spec.attr("blocks")) m.blocks.push_back(read_block(block));
    check_sources(m);
    if (nb::object altup = spec.attr("altup"); !altup.is_none()) {
        m.num_streams = field<int>(altup, "streams");
        m.active_stream = field<int>(altup, "active");
        m.stream_norm = read_norm(altup.attr("norm"));
        m.has_stream_scale = field<bool>(altup, "correct_scale");
        require(m.num_streams > 1 && m.num_streams <= kMaxStreams && m.active_stream >= 0 &&
                    m.active_stream < m.num_streams,
                "2 to 64 residual streams are possible, of which one is active");
    }
    read_per_layer(embedding, m);
    m.output_norm = read_optional_norm(spec, "output_norm");
    nb::object head = spec.attr("head");
    if (!head.is_none()) {
        m.has_head = true;
        m.is_head_tied = field<bool>(head, "tied");
        m.has_head_bias = field<bool>(head, "bias");
        m.head_scale = field<float>(head, "scale");
        m.head_softcap = or_zero<float>(head, "softcap");
    }
    if (nb::object generation = spec.attr("generation"); nb::hasattr(generation, "schedule")) {
        m.canvas.feed_forward.hidden = field<int>(generation, "hidden");
        m.canvas.feed_forward.activation = read_activation(generation);
        m.canvas.norm = read_norm(generation.attr("norm"));
        require(m.canvas.feed_forward.hidden > 0, "what canvases read has a hidden size");
    }
    require(m.width > 0 && m.vocab_size > 0 && !m.blocks.empty(), "a model needs a width, a vocabulary and layers");
    require(!m.joined_norm || (!m.has_head && m.num_streams == 1 && m.per_layer_length == 0),
            "layers that read states have no embedding of their own");
    return m;
}

}  // namespace kvarn
