// The kernels one by one, for tests and benchmarks: kvarn.backends.native._native.kernels. Arrays are checked here,
// since kernels check nothing. Results are new arrays.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "../base/check.h"
#include "../kernels/cpu.h"
#include "../kernels/table.h"
#include "../model/kv.h"
#include "../quant/pack.h"
#include "new_array.h"
#include "released_gil.h"

namespace kvarn {

using namespace nb::literals;

void bind_kernels(nb::module_& m);
void bind_products(nb::module_& m);

namespace {

const KernelTable& table_named(const std::string& name) { return select_table(name.c_str()); }

Array<float> rms_norm(const std::string& table_name, In1<float> x, In1<float> w, float eps) {
    require(x.size() == w.size(), "x and w differ in length");
    NewArray<float> y({x.size()});
    table_named(table_name).rms_norm(x.data(), w.data(), eps, static_cast<int>(x.size()), y.data);
    return y.array;
}

Array<float> layer_norm(const std::string& table_name, In1<float> x, In1<float> w, In1<float> b, float eps) {
    require(x.size() == w.size() && x.size() == b.size(), "x, w and b differ in length");
    NewArray<float> y({x.size()});
    table_named(table_name).layer_norm(x.data(), w.data(), b.data(), eps, static_cast<int>(x.size()), y.data);
    return y.array;
}

// add, silu_mul, gelu_tanh_mul of x and other; gelu ignores other.
Array<float> elementwise(const std::string& table_name, const std::string& op, In1<float> x, In1<float> other) {
    require(x.size() == other.size(), "x and other differ in length");
    const KernelTable& table = table_named(table_name);
    const int n = static_cast<int>(x.size());
    NewArray<float> y({x.size()});
    if (op == "add") {
        std::copy_n(other.data(), other.size(), y.data);
        table.add(x.data(), n, y.data);
    } else if (op == "gelu") {
        table.gelu(x.data(), n, y.data);
    } else {
        require(op == "silu_mul" || op == "gelu_tanh_mul", "no elementwise kernel '" + op + "'");
        (op == "silu_mul" ? table.silu_mul : table.gelu_tanh_mul)(x.data(), other.data(), n, y.data);
    }
    return y.array;
}

std::pair<int, float> argmax(const std::string& table_name, In1<float> x) {
    std::pair<int, float> best;
    table_named(table_name).argmax(x.data(), static_cast<int>(x.size()), &best.first, &best.second);
    return best;
}

double sum_exp(const std::string& table_name, In1<float> x, float max) {
    return table_named(table_name).sum_exp(x.data(), static_cast<int>(x.size()), max);
}

std::pair<double, double> softmax_sums(const std::string& table_name, In1<float> x, float max) {
    double sums[2];
    table_named(table_name).softmax_sums(x.data(), static_cast<int>(x.size()), max, sums);
    return {sums[0], sums[1]};
}

// A cache of one head in blocks of 16 tokens, filled by the table's own store kernel.
struct Cache {
    std::vector<uint8_t> k, v;
    size_t block;  // bytes of K, and of V
    AttendFn attend;

    Cache(const KernelTable& table, const std::string& dtype, In2<float> keys, In2<float> values) {
        require(keys.shape(0) == values.shape(0) && keys.shape(1) == values.shape(1),
                "keys and values differ in shape");
        const int num_keys = static_cast<int>(keys.shape(0)), head_dim = static_cast<int>(keys.shape(1));
        const KVType type = kv_type_named(dtype);
        block = kv_token_bytes(type, head_dim) * kKVBlock;
        attend = attend_kernel(table, type);
        k.resize(block * static_cast<size_t>((num_keys + kKVBlock - 1) / kKVBlock));
        v.resize(k.size());
        for (int key = 0; key < num_keys; ++key) {
            const size_t from = static_cast<size_t>(key) * static_cast<size_t>(head_dim);
            const size_t at = block * static_cast<size_t>(key / kKVBlock);
            store_kernel(table, type)(keys.data() + from, values.data() + from, head_dim, key % kKVBlock, k.data() + at,
                                      v.data() + at);
        }
    }

