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

    size_t source_part =
        static_cast<size_t>(columns / shape.values) * static_cast<size_t>(shape.bytes) * static_cast<size_t>(rows);
    std::vector<Matrix> stack;
    for (int part = 0; part < parts; ++part) {
        uint8_t* packed = region_.data() + used_ + part_bytes(type, rows, columns) * static_cast<size_t>(part);
        stack.push_back({type, rows, columns, packed});
    }
    used_ += bytes;

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
    matrices_[name] = std::move(stack);
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
