#include "project.h"

namespace kvarn {

namespace {
constexpr size_t kTaskBytes = 64 << 10;  // weights one task keeps hot while it walks the tiles of a long prompt
constexpr int kRowsPerTask = 256;        // of rounded rows' weights: a task's outputs stay in the cache
constexpr int kGroupsPerBlock = kQuantBlock / kLanes;  // so that a task's outputs can be quantised by the same task

// Without -mprfchw gcc asks for a line to read only, which a write then has to ask for once more. Where a CPU does not
// know the instruction it does nothing.
void fetch_line_to_write(const void* at) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(at)));
#else
    __builtin_prefetch(at, 1);
#endif
}

template <class Value>
void fetch_lines_to_write(const Value* from, size_t count) {
    constexpr size_t kLine = 64;
    const auto* bytes = reinterpret_cast<const char*>(from);
    for (size_t at = 0; at < count * sizeof(Value); at += kLine) fetch_line_to_write(bytes + at);
}

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

void Activations::quantize(const KernelTable& kernels, int row, int begin, int end, const float* from) const {
    if (q == nullptr && rounded == nullptr) return;
    int first = row / kTileTokens * kTileTokens, rows = std::min(kTileTokens, n - first);
    // A tile is block-major: the blocks before `begin` hold as many columns of every row of the tile.
    size_t at = static_cast<size_t>(first) * static_cast<size_t>(k) + static_cast<size_t>(begin * rows);
    if (rounded != nullptr) return kernels.round_row(from, end - begin, row - first, rows, rounded + at);
    kernels.quantize_row(from, end - begin, row - first, rows, q + at, scale + at / kQuantBlock, sum + at / kQuantBlock,
                         minus_sums + 2 * (at / kQuantBlock));
}

void Activations::fetch_to_write(int tile, int begin, int end) const {
    if (q == nullptr) return;
    const ActTile all = this->tile(tile);
    const size_t rows = static_cast<size_t>(all.n), at = static_cast<size_t>(begin / kQuantBlock) * rows,
                 blocks = static_cast<size_t>((end - begin) / kQuantBlock) * rows;
    fetch_lines_to_write(all.q + at * kQuantBlock, blocks * kQuantBlock);
    fetch_lines_to_write(all.scale + at, blocks);
    fetch_lines_to_write(all.sum + at, blocks);
    fetch_lines_to_write(all.minus_sums + 2 * at, 2 * blocks);
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

namespace {

Tokens tokens_of(const Activations& in, int tile) {
    return {tile * in.tile_tokens(), std::min((tile + 1) * in.tile_tokens(), in.n)};
}

// Of the tokens of a tile into out, which begins at the first of them and at the first row of the groups.
void project_groups(const Compute& compute, const Activations& in, int tile, const Projection& projection,
                    int group_begin, int group_end, float* out, size_t stride) {
    const Matrix& weight = *projection.weight;
    const int begin = group_begin * kLanes, rows = std::min(group_end * kLanes, weight.rows) - begin;
    compute.kernels.matmul[static_cast<int>(weight.type)](
        weight.packed + static_cast<size_t>(group_begin) * weight.group_bytes(), in.tile(tile), out, stride, rows, 0,
        group_end - group_begin);
    if (projection.bias == nullptr && projection.low_rank == nullptr) return;
    Tokens tokens = tokens_of(in, tile);
    for (int token = tokens.begin; token < tokens.end; ++token, out += stride) {
        if (projection.bias != nullptr) compute.kernels.add(projection.bias + begin, rows, out);
        if (projection.low_rank != nullptr) projection.low_rank->add_to(compute.kernels, token, group_begin, rows, out);
    }
}

}  // namespace

Tokens project_tile(const Compute& compute, const Activations& in, int tile, const Projection& projection,
                    int group_begin, int group_end) {
    Tokens tokens = tokens_of(in, tile);
    float* out = projection.out + static_cast<size_t>(tokens.begin) * projection.stride + group_begin * kLanes;
    project_groups(compute, in, tile, projection, group_begin, group_end, out, projection.stride);
    return tokens;
}

Tokens project_piece(const Compute& compute, const Activations& in, int tile, const Projection& projection,
                     int group_begin, int group_end, OutputPiece& piece) {
    Tokens tokens = tokens_of(in, tile);
    piece.num_tokens = tokens.end - tokens.begin;
    piece.num_rows = std::min(group_end * kLanes, projection.weight->rows) - group_begin * kLanes;
    project_groups(compute, in, tile, projection, group_begin, group_end, piece.values,
                   static_cast<size_t>(piece.num_rows));
    return tokens;
}

}  // namespace detail

void project_add(const Compute& compute, const Activations& in, const Projection& projection, float* x) {
    const Matrix& weight = *projection.weight;
    for_pieces(compute, in, weight, detail::groups_per_task(compute, in, weight), [&](int tile, int begin, int end) {
        OutputPiece piece;
        const int rows = std::min(end * kLanes, weight.rows) - begin * kLanes, first = tile * in.tile_tokens();
        float* to = x + static_cast<size_t>(first) * projection.stride + begin * kLanes;
        for (int i = 0; i < std::min(in.tile_tokens(), in.n - first); ++i)
            fetch_lines_to_write(to + static_cast<size_t>(i) * projection.stride, static_cast<size_t>(rows));
        detail::project_piece(compute, in, tile, projection, begin, end, piece);
        for (int i = 0; i < piece.num_tokens; ++i, to += projection.stride)
            compute.kernels.add(piece.of_token(i), piece.num_rows, to);
    });
}

}  // namespace kvarn
