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

    // Quantise or round columns [begin, end) of a row, both multiples of 32, where that is wanted; from: their values.
    void quantize(const KernelTable& kernels, int row, int begin, int end, const float* from) const;
    void quantize(const KernelTable& kernels, int row, int begin, int end) const {
        quantize(kernels, row, begin, end, values + static_cast<size_t>(row) * static_cast<size_t>(k) + begin);
    }
    // Ask for the lines that the quants of columns [begin, end) of a tile will go to: another thread may have them.
    void fetch_to_write(int tile, int begin, int end) const;
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

// Outputs of some groups of rows for the tokens of a tile, on the stack of the task that reads them: whole matrices of
// them would leave the cache in between.
struct OutputPiece {
    static constexpr int kGroups = 16;  // of a whole tile, more of fewer tokens; four blocks that are quantised at once
    static constexpr int kGroupsOfMany = 4;  // of more tokens, whose rows are rounded: what is unpacked together
    int num_rows, num_tokens;                // values (num_tokens, num_rows)
    alignas(64) float values[std::max(kTileTokens * kGroups, kRoundedTokens* kGroupsOfMany) * kLanes];

    static int max_groups(int num_tokens) {
        return num_tokens > kTileTokens ? kGroupsOfMany : kGroups * (kTileTokens / num_tokens);
    }

    float* of_token(int i) { return values + i * num_rows; }
    int size() const { return num_tokens * num_rows; }
};

namespace detail {
// The tiles of a long prompt in two parts with tasks of their own: fewer threads wait for the last one, and a thread
// that takes every other task meets the same half of the activations.
struct TileParts {
    int num_tiles, count;

    explicit TileParts(const Activations& in) : num_tiles(in.num_tiles()), count(num_tiles >= 4 ? 2 : 1) {}
    int begin(int part) const { return num_tiles * part / count; }
};

int groups_per_task(const Compute& compute, const Activations& in, const Matrix& weight);
Tokens project_piece(const Compute& compute, const Activations& in, int tile, const Projection& projection,
                     int group_begin, int group_end, OutputPiece& piece);
Tokens project_tile(const Compute& compute, const Activations& in, int tile, const Projection& projection,
                    int group_begin, int group_end);

// One tile reads its weights once, at the speed of memory, which follows a run of neighbours best; of more tiles a task
// is long, and none should wait behind another.
inline Claim claim_of(const Activations& in) { return in.n <= kTileTokens ? Claim::neighbours : Claim::one; }
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
    const detail::TileParts parts(in);
    compute.pool.run(first_task[projections.size()] * parts.count, detail::claim_of(in), [&](int index, int) {
        const int task = index / parts.count, part = index % parts.count;
        size_t p = 0;
        while (task >= first_task[p + 1]) ++p;
        const Projection& projection = projections[p];
        int begin = (task - first_task[p]) * chunk[p];
        int end = std::min(begin + chunk[p], projection.weight->groups());
        for (int tile = parts.begin(part); tile < parts.begin(part + 1); ++tile) {
            Tokens tokens = detail::project_tile(compute, in, tile, projection, begin, end);
            after(p, tokens, begin * kLanes, std::min(end * kLanes, projection.weight->rows));
        }
    });
}

inline void project(const Compute& compute, const Activations& in, std::span<const Projection> projections) {
    project(compute, in, projections, [](size_t, Tokens, int, int) {});
}

// The same by pieces that nobody else sees: body(tile, group_begin, group_end) computes and uses one.
template <class Body>
void for_pieces(const Compute& compute, const Activations& in, const Matrix& weight, int groups_per_task, Body&& body) {
    const int groups = weight.groups(), most = OutputPiece::max_groups(std::min(in.n, in.tile_tokens()));
    const detail::TileParts parts(in);
    const int chunks = (groups + groups_per_task - 1) / groups_per_task;
    compute.pool.run(chunks * parts.count, detail::claim_of(in), [&](int index, int) {
        const int chunk = index / parts.count, part = index % parts.count;
        const int end = std::min((chunk + 1) * groups_per_task, groups);
        for (int tile = parts.begin(part); tile < parts.begin(part + 1); ++tile)
            for (int group = chunk * groups_per_task; group < end; group += most)
                body(tile, group, std::min(group + most, end));
    });
}

// Two weights of one shape whose rows are combined pairwise: before(tile, row_begin, row_end) comes first,
// after(tokens, row_begin, first, second) sees both complete.
template <class Before, class After>
void project_pair(const Compute& compute, const Activations& in, const Projection& first, const Projection& second,
                  Before&& before, After&& after) {
    int chunk = std::min(detail::groups_per_task(compute, in, *first.weight),
                         detail::groups_per_task(compute, in, *second.weight));
    for_pieces(compute, in, *first.weight, chunk, [&](int tile, int begin, int end) {
        OutputPiece one, other;
        before(tile, begin * kLanes, std::min(end * kLanes, first.weight->rows));
        detail::project_piece(compute, in, tile, first, begin, end, one);
        Tokens tokens = detail::project_piece(compute, in, tile, second, begin, end, other);
        after(tokens, begin * kLanes, one, other);
    });
}

// x += weight x in (+ bias), x of the shape of the projection's output.
void project_add(const Compute& compute, const Activations& in, const Projection& projection, float* x);

// Call body(row) for n rows: in parallel when there are enough of them to be worth waking the pool. Threads that have
// enough rows anyway get 16 neighbours each, whose scales share cache lines, and whose keys do.
template <class Body>
void for_rows(const Compute& compute, int n, Body&& body) {
    constexpr int kFewRows = 4, kLineRows = 16;
    if (n <= kFewRows) {
        for (int row = 0; row < n; ++row) body(row);
        return;
    }
    const int rows = n >= kLineRows * compute.pool.num_threads() ? kLineRows : kFewRows;
    compute.pool.run((n + rows - 1) / rows, [&](int task, int) {
        int end = std::min(n, (task + 1) * rows);
        for (int row = task * rows; row < end; ++row) body(row);
    });
}

}  // namespace kvarn
