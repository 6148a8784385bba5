#include "project.h"

namespace kvarn {

namespace {
constexpr size_t kTaskBytes = 64 << 10;  // weights one task keeps hot while it walks the tiles of a long prompt
constexpr int kGroupsPerBlock = kQuantBlock / kLanes;  // so that a task's outputs can be quantised by the same task
}  // namespace

ActTile Activations::tile(int index) const {
    int first = index * kTileTokens;
    size_t at = static_cast<size_t>(first) * static_cast<size_t>(k);
    size_t block = at / kQuantBlock;
    int rows = std::min(kTileTokens, n - first);
    if (q == nullptr) return {nullptr, nullptr, nullptr, nullptr, values + at, rows, k};
    return {q + at, scale + block, sum + block, minus_sums + 2 * block, values + at, rows, k};
}

size_t QuantBuffers::arena_bytes(int n, int k) {
    size_t values = static_cast<size_t>(n) * static_cast<size_t>(k);
    return Arena::padded(values) + 4 * Arena::padded(values / kQuantBlock * sizeof(float) + sizeof(float));
}

QuantBuffers QuantBuffers::take(Arena& arena, int n, int k) {
    size_t values = static_cast<size_t>(n) * static_cast<size_t>(k);
    size_t blocks = values / kQuantBlock + 1;
    return {arena.take<int8_t>(values), arena.take<float>(blocks), arena.take<float>(blocks),
            arena.take<int32_t>(2 * blocks)};
}

void Activations::quantize(const KernelTable& kernels, int row, int begin, int end) const {
    if (q == nullptr) return;
    int first = row / kTileTokens * kTileTokens, rows = std::min(kTileTokens, n - first);
    // A tile is block-major: the blocks before `begin` hold as many columns of every row of the tile.
    size_t at = static_cast<size_t>(first) * static_cast<size_t>(k) + static_cast<size_t>(begin * rows);
    kernels.quantize_row(values + static_cast<size_t>(row) * static_cast<size_t>(k) + begin, end - begin, row - first,
                         rows, q + at, scale + at / kQuantBlock, sum + at / kQuantBlock,
                         minus_sums + 2 * (at / kQuantBlock));
}

Activations reserve(const QuantBuffers& buffers, const float* values, int n, int k,
                    std::span<const Projection> projections) {
    bool needs_quants = std::any_of(projections.begin(), projections.end(),
                                    [](const Projection& p) { return is_quantized(p.weight->type); });
    if (!needs_quants) return {values, n, k};
    return {values, n, k, buffers.q, buffers.scale, buffers.sum, buffers.minus_sums};
}

Activations prepare(const Compute& compute, const QuantBuffers& buffers, const float* values, int n, int k,
                    std::span<const Projection> projections) {
    Activations in = reserve(buffers, values, n, k, projections);
    if (in.q != nullptr) for_rows(compute, n, [&](int row) { in.quantize(compute.kernels, row, 0, k); });
    return in;
}

namespace detail {

int groups_per_task(const Compute& compute, const Matrix& weight) {
    int fair = weight.groups() / (4 * compute.pool.num_threads());
    int hot = static_cast<int>(kTaskBytes / weight.group_bytes());
    return std::max(kGroupsPerBlock, std::min(fair, hot) / kGroupsPerBlock * kGroupsPerBlock);
}

Tokens project_tile(const Compute& compute, const Activations& in, int tile, const Projection& projection,
                    int group_begin, int group_end) {
    const Matrix& weight = *projection.weight;
    Tokens tokens{tile * kTileTokens, std::min((tile + 1) * kTileTokens, in.n)};
    float* out = projection.out + static_cast<size_t>(tokens.begin) * projection.stride;
    compute.kernels.matmul[static_cast<int>(weight.type)](weight.packed, in.tile(tile), out, projection.stride,
                                                          weight.rows, group_begin, group_end);
    int begin = group_begin * kLanes, end = std::min(group_end * kLanes, weight.rows);
    for (int token = tokens.begin; token < tokens.end && projection.bias != nullptr; ++token)
        compute.kernels.add(projection.bias + begin, end - begin,
                            projection.out + static_cast<size_t>(token) * projection.stride + begin);
    for (int token = tokens.begin; token < tokens.end && projection.low_rank != nullptr; ++token)
        projection.low_rank->add_to(compute.kernels, token, group_begin, end - begin,
                                    projection.out + static_cast<size_t>(token) * projection.stride + begin);
    return tokens;
}

}  // namespace detail

}  // namespace kvarn
