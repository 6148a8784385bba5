// Sparse diffusion: which keys and values outside the active block are kept, and packing them into blocks of their own.
// backends/reference/keep.py is the readable definition.
#pragma once
#include "attention.h"

namespace kvarn {

class Keeper {
public:
    // After K and V of the batch are stored: q is (n, heads * head_dim), rotated.
    void pack(const Compute& compute, const AttentionSpec& spec, const KVCache& cache, size_t layer,
              const BatchView& batch, const float* q);

private:
    std::vector<float> mean_, scores_, pooled_;  // grow to the largest step seen and stay
    std::vector<int32_t> order_;
};

}  // namespace kvarn
