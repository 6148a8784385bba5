// The buffers of one step, taken from the arena in one place so that its size is known in one place.
#pragma once
#include <vector>

#include "attention.h"
#include "mla.h"
#include "plan.h"

namespace kvarn {

struct StepBuffers {
    float* x;                    // (n, width)   the residual stream
    float* normed;               // (n, width)
    float* joined;               // (n, 2 x width)  rows that come as an embedding and a state
    float* result;               // (n, width)   of a sublayer
    float* entry;                // (n, width)   x before a parallel block, or what a state beside attention gives
    float *q, *mixed;            // (n, query width)
    float *k, *v;                // (n, KV width)
    float* latent;               // (n, heads x their queries, or their latents)
    HeadScratch heads;           // of products with a matrix of each head
    float* convolved;            // (n, channels)  of a layer with a state
    float* output_gate;          // (n, gate)      of attention or of what stands in its place
    float *beta, *decay;         // (n, value heads)
    float *parameters, *ranks;   // (n, parameters)  of a selective layer; those of its steps
    float* steps;                // (n, values)
    float* state_work;           // (threads, state of a head)
    float *gate, *up;            // (n, hidden)
    QuantBuffers quants;         // of what a sublayer reads
    QuantBuffers hidden_quants;  // of gate, made while quants are still read
    float *dense, *beside_in;    // (n, width)   of a feed-forward beside experts, null: there is none
    float* streams;              // (streams, n, width)  null: there is one, x
    float* per_layer;            // (n, layers x length)  the layers' own inputs
    float* per_layer_work;       // (threads, layers x length)
    std::vector<float*> rope_tables;
    AttentionScratch attention;
    std::vector<QueryRun> runs;
    std::shared_ptr<AdapterStep> adapters;  // null: no row has one
    // mixture of experts
    float *router, *expert_in, *expert_out;  // (n, experts), (n, width), (n, width)
    float* expert_weight;                    // (n, active)
    int32_t *expert_index, *expert_rows;     // (n, active), (n)

    static size_t arena_bytes(const KernelTable& kernels, const ModelPlan& plan, int n, int num_threads,
                              int max_context);
    static StepBuffers take(Arena& arena, const KernelTable& kernels, const ModelPlan& plan, int n, int num_threads,
                            int max_context);
};

}  // namespace kvarn
