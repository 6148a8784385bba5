#include "project.h"

namespace kvarn {

namespace {
constexpr size_t kTaskBytes = 64 << 10;  // weights one task keeps hot while it walks the tiles of a long prompt
}

ActTile Activations::tile(int index) const {
    int first = index * kTileTokens;
    size_t at = static_cast<size_t>(first) * static_cast<size_t>(k);
    size_t block = at / kQuantBlock;
    int rows = std::min(kTileTokens, n - first);
    if (q == nullptr) return {nullptr, nullptr, nullptr, values + at, rows, k};
    return {q + at, scale + block, sum + block, values + at, rows, k};
}

size_t QuantBuffers::arena_bytes(int n, int k) {
    size_t values = static_cast<size_t>(n) * static_cast<size_t>(k);
    return Arena::padded(values) + 2 * Arena::padded(values / kQuantBlock * sizeof(float) + sizeof(float));
}

QuantBuffers QuantBuffers::take(Arena& arena, int n, int k) {
    size_t values = static_cast<size_t>(n) * static_cast<size_t>(k);
    size_t blocks = values / kQuantBlock + 1;
    return {arena.take<int8_t>(values), arena.take<float>(blocks), arena.take<float>(blocks)};
}

Activations prepare(const Compute& compute, const QuantBuffers& buffers, const float* values, int n, int k,
                    std::span<const Projection> projections) {
    Activations in{values, n, k};
    bool needs_quants = std::any_of(projections.begin(), projections.end(),
                                    [](const Projection& p) { return is_quantized(p.weight->type); });
    if (!needs_quants) return in;
    in.q = buffers.q;
    in.scale = buffers.scale;
    in.sum = buffers.sum;
    for_rows(compute, n, [&](int row) {
        int first = row / kTileTokens * kTileTokens;
        size_t at = static_cast<size_t>(first) * static_cast<size_t>(k);
        compute.kernels.quantize_row(values + static_cast<size_t>(row) * static_cast<size_t>(k), k, row - first,
                                     std::min(kTileTokens, n - first), in.q + at, in.scale + at / kQuantBlock,
                                     in.sum + at / kQuantBlock);
    });
    return in;
}

namespace detail {

int groups_per_task(const Compute& compute, const Matrix& weight) {
    int fair = weight.groups() / (4 * compute.pool.num_threads());
    int hot = static_cast<int>(kTaskBytes / weight.group_bytes());
    return std::max(1, std::min(fair, hot));
}

void project_rows(const Compute& compute, const Activations& in, const Projection& projection, int group_begin,
                  int group_end) {
    const Matrix& weight = *projection.weight;
    MatmulFn matmul = compute.kernels.matmul[static_cast<int>(weight.type)];
    for (int index = 0; index < in.num_tiles(); ++index) {
        size_t first = static_cast<size_t>(index) * kTileTokens;
        matmul(weight.packed, in.tile(index), projection.out + first * projection.stride, projection.stride,
               weight.rows, group_begin, group_end);
    }
    if (projection.bias == nullptr) return;
    int begin = group_begin * kLanes, end = std::min(group_end * kLanes, weight.rows);
    for (int row = 0; row < in.n; ++row)
        compute.kernels.add(projection.bias + begin, end - begin,
                            projection.out + static_cast<size_t>(row) * projection.stride + begin);
}

}  // namespace detail

}  // namespace kvarn
