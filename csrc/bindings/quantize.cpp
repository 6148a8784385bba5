// Rows of floats to quantised blocks, shared out over the threads.
#include <atomic>

#include "../base/check.h"
#include "../base/thread_pool.h"
#include "../quant/encode.h"
#include "../quant/pack.h"
#include "arrays.h"
#include "released_gil.h"

namespace kvarn {

using namespace nb::literals;

namespace {

constexpr int kTaskValues = 1 << 16;  // floats one task has in flight: they stay in its cache

struct Rows {
    Type source, target;
    int rows, columns;
};

size_t row_bytes(Type type, int columns) {
    const BlockShape shape = block_shape(type);
    return static_cast<size_t>(columns / shape.values) * static_cast<size_t>(shape.bytes);
}

Rows checked_rows(int source, int target, int rows, int columns) {
    require(source >= 0 && source < kNumTypes && target >= 0 && target < kNumTypes, "unknown tensor type");
    const Rows shape{static_cast<Type>(source), static_cast<Type>(target), rows, columns};
    require(!is_quantized(shape.source), "the source must be F32, F16 or BF16");
    require(is_encodable(shape.target), "this type cannot be written");
    require(rows > 0 && columns > 0 && columns % block_shape(shape.target).values == 0,
            "the rows are no whole number of blocks");
    return shape;
}

// importance: one float per column, or none. False when a value is NaN or infinite: then out is of no use.
bool quantize(int source, int target, int rows, int columns, In1<uint8_t> raw, In1<float> importance, Out1<uint8_t> out,
              ThreadTeam& team) {
    const Rows shape = checked_rows(source, target, rows, columns);
    const size_t from = row_bytes(shape.source, columns), to = row_bytes(shape.target, columns);
    require(raw.size() == from * static_cast<size_t>(rows) && out.size() == to * static_cast<size_t>(rows),
            "the arrays do not have the tensor's bytes");
    require(importance.size() == 0 || importance.size() == static_cast<size_t>(columns),
            "one importance is needed for each column");
    const uint8_t* in = raw.data();
    const float* weights = importance.size() == 0 ? nullptr : importance.data();
    uint8_t* to_bytes = out.data();
    const int per_task = std::max(1, kTaskValues / columns);
    std::atomic<bool> is_finite{true};
    ReleasedGil release;
    std::lock_guard turn(team.turn());
    team.run((rows + per_task - 1) / per_task, [&](int task, int) {
        std::vector<float> values(static_cast<size_t>(columns));
        const int end = std::min(rows, (task + 1) * per_task);
        for (int row = task * per_task; row < end; ++row) {
            const size_t at = static_cast<size_t>(row);
            if (!read_floats(shape.source, in + from * at, columns, values.data())) is_finite = false;
            else encode_row(shape.target, values.data(), columns, weights, to_bytes + to * at);
        }
    });
    return is_finite;
}

}  // namespace

void bind_quantize(nb::module_& m) {
    m.def("quantize", quantize, "source"_a, "target"_a, "rows"_a, "columns"_a, "raw"_a, "importance"_a, "out"_a,
          "team"_a);
}

}  // namespace kvarn
