#include "step.h"

#include <algorithm>

namespace kvarn {

namespace {

// The layer whose attention needs the most scratch; layers run one after another and share it.
const AttentionSpec& hungriest(const ModelPlan& plan, int num_threads, int max_context) {
    auto need = [&](const LayerPlan& l) {
        return l.attention.exists() ? AttentionScratch::arena_bytes(l.attention, num_threads, max_context) : 0;
    };
    return std::max_element(plan.layers.begin(), plan.layers.end(),
                            [&](const LayerPlan& a, const LayerPlan& b) { return need(a) < need(b); })
        ->attention;
}

size_t floats(int n, int columns) {
    return Arena::padded(static_cast<size_t>(n) * static_cast<size_t>(columns) * sizeof(float));
}

float* take_floats(Arena& arena, int n, int columns) {
    return arena.take<float>(static_cast<size_t>(n) * static_cast<size_t>(columns));
}

}  // namespace

size_t StepBuffers::arena_bytes(const KernelTable& kernels, const ModelPlan& plan, int n, int num_threads,
                                int max_context) {
    size_t bytes = (plan.needs_entry ? 4 : 3) * floats(n, plan.width) + 2 * floats(n, plan.max_query) +
                   2 * floats(n, plan.max_kv) + floats(n, plan.max_channels) + floats(n, plan.max_gate) +
                   2 * floats(n, plan.max_state_heads) + floats(num_threads, plan.max_head_state) +
                   2 * floats(n, plan.max_hidden) + QuantBuffers::arena_bytes(kernels, n, plan.widest_input()) +
                   QuantBuffers::arena_bytes(kernels, n, plan.max_hidden);
    bytes += (plan.num_streams > 1 ? 1 : 0) * floats(n, plan.num_streams * plan.width);
    bytes += (plan.has_beside ? 2 : 0) * floats(n, plan.width) + floats(n, plan.per_layer_width) +
             floats(num_threads, plan.per_layer_width);
    bytes += floats(n, plan.joined_width());
    bytes += 2 * floats(n, plan.max_parameters) + floats(n, plan.max_steps);
    bytes += floats(n, plan.max_latent) + HeadScratch::arena_bytes(kernels, plan.max_head_input, num_threads);
    for (const RopeSpec& rope : plan.ropes) bytes += floats(n, 2 * static_cast<int>(rope.inverse_frequencies.size()));
    if (plan.max_kv > 0)
        bytes += AttentionScratch::arena_bytes(hungriest(plan, num_threads, max_context), num_threads, max_context);
    if (plan.max_experts > 0)
        bytes +=
            floats(n, plan.max_experts) + 2 * floats(n, plan.width) + 2 * floats(n, plan.max_active) + floats(n, 1);
    return bytes + 64 * 32;
}

StepBuffers StepBuffers::take(Arena& arena, const KernelTable& kernels, const ModelPlan& plan, int n, int num_threads,
                              int max_context) {
    StepBuffers b{};
    b.x = take_floats(arena, n, plan.width);
    b.normed = take_floats(arena, n, plan.width);
    b.joined = take_floats(arena, n, plan.joined_width());
    b.result = take_floats(arena, n, plan.width);
    b.entry = plan.needs_entry ? take_floats(arena, n, plan.width) : nullptr;
    b.q = take_floats(arena, n, plan.max_query);
    b.mixed = take_floats(arena, n, plan.max_query);
    b.k = take_floats(arena, n, plan.max_kv);
    b.v = take_floats(arena, n, plan.max_kv);
    b.latent = take_floats(arena, n, plan.max_latent);
    b.heads = HeadScratch::take(arena, kernels, plan.max_head_input, num_threads);
    b.convolved = take_floats(arena, n, plan.max_channels);
    b.output_gate = take_floats(arena, n, plan.max_gate);
    b.beta = take_floats(arena, n, plan.max_state_heads);
    b.decay = take_floats(arena, n, plan.max_state_heads);
    b.parameters = take_floats(arena, n, plan.max_parameters);
    b.ranks = take_floats(arena, n, plan.max_parameters);
    b.steps = take_floats(arena, n, plan.max_steps);
    b.state_work = take_floats(arena, num_threads, plan.max_head_state);
    b.gate = take_floats(arena, n, plan.max_hidden);
    b.up = take_floats(arena, n, plan.max_hidden);
    b.quants = QuantBuffers::take(arena, kernels, n, plan.widest_input());
    b.hidden_quants = QuantBuffers::take(arena, kernels, n, plan.max_hidden);
    b.dense = plan.has_beside ? take_floats(arena, n, plan.width) : nullptr;
    b.beside_in = plan.has_beside ? take_floats(arena, n, plan.width) : nullptr;
    b.streams = plan.num_streams > 1 ? take_floats(arena, n, plan.num_streams * plan.width) : nullptr;
    b.per_layer = take_floats(arena, n, plan.per_layer_width);
    b.per_layer_work = take_floats(arena, num_threads, plan.per_layer_width);
    for (const RopeSpec& rope : plan.ropes)
        b.rope_tables.push_back(take_floats(arena, n, 2 * static_cast<int>(rope.inverse_frequencies.size())));
    if (plan.max_kv > 0)
        b.attention =
            AttentionScratch::take(arena, hungriest(plan, num_threads, max_context), num_threads, max_context);
    if (plan.max_experts == 0) return b;
    b.router = take_floats(arena, n, plan.max_experts);
    b.expert_in = take_floats(arena, n, plan.width);
    b.expert_out = take_floats(arena, n, plan.width);
    b.expert_weight = take_floats(arena, n, plan.max_active);
    b.expert_index = arena.take<int32_t>(static_cast<size_t>(n) * static_cast<size_t>(plan.max_active));
    b.expert_rows = arena.take<int32_t>(static_cast<size_t>(n));
    return b;
}

}  // namespace kvarn
