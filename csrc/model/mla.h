// Multi-head latent attention: what is special about it around attention.h, which runs it like any other.
//
// Queries are multiplied by a matrix of their head, so that they can meet the cached rows (rank + rope_dim) as one KV
// head; what the heads take from the rows is multiplied by another. Values are the first rank columns of a row.
#pragma once
#include <vector>

#include "kv.h"
#include "project.h"

namespace kvarn {

// Fill in the values of a tile whose keys [head_dim][16] are there, as [16][head_dim] in `values`.
void turn_latents(KVType type, int head_dim, KVTile& tile, uint8_t* values);

// Of each worker: a tile of one head's rows, and their quants.
struct HeadScratch {
    float* values;
    QuantBuffers quants;
    int columns;

    static size_t arena_bytes(const KernelTable& kernels, int columns, int num_threads);
    static HeadScratch take(Arena& arena, const KernelTable& kernels, int columns, int num_threads);
    float* values_of(int worker) const;
    QuantBuffers quants_of(int worker) const;
};

// Rows of all heads: head h of a row begins at row * row_stride + h * head_stride.
struct HeadRows {
    float* values;
    int row_stride, head_stride;
    float* at(int row, int head) const {
        return values + static_cast<size_t>(row) * static_cast<size_t>(row_stride) +
               static_cast<size_t>(head) * static_cast<size_t>(head_stride);
    }
};

// out = weights[head] x in, for n rows of every head; one task for each head.
void project_heads(const Compute& compute, const std::vector<Matrix>& weights, const HeadRows& in, const HeadRows& out,
                   int n, const HeadScratch& scratch);

}  // namespace kvarn
