#include "project.h"

namespace kvarn {

namespace {
constexpr size_t kTaskBytes = 64 << 10;  // weights one task keeps hot while it walks the tiles of a long prompt
constexpr int kRowsPerTask = 256;        // of rounded rows' weights: a task's outputs stay in the cache
constexpr int kGroupsPerBlock = kQuantBlock / kLanes;  // so that a task's outputs can be quantised by the same task
}  // namespace

ActTile Activations::tile(int index) const {
    int first = index * tile_tokens();
    size_t at = static_cast<size_t>(first) * static_cast<size_t>(k);
    size_t block = at / kQuantBlock;
    int rows = std::min(tile_tokens(), n - first);
    if (rounded != nullptr) return {nullptr, nullptr, nullptr, nullptr, values + at, rows, k, rounded + at};
    if (q == nullptr) return {nullptr, nullptr, nullptr, nullptr, values + at, rows, k};
    return {q + at, scale + block, sum + block, minus_sums + 2 * block, values + at, rows, k};
}

size_t QuantBuffers::arena_bytes(const KernelTable& kernels, int n, int k) {
    size_t values = static_cast<size_t>(n) * static_cast<size_t>(k);
    if (kernels.round_row != nullptr) return Arena::padded(values * sizeof(uint16_t));
    return Arena::padded(values) + 4 * Arena::padded(values / kQuantBlock * sizeof(float) + sizeof(float));
}

QuantBuffers QuantBuffers::take(Arena& arena, const KernelTable& kernels, int n, int k) {
    size_t values = static_cast<size_t>(n) * static_cast<size_t>(k);
    QuantBuffers buffers;
    if (kernels.round_row != nullptr) {
        buffers.rounded = arena.take<uint16_t>(values);
        return buffers;
    }
    size_t blocks = values / kQuantBlock + 1;
    buffers.q = arena.take<int8_t>(values);
    buffers.scale = arena.take<float>(blocks);
    buffers.sum = arena.take<float>(blocks);
    buffers.minus_sums = arena.take<int32_t>(2 * blocks);
    return buffers;
}

QuantBuffers QuantBuffers::from(size_t value) const {
    if (rounded != nullptr) return {nullptr, nullptr, nullptr, nullptr, rounded + value};
    const size_t block = value / kQuantBlock;
    return {q + value, scale + block, sum + block, minus_sums + 2 * block, nullptr};
}

void Activations::quantize(const KernelTable& kernels, int row, int begin, int end) const {
    if (q == nullptr && rounded == nullptr) return;
    int first = row / kTileTokens * kTileTokens, rows = std::min(kTileTokens, n - first);
    // A tile is block-major: the blocks before `begin` hold as many columns of every row of the tile.
    size_t at = static_cast<size_t>(first) * static_cast<size_t>(k) + static_cast<size_t>(begin * rows);
    const float* from = values + static_cast<size_t>(row) * static_cast<size_t>(k) + begin;
    if (rounded != nullptr) return kernels.round_row(from, end - begin, row - first, rows, rounded + at);
    kernels.quantize_row(from, end - begin, row - first, rows, q + at, scale + at / kQuantBlock, sum + at / kQuantBlock,
                         minus_sums + 2 * (at / kQuantBlock));
}

Activations reserve(const QuantBuffers& buffers, const float* values, int n, int k,
                    std::span<const Projection> projections) {
    bool needs_quants = std::any_of(projections.begin(), projections.end(),
                                    [](const Projection& p) { return is_quantized(p.weight->type); });
    if (!needs_quants) return {values, n, k};
    return {values, n, k, buffers.q, buffers.scale, buffers.sum, buffers.minus_sums, buffers.rounded};
}

Activations prepare(const Compute& compute, const QuantBuffers& buffers, const float* values, int n, int k,
                    std::span<const Projection> projections) {
    Activations in = reserve(buffers, values, n, k, projections);
    if (in.q != nullptr || in.rounded != nullptr)
        for_rows(compute, n, [&](int row) { in.quantize(compute.kernels, row, 0, k); });
    return in;
}

namespace detail {

int groups_per_task(const Compute& compute, const Activations& in, const Matrix& weight) {
    int fair = weight.groups() / (4 * compute.pool.num_threads());
    int hot = static_cast<int>(kTaskBytes / weight.group_bytes());
    if (in.rounded != nullptr && in.n > kTileTokens) hot = kRowsPerTask / kLanes;  // unpacked in smaller pieces
    return std::max(kGroupsPerBlock, std::min(fair, hot) / kGroupsPerBlock * kGroupsPerBlock);
}

Tokens project_tile(const Compute& compute, const Activations& in, int tile, const Projection& projection,
                    int group_begin, int group_end) {
    const Matrix& weight = *projection.weight;
    Tokens tokens{tile * in.tile_tokens(), std::min((tile + 1) * in.tile_tokens(), in.n)};
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
