// Products of every type: right, exact at the extremes, blind to how the work is cut. As in test_matmul.py.
#include <algorithm>
#include <bit>
#include <cmath>

#include "neon_check.h"
#include "quant/pack.h"

namespace kvarn::check {
namespace {

struct TypeInfo {
    Type type;
    const char* name;
    std::vector<int> half_fields;        // where the f16 scales of a stored block lie
    int scale_begin = 0, scale_end = 0;  // the small scales of a super-block
};

const std::vector<TypeInfo> kTypes = {
    {Type::F32, "F32", {}},
    {Type::F16, "F16", {}},
    {Type::BF16, "BF16", {}},
    {Type::Q4_0, "Q4_0", {0}},
    {Type::Q4_1, "Q4_1", {0, 2}},
    {Type::Q5_0, "Q5_0", {0}},
    {Type::Q5_1, "Q5_1", {0, 2}},
    {Type::Q8_0, "Q8_0", {0}},
    {Type::IQ4_NL, "IQ4_NL", {0}},
    {Type::Q2_K, "Q2_K", {80, 82}, 0, 16},
    {Type::Q3_K, "Q3_K", {108}, 96, 108},
    {Type::Q4_K, "Q4_K", {0, 2}, 4, 16},
    {Type::Q5_K, "Q5_K", {0, 2}, 4, 16},
    {Type::Q6_K, "Q6_K", {208}, 192, 208},
};

void put_half(Bytes& stored, size_t at, uint16_t half) { std::memcpy(stored.data() + at, &half, sizeof half); }

struct Matrix {
    const TypeInfo& info;
    int rows, columns;
    Bytes packed;

