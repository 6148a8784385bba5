// Products with packed matrices one by one, beside the other kernels: kvarn.backends.native._native.kernels.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "../base/check.h"
#include "../kernels/table.h"
#include "../quant/pack.h"
#include "new_array.h"
#include "released_gil.h"

namespace kvarn {

using namespace nb::literals;

void bind_products(nb::module_& m);

namespace {

constexpr int kNoSplit = 1 << 20;  // groups in one call

const KernelTable& table_named(const std::string& name) { return select_table(name.c_str()); }

size_t file_bytes(Type type, int rows, int columns) {
    const BlockShape shape = block_shape(type);
    require(rows > 0 && columns > 0 && columns % shape.values == 0,
            "a matrix of " + std::to_string(rows) + " x " + std::to_string(columns) +
                " has no whole number of blocks of " + std::to_string(shape.values));
    return static_cast<size_t>(rows) * static_cast<size_t>(columns / shape.values) * static_cast<size_t>(shape.bytes);
}

Array<uint8_t> pack(int type_id, In1<uint8_t> raw, int rows, int columns) {
    const Type type = static_cast<Type>(type_id);
    require(raw.size() == file_bytes(type, rows, columns), "the bytes do not match the shape");
    NewArray<uint8_t> out({packed_group_bytes(type, columns) * static_cast<size_t>(num_groups(rows))});
    pack_groups(type, raw.data(), rows, columns, 0, num_groups(rows), out.data);
    return out.array;
}

void check_packed(Type type, const In1<uint8_t>& packed, int rows, int columns) {
    file_bytes(type, rows, columns);
    require(packed.size() == packed_group_bytes(type, columns) * static_cast<size_t>(num_groups(rows)),
            "the packed bytes do not match the shape");
}

Array<float> unpack(int type_id, In1<uint8_t> packed, int rows, int columns) {
    const Type type = static_cast<Type>(type_id);
    check_packed(type, packed, rows, columns);
    NewArray<float> out({static_cast<size_t>(rows), static_cast<size_t>(columns)});
    for (int row = 0; row < rows; ++row)
        unpack_row(type, packed.data(), columns, row,
                   out.data + static_cast<size_t>(row) * static_cast<size_t>(columns));
    return out.array;
}

// Rows of x quantised as one tile of n tokens.
struct QuantizedTile {
    std::vector<int8_t> q;
    std::vector<float> scale, sum;
    std::vector<int32_t> minus_sums;

    QuantizedTile(const KernelTable& table, const float* x, int n, int k)
        : q(static_cast<size_t>(n) * static_cast<size_t>(k)), scale(q.size() / kQuantBlock),
          sum(q.size() / kQuantBlock), minus_sums(2 * sum.size()) {
        for (int t = 0; t < n; ++t)
            table.quantize_row(x + static_cast<size_t>(t) * static_cast<size_t>(k), k, t, n, q.data(), scale.data(),
                               sum.data(), minus_sums.data());
    }
};

// Rows of x rounded, in tiles of kTileTokens.
std::vector<uint16_t> rounded_rows(const KernelTable& table, const float* x, int n, int k) {
    std::vector<uint16_t> rounded(static_cast<size_t>(n) * static_cast<size_t>(k));
    for (int row = 0; row < n; ++row) {
        const int first = row / kTileTokens * kTileTokens;
        table.round_row(x + static_cast<size_t>(row) * static_cast<size_t>(k), k, row - first,
                        std::min(kTileTokens, n - first),
                        rounded.data() + static_cast<size_t>(first) * static_cast<size_t>(k));
    }
    return rounded;
}

// tile_tokens (0: the most) and groups_per_call choose how the work is cut; results must not depend on them.
Array<float> matmul(const std::string& table_name, int type_id, In1<uint8_t> packed, int rows, In2<float> x,
                    int tile_tokens, int groups_per_call) {
    const KernelTable& table = table_named(table_name);
    const Type type = static_cast<Type>(type_id);
    const int n = static_cast<int>(x.shape(0)), k = static_cast<int>(x.shape(1));
    check_packed(type, packed, rows, k);
    const int most_tokens = table.round_row != nullptr && is_quantized(type) ? kRoundedTokens : kTileTokens;
    require(tile_tokens >= 0 && tile_tokens <= most_tokens && groups_per_call >= 1, "tile sizes are out of range");
    if (tile_tokens == 0) tile_tokens = most_tokens;
    const size_t stride = static_cast<size_t>(rows);
    NewArray<float> out({static_cast<size_t>(n), stride});
    ReleasedGil release;
    for (int first = 0; first < n; first += tile_tokens) {
        const int tokens = std::min(tile_tokens, n - first);
        const float* values = x.data() + static_cast<size_t>(first) * static_cast<size_t>(k);
        ActTile tile{nullptr, nullptr, nullptr, nullptr, values, tokens, k};
        std::unique_ptr<QuantizedTile> quantized;
        std::vector<uint16_t> rounded;
        if (is_quantized(type) && table.round_row != nullptr) {
            rounded = rounded_rows(table, values, tokens, k);
            tile.rounded = rounded.data();
        } else if (is_quantized(type)) {
            quantized = std::make_unique<QuantizedTile>(table, values, tokens, k);
            tile = {quantized->q.data(),
                    quantized->scale.data(),
                    quantized->sum.data(),
                    quantized->minus_sums.data(),
                    nullptr,
                    tokens,
                    k};
        }
        for (int group = 0; group < num_groups(rows); group += groups_per_call)
            table.matmul[type_id](packed.data(), tile, out.data + static_cast<size_t>(first) * stride, stride, rows,
                                  group, std::min(group + groups_per_call, num_groups(rows)));
    }
    return out.array;
}

// As bf16, or nothing where the table has no such kernel.
std::optional<Array<uint16_t>> round_row(const std::string& table_name, In1<float> x) {
    const KernelTable& table = table_named(table_name);
    require(x.size() % kQuantBlock == 0, "the row is no whole number of blocks of 32");
    if (table.round_row == nullptr) return std::nullopt;
    NewArray<uint16_t> rounded({x.size()});
    table.round_row(x.data(), static_cast<int>(x.size()), 0, 1, rounded.data);
    return rounded.array;
}

nb::tuple quantize_row(const std::string& table_name, In1<float> x) {
    const size_t blocks = x.size() / kQuantBlock;
    require(blocks * kQuantBlock == x.size(), "the row is no whole number of blocks of 32");
    NewArray<int8_t> q({x.size()});
    NewArray<float> scale({blocks}), sum({blocks});
    NewArray<int32_t> minus_sums({blocks, size_t{2}});
    table_named(table_name)
        .quantize_row(x.data(), static_cast<int>(x.size()), 0, 1, q.data, scale.data, sum.data, minus_sums.data);
    return nb::make_tuple(q.array, scale.array, sum.array, minus_sums.array);
}

}  // namespace

void bind_products(nb::module_& m) {
    m.def("pack", pack, "type"_a, "raw"_a, "rows"_a, "columns"_a);
    m.def("unpack", unpack, "type"_a, "packed"_a, "rows"_a, "columns"_a);
    m.def("matmul", matmul, "table"_a, "type"_a, "packed"_a, "rows"_a, "x"_a, "tile_tokens"_a = 0,
          "groups_per_call"_a = kNoSplit);
    m.def("quantize_row", quantize_row, "table"_a, "x"_a);
    m.def("round_row", round_row, "table"_a, "x"_a);
}

}  // namespace kvarn
