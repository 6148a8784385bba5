// Activations in tiles, and the products of weights with them.
#pragma once
#include <algorithm>
#include <span>

#include "adapter.h"
#include "weights.h"

namespace kvarn {

// Who computes: the chosen kernels and the threads.
struct Compute {
    const KernelTable& kernels;
    ThreadTeam& pool;
};

// n rows of k floats (contiguous), and the same rows quantised or rounded, in tiles of kTileTokens.
struct Activations {
    const float* values = nullptr;
    int n = 0, k = 0;
    int8_t* q = nullptr;
    float* scale = nullptr;
    float* sum = nullptr;
    int32_t* minus_sums = nullptr;
    uint16_t* rounded = nullptr;

    // Rows of one call of a product.
    int tile_tokens() const { return rounded != nullptr ? kRoundedTokens : kTileTokens; }
    int num_tiles() const { return (n + tile_tokens() - 1) / tile_tokens(); }
    ActTile tile(int index) const;

    // Quantise or round columns [begin, end) of a row, both multiples of 32, where that is wanted at all.
    void quantize(const KernelTable& kernels, int row, int begin, int end) const;
};

// Buffers for quantised or rounded rows, whichever the kernels want, reused for every product of a step.
struct QuantBuffers {
    int8_t* q = nullptr;
    float* scale = nullptr;
    float* sum = nullptr;
    int32_t* minus_sums = nullptr;
    uint16_t* rounded = nullptr;
    static size_t arena_bytes(const KernelTable& kernels, int n, int k);
    static QuantBuffers take(Arena& arena, const KernelTable& kernels, int n, int k);
    QuantBuffers from(size_t value) const;  // of the rows from that value on, a multiple of kQuantBlock
};

struct Projection {
    const Matrix* weight;
    float* out;  // (n, stride)
    size_t stride;
    const float* bias;                      // null: none
    const LowRankRows* low_rank = nullptr;  // what adapters add, null: nothing
};

// n rows of k values whose quants are still to be made, by whoever makes the values; none where every weight that
// they will meet is a float type.
Activations reserve(const QuantBuffers& buffers, const float* values, int n, int k,
                    std::span<const Projection> projections);

// The same with all rows quantised.
Activations prepare(const Compute& compute, const QuantBuffers& buffers, const float* values, int n, int k,
                    std::span<const Projection> projections);

// Tokens [begin, end) of a tile.
struct Tokens {
    int begin, end;
};

namespace detail {
int groups_per_task(const Compute& compute, const Activations& in, const Matrix& weight);
Tokens project_tile(const Compute& compute, const Activations& in, int tile, const Projection& projection,
                    int group_begin, int group_end);
}  // namespace detail

// out = weight x in (+ bias) for several weights of one input in one parallel region; `after(projection, tokens,
// row_begin, row_end)` runs in the same task once those output rows are complete for those tokens, still in the cache.
template <class After>
void project(const Compute& compute, const Activations& in, std::span<const Projection> projections, After&& after) {
    constexpr size_t kMaxProjections = 4;
    int chunk[kMaxProjections];
    int first_task[kMaxProjections + 1] = {0};
    for (size_t p = 0; p < projections.size(); ++p) {
        chunk[p] = detail::groups_per_task(compute, in, *projections[p].weight);
        first_task[p + 1] = first_task[p] + (projections[p].weight->groups() + chunk[p] - 1) / chunk[p];
    }
    compute.pool.run(first_task[projections.size()], [&](int task, int) {
        size_t p = 0;
        while (task >= first_task[p + 1]) ++p;
        const Projection& projection = projections[p];
        int begin = (task - first_task[p]) * chunk[p];
        int end = std::min(begin + chunk[p], projection.weight->groups());
        for (int tile = 0; tile < in.num_tiles(); ++tile) {
            Tokens tokens = detail::project_tile(compute, in, tile, projection, begin, end);
            after(p, tokens, begin * kLanes, std::min(end * kLanes, projection.weight->rows));
        }
    });
}

inline void project(const Compute& compute, const Activations& in, std::span<const Projection> projections) {
    project(compute, in, projections, [](size_t, Tokens, int, int) {});
}

// Two weights of one shape whose rows are combined pairwise: after(tokens, row_begin, row_end) sees both complete.
template <class After>
void project_pair(const Compute& compute, const Activations& in, const Projection& first, const Projection& second,
                  After&& after) {
    int chunk = std::min(detail::groups_per_task(compute, in, *first.weight),
                         detail::groups_per_task(compute, in, *second.weight));
    int groups = first.weight->groups();
    compute.pool.run((groups + chunk - 1) / chunk, [&](int task, int) {
        int begin = task * chunk, end = std::min(begin + chunk, groups);
        for (int tile = 0; tile < in.num_tiles(); ++tile) {
            detail::project_tile(compute, in, tile, first, begin, end);
            Tokens tokens = detail::project_tile(compute, in, tile, second, begin, end);
            after(tokens, begin * kLanes, std::min(end * kLanes, first.weight->rows));
        }
    });
}

// Call body(row) for n rows: in parallel when there are enough of them to be worth waking the pool.
template <class Body>
void for_rows(const Compute& compute, int n, Body&& body) {
    constexpr int kRowsPerTask = 4;
    if (n <= kRowsPerTask) {
        for (int row = 0; row < n; ++row) body(row);
        return;
    }
    compute.pool.run((n + kRowsPerTask - 1) / kRowsPerTask, [&](int task, int) {
        int end = std::min(n, (task + 1) * kRowsPerTask);
        for (int row = task * kRowsPerTask; row < end; ++row) body(row);
    });
}

}  // namespace kvarn