    KVTile tile(int first_key, int num_keys) const {
        KVTile tile{};
        tile.num_keys = num_keys;
        for (int b = 0; b * kKVBlock < num_keys; ++b) {
            const size_t at = block * static_cast<size_t>(first_key / kKVBlock + b);
            tile.k[b] = k.data() + at;
            tile.v[b] = v.data() + at;
        }
        return tile;
    }
};

// Attention of `heads` query heads over the visible keys [first, last) of one KV head: (m, l, acc). Where there are
// slopes, slope * key is added to a head's scores.
nb::tuple attend(const std::string& table_name, In2<float> q, In2<float> keys, In2<float> values, int first, int last,
                 float scale, float softcap, const std::string& dtype, const std::vector<float>& slopes) {
    const size_t heads = q.shape(0), head_dim = q.shape(1);
    const int num_keys = static_cast<int>(keys.shape(0));
    require(keys.shape(1) == head_dim, "q, keys and values differ in shape");
    require(0 <= first && first < last && last <= num_keys, "no visible key");
    require(slopes.empty() || slopes.size() == heads, "every head needs a slope");
    const Cache cache(table_named(table_name), dtype, keys, values);
    NewArray<float> m({heads}), l({heads}), acc({heads, head_dim});
    std::fill_n(m.data, heads, -std::numeric_limits<float>::infinity());
    std::vector<float> scratch(heads * kKeyTile), bias(slopes.size() * kKeyTile);
    for (int start = 0; start < last; start += kKeyTile) {
        const KVTile tile = cache.tile(start, std::min(kKeyTile, num_keys - start));
        const int begin = std::max(first - start, 0), end = std::min(last - start, tile.num_keys);
        if (begin >= end) continue;
        for (size_t i = 0; i < bias.size(); ++i)
            bias[i] = slopes[i / kKeyTile] * static_cast<float>(start + static_cast<int>(i % kKeyTile));
        cache.attend(q.data(), static_cast<int>(heads), static_cast<int>(head_dim), tile, begin, end, scale, softcap,
                     slopes.empty() ? nullptr : bias.data(), m.data, l.data, acc.data, scratch.data());
    }
    return nb::make_tuple(m.array, l.array, acc.array);
}

// K and V blocks as bytes after storing one token per row, (blocks, bytes) each; table.h says how they lie.
nb::tuple store_kv(const std::string& table_name, In2<float> keys, In2<float> values, const std::string& dtype) {
    const Cache cache(table_named(table_name), dtype, keys, values);
    const size_t blocks = cache.k.size() / cache.block;
    NewArray<uint8_t> k({blocks, cache.block}), v({blocks, cache.block});
    std::copy(cache.k.begin(), cache.k.end(), k.data);
    std::copy(cache.v.begin(), cache.v.end(), v.data);
    return nb::make_tuple(k.array, v.array);
}

// low = scale * a x and base + b low, for packed a (rank, columns) and b (rows, rank).
nb::tuple low_rank(const std::string& table_name, int type, In1<uint8_t> a, In1<uint8_t> b, In1<float> x, float scale,
                   In1<float> base, int rank) {
    const KernelTable& table = table_named(table_name);
    const bool is_half = static_cast<Type>(type) == Type::F16;
    const int columns = static_cast<int>(x.size()), rows = static_cast<int>(base.size());
    NewArray<float> low({static_cast<size_t>(num_groups(rank)) * kLanes}), out({base.size()});
    std::copy_n(base.data(), base.size(), out.data);
    (is_half ? table.low_rank_in_f16 : table.low_rank_in_f32)(a.data(), x.data(), columns, rank, scale, low.data);
    (is_half ? table.low_rank_add_f16 : table.low_rank_add_f32)(b.data(), low.data, rank, rows, out.data);
    return nb::make_tuple(low.array, out.array);
}

}  // namespace

void bind_kernels(nb::module_& m) {
    bind_products(m);
    m.def("tables", kernel_tables);
    m.def("emulated_tables", emulated_tables);
    m.def("rms_norm", rms_norm, "table"_a, "x"_a, "w"_a, "eps"_a);
    m.def("layer_norm", layer_norm, "table"_a, "x"_a, "w"_a, "b"_a, "eps"_a);
    m.def("elementwise", elementwise, "table"_a, "op"_a, "x"_a, "other"_a);
    m.def("argmax", argmax, "table"_a, "x"_a);
    m.def("sum_exp", sum_exp, "table"_a, "x"_a, "max"_a);
    m.def("softmax_sums", softmax_sums, "table"_a, "x"_a, "max"_a);
    m.def("attend", attend, "table"_a, "q"_a, "keys"_a, "values"_a, "first"_a, "last"_a, "scale"_a, "softcap"_a,
          "dtype"_a, "slopes"_a = std::vector<float>());
    m.def("low_rank", low_rank, "table"_a, "type"_a, "a"_a, "b"_a, "x"_a, "scale"_a, "base"_a, "rank"_a);
    m.def("store_kv", store_kv, "table"_a, "keys"_a, "values"_a, "dtype"_a);
}

}  // namespace kvarn
