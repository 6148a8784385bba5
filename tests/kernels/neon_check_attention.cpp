// Attention over tiles of cached keys and the cache's own rounding, as in test_attention.py.
#include <algorithm>
#include <cmath>
#include <utility>

#include "neon_check.h"
#include "quant/half.h"

namespace kvarn::check {
namespace {

// One head's keys and values in blocks of one type of cache.
struct Cache {
    std::vector<Bytes> k, v;
    int head_dim, num_keys;

    Cache(StoreKVFn store, const Floats& keys, const Floats& values, int head_dim)
        : head_dim(head_dim), num_keys(static_cast<int>(keys.size()) / head_dim) {
        for (int t = 0; t < num_keys; ++t) {
            if (t % kKVBlock == 0) k.emplace_back(64 * head_dim + 64), v.emplace_back(64 * head_dim + 64);
            const size_t at = static_cast<size_t>(t) * head_dim;
            store(keys.data() + at, values.data() + at, head_dim, t % kKVBlock, k.back().data(), v.back().data());
        }
    }
};

struct Attended {
    Floats m, l, acc;
};

bool is_same(const Attended& a, const Attended& b) {
    return same_bits(a.m, b.m) && same_bits(a.l, b.l) && same_bits(a.acc, b.acc);
}

Attended attend(AttendFn function, const Floats& q, const Cache& cache, int first, int last, float softcap,
                float slope = 0) {
    const int dim = cache.head_dim, heads = static_cast<int>(q.size()) / dim;
    Attended out{Floats(heads, -kInf), Floats(heads), Floats(q.size())};
    Floats scratch(static_cast<size_t>(heads) * kKeyTile), bias(scratch.size());
    for (int begin = first / kKeyTile * kKeyTile; begin < last; begin += kKeyTile) {
        KVTile tile{{}, {}, std::min(kKeyTile, cache.num_keys - begin)};
        for (int b = 0; b * kKVBlock < tile.num_keys; ++b) {
            tile.k[b] = cache.k[begin / kKVBlock + b].data();
            tile.v[b] = cache.v[begin / kKVBlock + b].data();
        }
        for (size_t i = 0; i < bias.size(); ++i)
            bias[i] = slope * static_cast<float>(begin + static_cast<int>(i) % kKeyTile);
        function(q.data(), heads, dim, tile, std::max(0, first - begin), std::min(kKeyTile, last - begin),
                 1 / std::sqrt(static_cast<float>(dim)), softcap, slope == 0 ? nullptr : bias.data(), out.m.data(),
                 out.l.data(), out.acc.data(), scratch.data());
    }
    return out;
}

// What a cache of f16 or q8_0 gives back, by scalar arithmetic.
float kept_f16(float x) {
    uint16_t k[kKVBlock] = {}, v[kKVBlock] = {};
    select_table("scalar").store_kv_f16(&x, &x, 1, 0, k, v);
    return half_to_float(v[0]);
}

Floats kept(const Floats& x, int head_dim, const std::string& type) {
    Floats out = x;
    if (type == "f16") std::transform(x.begin(), x.end(), out.begin(), kept_f16);
    if (type != "q8_0") return out;
    const Cache cache(select_table("scalar").store_kv_q8_0, x, x, head_dim);
    for (size_t i = 0; i < x.size(); ++i) {
        const int t = static_cast<int>(i) / head_dim, d = static_cast<int>(i) % head_dim;
        const uint8_t* block = cache.v[t / kKVBlock].data();
        uint16_t scale;
        const int groups = (head_dim + 31) / 32;
        std::memcpy(&scale, block + kKVBlock * head_dim + 2 * (t % kKVBlock * groups + d / 32), 2);
        out[i] = static_cast<float>(static_cast<int8_t>(block[t % kKVBlock * head_dim + d])) * half_to_float(scale);
    }
    return out;
}

void attention_agrees_with_double(const Attended& result, const Floats& q, const Floats& k, const Floats& v, int dim,
                                  int first, int last, float softcap) {
    const double scale = 1 / std::sqrt(static_cast<float>(dim));
    for (size_t h = 0; h < q.size() / dim; ++h) {
        std::vector<double> weight(last);
        double worst = 0, max = -kInf, total = 0;
        for (int key = first; key < last; ++key) {
            double dot = 0, magnitude = 0;
            for (int d = 0; d < dim; ++d) {
                const double term = static_cast<double>(q[h * dim + d]) * k[static_cast<size_t>(key) * dim + d];
                dot += term, magnitude += std::abs(term);
            }
            weight[key] = softcap > 0 ? softcap * std::tanh(scale * dot / softcap) : scale * dot;
            worst = std::max(worst, kF32 * scale * magnitude + (softcap > 0 ? 5e-7 * std::abs(weight[key]) : 0));
            max = std::max(max, weight[key]);
        }
        for (int key = first; key < last; ++key) total += weight[key] = std::exp(weight[key] - max);
        expect(std::abs(result.m[h] - max) <= worst + 1e-6 * std::abs(max), "the running maximum is right");
        for (int d = 0; d < dim; ++d) {
            double exact = 0, magnitude = 0;
            for (int key = first; key < last; ++key) {
                const double term = weight[key] / total * v[static_cast<size_t>(key) * dim + d];
                exact += term, magnitude += std::abs(term);
            }
            expect(std::abs(result.acc[h * dim + d] / result.l[h] - exact) <= (2 * worst + 4 * kF32) * magnitude,
                   "attention agrees with double");
        }
    }
}

void attention_is_right(const KernelTable& table, AttendFn function, StoreKVFn store, const std::string& type) {
    for (int dim : {8, 16, 20, 64, 80, 96, 128, 192, 256}) {
        const int num_keys = 150;
        Floats q = Random{31}.normals(9 * dim, 3);
        Floats k = Random{37}.normals(num_keys * dim), v = Random{41}.normals(num_keys * dim);
        const Floats seen_k = kept(k, dim, type), seen_v = kept(v, dim, type);
        const Cache cache(store, k, v, dim);
        const Floats three(q.begin(), q.begin() + 3 * dim);
        for (const auto& [first, last] : {std::pair{0, 150}, {0, 1}, {5, 64}, {63, 65}, {20, 131}, {149, 150}})
            for (float softcap : {0.0f, 30.0f})
                attention_agrees_with_double(attend(function, three, cache, first, last, softcap), three, seen_k,
                                             seen_v, dim, first, last, softcap);
        const Attended all = attend(function, q, cache, 3, 140, 0);
        for (int heads = 1; heads < 9; ++heads) {
            const Floats some(q.begin(), q.begin() + heads * dim), others(q.begin() + heads * dim, q.end());
            const Attended a = attend(function, some, cache, 3, 140, 0), b = attend(function, others, cache, 3, 140, 0);
            Attended joined = a;
            joined.m.insert(joined.m.end(), b.m.begin(), b.m.end());
            joined.l.insert(joined.l.end(), b.l.begin(), b.l.end());
            joined.acc.insert(joined.acc.end(), b.acc.begin(), b.acc.end());
            expect(is_same(joined, all), "a head has the same bits whatever heads share the call");
        }
        const Cache floats(select_table("scalar").store_kv_f32, seen_k, seen_v, dim);
        expect(is_same(all, attend(table.attend_f32, q, floats, 3, 140, 0)),
               type + " has the bits of its values as floats");
        for (int i = 0; i < num_keys * dim; ++i)
            if (i / dim < 3 || i / dim >= 140) k[i] = kNaN, v[i] = i % 2 ? kInf : kNaN;
        expect(is_same(all, attend(function, q, Cache(store, k, v, dim), 3, 140, 0)), "hidden keys leave no trace");
        k[50 * dim] = kNaN;
        const Attended spoiled = attend(function, three, Cache(store, k, v, dim), 3, 140, 0);
        expect(std::isnan(spoiled.l[0]) && std::isnan(spoiled.acc[0]), "a visible NaN is not lost");
    }
}

// Around every boundary of f16: ties, subnormals, overflow, NaN.
Floats awkward_floats() {
    Floats x = {0.0f, -0.0f, 65519.9f, 65520, -1e30f, kInf, -kInf, kNaN, 0x1p-25f, 0x1p-24f, 1e-30f, 3e5f};
    for (uint16_t half = 0; half < 0x7c00; half = static_cast<uint16_t>(half + 13)) {
        const float low = half_to_float(half), high = half_to_float(static_cast<uint16_t>(half + 1));
        x.insert(x.end(), {low, -high, (low + high) / 2, -(low + high) / 2});
    }
    return x;
}

void storing_is_exact(const KernelTable& table) {
    const StoreKVFn stores[3][2] = {{select_table("scalar").store_kv_f16, table.store_kv_f16},
                                    {select_table("scalar").store_kv_f32, table.store_kv_f32},
                                    {select_table("scalar").store_kv_q8_0, table.store_kv_q8_0}};
    for (int dim : {1, 3, 8, 16, 20, 33, 63, 64, 80, 128, 256})
        for (const auto& [expected, store] : stores)
            for (float scale : {0.0f, 1.0f, 1e-4f, 1e-7f, 1e-13f}) {  // 0: the awkward ones
                Floats k = awkward_floats(), v = k;
                if (scale > 0) k = Random{43}.normals(20 * dim, scale), v = Random{47}.normals(20 * dim, scale);
                k.resize(k.size() / dim * dim), v.resize(k.size());
                std::reverse(v.begin(), v.end());
                const Cache a(expected, k, v, dim), b(store, k, v, dim);
                expect(a.k == b.k && a.v == b.v, "store_kv is exact");
            }
}

}  // namespace

void check_attention(const KernelTable& table) {
    storing_is_exact(table);
    attention_is_right(table, table.attend_f16, table.store_kv_f16, "f16");
    attention_is_right(table, table.attend_f32, table.store_kv_f32, "f32");
    attention_is_right(table, table.attend_q8_0, table.store_kv_q8_0, "q8_0");
}

}  // namespace kvarn::check
