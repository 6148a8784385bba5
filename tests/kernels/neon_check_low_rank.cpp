// The two products of an adapter's pair: against double arithmetic, and blind to how rows are cut. As in
// test_low_rank.py.
#include <array>
#include <cmath>

#include "neon_check.h"
#include "quant/half.h"
#include "quant/pack.h"

namespace kvarn::check {
namespace {

struct Sum {
    double exact, size;  // size: of all its terms
};

struct Held {  // a matrix as a pair has it, packed and unpacked
    Bytes packed;
    Floats values;
    int columns;

    Held(Type type, const Floats& given, int rows, int columns) : columns(columns) {
        const bool is_half = type == Type::F16;
        Bytes stored(given.size() * (is_half ? 2 : 4));
        for (size_t i = 0; i < given.size(); ++i) {
            const uint16_t half = float_to_half(given[i]);
            if (is_half) std::memcpy(stored.data() + 2 * i, &half, sizeof half);
            else std::memcpy(stored.data() + 4 * i, &given[i], sizeof given[i]);
        }
        packed.resize(packed_group_bytes(type, columns) * static_cast<size_t>(num_groups(rows)));
        pack_groups(type, stored.data(), rows, columns, 0, num_groups(rows), packed.data());
        values.resize(given.size());
        for (int row = 0; row < rows; ++row)
            unpack_row(type, packed.data(), columns, row, values.data() + static_cast<size_t>(row) * columns);
    }
    Sum times(int row, const float* x) const {
        double sum = 0, size = 0;
        for (int c = 0; c < columns; ++c) {
            const double term = static_cast<double>(values[static_cast<size_t>(row) * columns + c]) * x[c];
            sum += term, size += std::abs(term);
        }
        return {sum, size};
    }
};

void a_pair_is_the_product_of_its_halves(const KernelTable& table, Type type, int rank, int columns, int rows) {
    const std::string name = type == Type::F16 ? " of f16" : " of f32";
    const auto in = type == Type::F16 ? table.low_rank_in_f16 : table.low_rank_in_f32;
    const auto add = type == Type::F16 ? table.low_rank_add_f16 : table.low_rank_add_f32;
    Random random{static_cast<uint64_t>(rank)};
    const Floats x = random.normals(columns), base = random.normals(rows);
    const Held a(type, random.normals(rank * columns), rank, columns), b(type, random.normals(rows * rank), rows, rank);

    Floats low(static_cast<size_t>(num_groups(rank)) * kLanes + 1, -77.0f);
    in(a.packed.data(), x.data(), columns, rank, 0.75f, low.data());
    for (int j = 0; j < rank; ++j) {
        const auto [exact, size] = a.times(j, x.data());
        expect(std::abs(low[j] - 0.75 * exact) <= kF32 * 0.75 * size, "low_rank_in" + name + " agrees with double");
    }
    expect(low.back() == -77.0f, "low_rank_in" + name + " stays within its groups");

    Floats out = base;
    out.push_back(-77.0f);
    add(b.packed.data(), low.data(), rank, rows, out.data());
    for (int row = 0; row < rows; ++row) {
        const auto [exact, size] = b.times(row, low.data());
        expect(std::abs(out[row] - (base[row] + exact)) <= kF32 * (std::abs(base[row]) + size),
               "low_rank_add" + name + " agrees with double");
    }
    expect(out[rows] == -77.0f, "low_rank_add" + name + " stays within its rows");

    const size_t group_bytes = b.packed.size() / static_cast<size_t>(num_groups(rows));
    for (int begin = 0; begin < rows; begin += kLanes)
        for (int end : {begin + 1, begin + 5, begin + kLanes, begin + 5 * kLanes, rows}) {
            if (end > rows) continue;
            Floats piece(base.begin() + begin, base.begin() + end);
            add(b.packed.data() + static_cast<size_t>(begin / kLanes) * group_bytes, low.data(), rank, end - begin,
                piece.data());
            expect(same_bits(piece, Floats(out.begin() + begin, out.begin() + end)),
                   "low_rank_add" + name + " does not depend on the piece");
        }
}

}  // namespace

void check_low_rank(const KernelTable& table) {
    for (Type type : {Type::F16, Type::F32})
        for (auto [rank, columns, rows] : {std::array{1, 1, 1}, {8, 64, 64}, {3, 33, 21}, {16, 130, 40}, {21, 96, 7}})
            a_pair_is_the_product_of_its_halves(table, type, rank, columns, rows);
}

}  // namespace kvarn::check
