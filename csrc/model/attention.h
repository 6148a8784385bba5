// Attention over the paged cache: fixed tiles of keys by absolute position, merged left to right.
//
// A query's keys are cut into splits of kSplitKeys, each split into tiles of kKeyTile. A split is reduced from
// scratch and splits are merged left to right, always, so that handing splits to different threads changes no bit.
#pragma once
#include "batch.h"
#include "kv.h"
#include "project.h"
#include "runs.h"
#include "spec.h"

namespace kvarn {

constexpr int kSplitKeys = 512;

class AttentionScratch {
public:
    static size_t arena_bytes(const AttentionSpec& spec, int num_threads, int max_context);
    static AttentionScratch take(Arena& arena, const AttentionSpec& spec, int num_threads, int max_context);

    float* of_worker(int worker) const { return per_worker_ + static_cast<size_t>(worker) * worker_floats_; }
    float* partials() const { return partials_; }

    // Tasks are split over keys only while there are fewer than this many of them.
    static int max_split_tasks(int num_threads) { return 4 * num_threads; }

private:
    float* per_worker_;
    float* partials_;
    size_t worker_floats_;
};

// q (n, heads * head_dim) against the cache, into out of the same shape and quantised as mixed, whose values out is;
// of latent attention into (n, heads * rank) and not quantised.
// K and V of the batch are already stored; runs are those of the batch. sinks: by query head, null: none.
void attend(const Compute& compute, const AttentionSpec& spec, const float* sinks, const KVCache& cache, size_t layer,
            const BatchView& batch, std::span<const QueryRun> runs, const float* q, float* out,
            const Activations& mixed, const AttentionScratch& scratch);

}  // namespace kvarn
