// Matrix times activations for weights kept as floats: one fma per column, in ascending order.
// A column of eight rows fills a vector; Lanes loads those of type BF16 with load_bf16.
#pragma once
#include "lanes.h"
#include "low_rank.h"

namespace kvarn::shared {
namespace {

template <class L, class Stored>
struct Plain {  // F32 or F16
    using Value = Stored;
    static typename L::Floats load(const Value* at) { return L::load(at); }
};

template <class L>
struct BF16 {
    using Value = uint16_t;
    static typename L::Floats load(const Value* at) { return L::load_bf16(at); }
};

template <class L, class Format>
struct FloatMatmul {
    using Value = typename Format::Value;
    using Floats = typename L::Floats;
    static_assert(L::kWidth == kLanes);

    const Value* weights;
    const ActTile& tile;
    float* out;
    size_t out_stride;
    int rows;

    void write(const float* sums, int group, int t) const {
        const int left = rows - group * kLanes, num_rows = left < kLanes ? left : kLanes;
        for (int lane = 0; lane < num_rows; ++lane) out[t * out_stride + group * kLanes + lane] = sums[lane];
    }

    template <int kGroups, int kTokens>
    void run_tile(int group, int t) const {
        const Value* columns[kGroups];
        const float* x[kTokens];
        Floats sums[kGroups][kTokens];
        for (int i = 0; i < kTokens; ++i) x[i] = tile.f + static_cast<size_t>(t + i) * tile.k;
        for (int g = 0; g < kGroups; ++g) {
            columns[g] = weights + static_cast<size_t>(tile.k) * kLanes * (group + g);
            for (int i = 0; i < kTokens; ++i) sums[g][i] = L::set(0);
        }
        const int num_columns = tile.k;
        for (int column = 0; column < num_columns; ++column) {
            Floats w[kGroups];
            for (int g = 0; g < kGroups; ++g) w[g] = Format::load(columns[g] + static_cast<size_t>(column) * kLanes);
            for (int i = 0; i < kTokens; ++i) {
                const Floats value = L::set(x[i][column]);
                for (int g = 0; g < kGroups; ++g) sums[g][i] = L::fma(w[g], value, sums[g][i]);
            }
        }
        // Stored by constant indices first: anything else would keep the sums in memory throughout the loop above.
        alignas(32) float results[kGroups][kTokens][kLanes];
#pragma GCC unroll 8
        for (int i = 0; i < kGroups * kTokens; ++i)
            L::store(results[i / kTokens][i % kTokens], sums[i / kTokens][i % kTokens]);
        for (int g = 0; g < kGroups; ++g)
            for (int i = 0; i < kTokens; ++i) write(results[g][i], group + g, t + i);
    }

    template <int kGroups>
    void run_groups(int group) const {
        int t = 0;
        for (; t + 4 <= tile.n; t += 4) run_tile<kGroups, 4>(group, t);
        for (; t + 2 <= tile.n; t += 2) run_tile<kGroups, 2>(group, t);
        if (t < tile.n) run_tile<kGroups, 1>(group, t);
    }

    void run(int group_begin, int group_end) const {
        int group = group_begin;
        for (; group + 2 <= group_end; group += 2) run_groups<2>(group);
        if (group < group_end) run_groups<1>(group);
    }
};

template <class L, class Format>
void matmul_float(const uint8_t* packed, const ActTile& tile, float* out, size_t out_stride, int rows, int group_begin,
                  int group_end) noexcept {
    const auto* weights = reinterpret_cast<const typename Format::Value*>(packed);
    FloatMatmul<L, Format>{weights, tile, out, out_stride, rows}.run(group_begin, group_end);
}

template <class L>
constexpr KernelTable matmul_float_kernels() {
    KernelTable t{};
    t.low_rank_in_f16 = low_rank_in<L, uint16_t>;
    t.low_rank_in_f32 = low_rank_in<L, float>;
    t.low_rank_add_f16 = low_rank_add<L, uint16_t>;
    t.low_rank_add_f32 = low_rank_add<L, float>;
    t.matmul[static_cast<int>(Type::F32)] = matmul_float<L, Plain<L, float>>;
    t.matmul[static_cast<int>(Type::F16)] = matmul_float<L, Plain<L, uint16_t>>;
    t.matmul[static_cast<int>(Type::BF16)] = matmul_float<L, BF16<L>>;
    return t;
}

}  // namespace
}  // namespace kvarn::shared