    Matrix(const TypeInfo& info, int rows, int columns, const Bytes& stored)
        : info(info), rows(rows), columns(columns),
          packed(packed_group_bytes(info.type, columns) * static_cast<size_t>(num_groups(rows))) {
        pack_groups(info.type, stored.data(), rows, columns, 0, num_groups(rows), packed.data());
    }
    std::vector<Floats> unpacked() const {
        std::vector<Floats> out(static_cast<size_t>(rows), Floats(static_cast<size_t>(columns)));
        for (int r = 0; r < rows; ++r) unpack_row(info.type, packed.data(), columns, r, out[r].data());
        return out;
    }
};

size_t num_blocks(const TypeInfo& info, int rows, int columns) {
    return static_cast<size_t>(rows) * columns / block_shape(info.type).values;
}

// Every bit of the quants random, small scales of both signs.
Bytes random_stored(const TypeInfo& info, int rows, int columns, uint64_t seed) {
    Random random{seed};
    const size_t blocks = num_blocks(info, rows, columns), bytes = block_shape(info.type).bytes;
    Bytes stored(blocks * bytes);
    for (uint8_t& byte : stored) byte = static_cast<uint8_t>(random.bits());
    for (size_t b = 0; b < blocks; ++b) {
        const uint16_t half = static_cast<uint16_t>(0x1c00 + random.bits() % 0x800 + (random.bits() % 2 << 15));
        const uint32_t single = std::bit_cast<uint32_t>(random.normal());
        if (info.type == Type::F32) std::memcpy(stored.data() + 4 * b, &single, 4);
        else if (info.type == Type::F16) put_half(stored, 2 * b, half);
        else if (info.type == Type::BF16) put_half(stored, 2 * b, static_cast<uint16_t>(single >> 16));
        for (int field : info.half_fields) put_half(stored, b * bytes + static_cast<size_t>(field), half);
    }
    return stored;
}

struct Activations {
    int tokens, columns;
    Floats x;
};

struct Cut {
    int tile_tokens = kTileTokens, groups_per_call = 1 << 20;
};

// x W^T as the model would call it; two floats behind each row of the result must survive.
Floats multiply(const KernelTable& table, const Matrix& w, const Activations& a, Cut cut) {
    const int stride = w.rows + 2, k = w.columns;
    Floats out(static_cast<size_t>(a.tokens) * stride, -77.0f), result;
    for (int begin = 0; begin < a.tokens; begin += cut.tile_tokens) {
        const int n = std::min(cut.tile_tokens, a.tokens - begin);
        const float* x = a.x.data() + static_cast<size_t>(begin) * k;
        std::vector<int8_t> q(static_cast<size_t>(n) * k);
        Floats scale(static_cast<size_t>(n) * k / 32 + 1), sum(scale.size());
        std::vector<int32_t> minus_sums(2 * sum.size());
        for (int t = 0; t < n && is_quantized(w.info.type); ++t)
            table.quantize_row(x + static_cast<size_t>(t) * k, k, t, n, q.data(), scale.data(), sum.data(),
                               minus_sums.data());
        const ActTile tile{q.data(), scale.data(), sum.data(), minus_sums.data(), x, n, k};
        const int groups = num_groups(w.rows), step = std::min(cut.groups_per_call, groups);
        for (int group = 0; group < groups; group += step)
            table.matmul[static_cast<int>(w.info.type)](w.packed.data(), tile, out.data() + begin * stride, stride,
                                                        w.rows, group, std::min(group + step, groups));
    }
    for (int t = 0; t < a.tokens; ++t) {
        const float* row = out.data() + t * stride;
        result.insert(result.end(), row, row + w.rows);
        expect(row[w.rows] == -77.0f && row[w.rows + 1] == -77.0f, std::string(w.info.name) + " stays within its rows");
    }
    return result;
}

// The activations as the products of that type see them.
std::vector<double> seen(const KernelTable& table, const TypeInfo& info, const float* x, int k) {
    std::vector<double> out(x, x + k);
    if (!is_quantized(info.type)) return out;
    std::vector<int8_t> q(static_cast<size_t>(k));
    Floats scale(static_cast<size_t>(k) / 32), sum(scale.size());
    std::vector<int32_t> minus_sums(2 * sum.size());
    table.quantize_row(x, k, 0, 1, q.data(), scale.data(), sum.data(), minus_sums.data());
    for (int i = 0; i < k; ++i) out[i] = static_cast<double>(q[i]) * scale[i / 32];
    return out;
}

void products_agree_with_double(const KernelTable& table, const TypeInfo& info, const std::string& who) {
    const int values = block_shape(info.type).values;
    for (int rows : {1, 13, 24})
        for (int blocks : {1, 3, values == 1 ? 577 : values == 32 ? 40 : 6}) {
            const int columns = values * blocks;
            const Matrix w(info, rows, columns, random_stored(info, rows, columns, 3 + rows));
            const std::vector<Floats> values_of = w.unpacked();
            const Activations a{5, columns, Random{7}.normals(5 * columns)};
            const Floats result = multiply(table, w, a, {});
            for (int t = 0; t < a.tokens; ++t) {
                const std::vector<double> x = seen(table, info, a.x.data() + static_cast<size_t>(t) * columns, columns);
                for (int r = 0; r < rows; ++r) {
                    const Floats& row = values_of[r];
                    double exact = 0, magnitude = 0;
                    for (int i = 0; i < columns; ++i) {
                        exact += row[i] * x[i];
                        magnitude += std::abs(row[i] * x[i]);
                    }
                    expect(std::abs(result[static_cast<size_t>(t) * rows + r] - exact) <= kF32 * magnitude,
                           who + " agrees with double");
                }
            }
        }
}

// Also with `parent`, whose integer sums are the same.
void products_do_not_depend_on_the_cut(const KernelTable& table, const KernelTable* parent, const TypeInfo& info,
                                       const std::string& who) {
    const int rows = 43, columns = block_shape(info.type).values == 1 ? 61 : 2 * block_shape(info.type).values;
    const Matrix w(info, rows, columns, random_stored(info, rows, columns, 5));
    const Activations a{33, columns, Random{9}.normals(33 * columns)};
    const Floats whole = multiply(table, w, a, {});
    for (int tile_tokens = 1; tile_tokens < kTileTokens; ++tile_tokens)
        expect(same_bits(whole, multiply(table, w, a, {tile_tokens})), who + " has the same bits for every tile");
    for (int groups : {1, 2, 3, 5})
        for (int tile_tokens : {1, 7, 32})
            expect(same_bits(whole, multiply(table, w, a, {tile_tokens, groups})),
                   who + " has the same bits for every split");
    if (parent) expect(same_bits(whole, multiply(*parent, w, a, {})), who + " has the bits of its parent");
}

// Scales of 1, quants and small scales at their ends, activations of -127 and 127: nothing may round or overflow.
void sums_of_extreme_quants_are_exact(const KernelTable& table, const TypeInfo& info, const std::string& who) {
    const int rows = 16, columns = 256;
    const size_t bytes = block_shape(info.type).bytes, row_blocks = num_blocks(info, 1, columns);
    for (int fill : {0x00, 0xff, 0x0f, 0xf0, 0x55, 0xaa, 0x80, 0x7f}) {
        Random random{static_cast<uint64_t>(fill)};
        Bytes stored(rows * row_blocks * bytes);
        for (size_t i = 0; i < stored.size(); ++i) {
            const size_t row = i / bytes / row_blocks, at = i % bytes;
            const bool is_scale =
                at >= static_cast<size_t>(info.scale_begin) && at < static_cast<size_t>(info.scale_end);
            const int ends[4] = {0x80, 0x7f, 0xff, 0x00};
            stored[i] = static_cast<uint8_t>(is_scale ? ends[row % 4] : row >= 8 && random.bits() >> 31 ? ~fill : fill);
        }
        for (size_t b = 0; b < rows * row_blocks; ++b)
            for (int field : info.half_fields) put_half(stored, b * bytes + static_cast<size_t>(field), 0x3c00);
        const Matrix w(info, rows, columns, stored);
        const std::vector<Floats> values_of = w.unpacked();
        for (int step = 0; step < columns / 32; ++step) {
            Activations a{5, columns, Floats(5 * columns)};
            for (int i = 0; i < 32; ++i) {
                const float values[5] = {127, -127, i % 2 ? 127.0f : -127, random.bits() >> 31 ? 127.0f : -127,
                                         i < 16 ? 127.0f : -127};
                for (int t = 0; t < 5; ++t) a.x[t * columns + 32 * step + i] = values[t];
            }
            for (int tile_tokens : {1, 4, 5}) {
                const Floats result = multiply(table, w, a, {tile_tokens});
                for (int t = 0; t < a.tokens; ++t)
                    for (int r = 0; r < rows; ++r) {
                        double exact = 0;
                        const Floats& row = values_of[r];
                        for (int i = 32 * step; i < 32 * step + 32; ++i)
                            exact += static_cast<double>(row[i]) * a.x[t * columns + i];
                        expect(result[static_cast<size_t>(t) * rows + r] == exact, who + " is exact at the extremes");
                    }
            }
        }
    }
}

void what_is_not_finite_spoils_only_itself(const KernelTable& table, const TypeInfo& info, const std::string& who) {
    const int rows = 16, columns = 512, bad_row = 3, bad_token = 2;
    Bytes stored = random_stored(info, rows, columns, 11);
    const Matrix clean(info, rows, columns, stored);
    const size_t bytes = block_shape(info.type).bytes, row_blocks = num_blocks(info, 1, columns);
    for (int field : info.half_fields) {
        put_half(stored, bad_row * row_blocks * bytes + static_cast<size_t>(field), 0x7e00);
        put_half(stored, (bad_row * row_blocks + 1) * bytes + static_cast<size_t>(field), 0x7c00);
    }
    Activations a{6, columns, Random{13}.normals(6 * columns)};
    const Floats before = multiply(table, clean, a, {});
    a.x[bad_token * columns + 40] = kNaN;
    a.x[bad_token * columns + 80] = kInf;
    const Floats after = multiply(table, Matrix(info, rows, columns, stored), a, {});
    for (int t = 0; t < a.tokens; ++t)
        for (int r = 0; r < rows; ++r) {
            const size_t at = static_cast<size_t>(t) * rows + r;
            const bool is_bad = t == bad_token || (r == bad_row && !info.half_fields.empty());
            expect(is_bad ? std::isnan(after[at]) : after[at] == before[at], who + " keeps NaN to its row and token");
        }
}

}  // namespace

void check_products(const KernelTable& table, const KernelTable* parent) {
    for (const TypeInfo& info : kTypes) {
        const std::string who = std::string(table.name) + " " + info.name;
        products_agree_with_double(table, info, who);
        products_do_not_depend_on_the_cut(table, parent, info, who);
        what_is_not_finite_spoils_only_itself(table, info, who);
        if (is_quantized(info.type)) sums_of_extreme_quants_are_exact(table, info, who);
    }
}

}  // namespace kvarn::check
