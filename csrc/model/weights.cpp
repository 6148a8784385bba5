#include "weights.h"

#include <algorithm>

#include "../base/check.h"

namespace kvarn {

namespace {

constexpr int kTaskBytes = 1 << 20;  // packed by one thread at a time
constexpr int kTurnBytes = 4 << 20;  // and in one turn: what the steps of other models wait for

std::string shape_text(int parts, int rows, int columns) {
    return std::to_string(parts) + " x " + std::to_string(rows) + " x " + std::to_string(columns);
}

size_t part_bytes(Type type, int rows, int columns) {
    return Arena::padded(packed_group_bytes(type, columns) * static_cast<size_t>(num_groups(rows)));
}

// Pack a stack of matrices, the first at `to`.
std::vector<Matrix> packed_stack(Type type, int parts, int rows, int columns, const uint8_t* source, uint8_t* to,
                                 ThreadTeam& pool) {
    BlockShape shape = block_shape(type);
    size_t source_part =
        static_cast<size_t>(columns / shape.values) * static_cast<size_t>(shape.bytes) * static_cast<size_t>(rows);
    std::vector<Matrix> stack;
    for (int part = 0; part < parts; ++part)
        stack.push_back({type, rows, columns, to + part_bytes(type, rows, columns) * static_cast<size_t>(part)});

    int groups = num_groups(rows), group_bytes = static_cast<int>(packed_group_bytes(type, columns));
    int chunk = std::max(1, std::min(groups / (8 * pool.num_threads()), kTaskBytes / group_bytes));
    int chunks = (groups + chunk - 1) / chunk, tasks = parts * chunks;
    int slice = std::max(pool.num_threads(), kTurnBytes / (chunk * group_bytes));
    for (int first = 0; first < tasks; first += slice) {
        std::lock_guard turn(pool.turn());
        pool.run(std::min(slice, tasks - first), [&](int index, int) {
            int part = (first + index) / chunks, begin = (first + index) % chunks * chunk;
            pack_groups(type, source + source_part * static_cast<size_t>(part), rows, columns, begin,
                        std::min(groups, begin + chunk), stack[static_cast<size_t>(part)].packed);
        });
    }
    return stack;
}

}  // namespace

size_t Weights::packed_bytes(Type type, int parts, int rows, int columns) {
    return part_bytes(type, rows, columns) * static_cast<size_t>(parts);
}

void Weights::add_matrices(const std::string& name, Type type, int parts, int rows, int columns, const uint8_t* source,
                           ThreadTeam& pool) {
    BlockShape shape = block_shape(type);
    require(parts > 0 && rows > 0 && columns > 0 && columns % shape.values == 0,
            name + ": shape " + shape_text(parts, rows, columns) + " does not fit its type");
    size_t bytes = packed_bytes(type, parts, rows, columns);
    require(used_ + bytes <= region_.bytes(), name + ": more weights than were announced");
    matrices_[name] = packed_stack(type, parts, rows, columns, source, region_.data() + used_, pool);
    used_ += bytes;
}

void Weights::replace_matrices(const std::string& name, Type type, std::span<const uint8_t> source, ThreadTeam& pool) {
    auto found = matrices_.find(name);
    require(found != matrices_.end(), "weight " + name + " was not loaded");
    const int parts = static_cast<int>(found->second.size()), rows = found->second.front().rows,
              columns = found->second.front().columns;
    const BlockShape shape = block_shape(type);
    const size_t values = static_cast<size_t>(parts) * static_cast<size_t>(rows) * static_cast<size_t>(columns);
    require(columns % shape.values == 0 &&
                source.size() == values / static_cast<size_t>(shape.values) * static_cast<size_t>(shape.bytes),
            name + ": the tensor's bytes do not match its shape");
    PageRegion region(packed_bytes(type, parts, rows, columns), false);
    std::vector<Matrix> stack = packed_stack(type, parts, rows, columns, source.data(), region.data(), pool);
    Replaced& kept = replaced_[name];
    if (kept.original.empty()) kept.original = found->second;
    kept.region = std::move(region);
    found->second = std::move(stack);
}

void Weights::restore_matrices(const std::string& name) {
    auto found = replaced_.find(name);
    require(found != replaced_.end(), "weight " + name + " was not replaced");
    matrices_[name] = found->second.original;
    replaced_.erase(found);
}

const std::vector<Matrix>& Weights::matrices(const std::string& name, int parts, int rows, int columns) const {
    auto found = matrices_.find(name);
    require(found != matrices_.end(), "weight " + name + " was not loaded");
    const Matrix& first = found->second.front();
    int found_parts = static_cast<int>(found->second.size());
    require(found_parts == parts && first.rows == rows && first.columns == columns,
            "weight " + name + " is " + shape_text(found_parts, first.rows, first.columns) + ", the model needs " +
                shape_text(parts, rows, columns));
    return found->second;
}

const Matrix& Weights::matrix(const std::string& name, int rows, int columns) const {
    return matrices(name, 1, rows, columns).front();
}

const float* Weights::vector(const std::string& name, int size) const {
    auto found = vectors_.find(name);
    require(found != vectors_.end(), "weight " + name + " was not loaded");
    require(static_cast<int>(found->second.size()) == size, "weight " + name + " has " +
                                                                std::to_string(found->second.size()) +
                                                                " values, the model needs " + std::to_string(size));
    return found->second.data();
}

}  // namespace kvarn
