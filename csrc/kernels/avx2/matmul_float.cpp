// Matrix times activations for weights kept as floats: one fma per column, in ascending order.
#include <immintrin.h>

#include "functions.h"

namespace kvarn::avx2 {
namespace {

struct F32 {
    using Value = float;
    static __m256 load(const Value* at) { return _mm256_loadu_ps(at); }
};

struct F16 {
    using Value = uint16_t;
    static __m256 load(const Value* at) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    }
};

struct BF16 {
    using Value = uint16_t;
    static __m256 load(const Value* at) {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    }
};

template <class Format>
struct FloatMatmul {
    using Value = typename Format::Value;

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
        __m256 sums[kGroups][kTokens];
        for (int i = 0; i < kTokens; ++i) x[i] = tile.f + static_cast<size_t>(t + i) * tile.k;
        for (int g = 0; g < kGroups; ++g) {
            columns[g] = weights + static_cast<size_t>(tile.k) * kLanes * (group + g);
            for (int i = 0; i < kTokens; ++i) sums[g][i] = _mm256_setzero_ps();
        }
        const int num_columns = tile.k;
        for (int column = 0; column < num_columns; ++column) {
            __m256 w[kGroups];
            for (int g = 0; g < kGroups; ++g) w[g] = Format::load(columns[g] + static_cast<size_t>(column) * kLanes);
            for (int i = 0; i < kTokens; ++i) {
                const __m256 value = _mm256_broadcast_ss(x[i] + column);
                for (int g = 0; g < kGroups; ++g) sums[g][i] = _mm256_fmadd_ps(w[g], value, sums[g][i]);
            }
        }
        // Stored by constant indices first: anything else would keep the sums in memory throughout the loop above.
        alignas(32) float results[kGroups][kTokens][kLanes];
#pragma GCC unroll 8
        for (int i = 0; i < kGroups * kTokens; ++i)
            _mm256_store_ps(results[i / kTokens][i % kTokens], sums[i / kTokens][i % kTokens]);
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

}  // namespace

#define KVARN_MATMUL(name, Format)                                                                                  \
    void name(const uint8_t* packed, const ActTile& tile, float* out, size_t out_stride, int rows, int group_begin, \
              int group_end) noexcept {                                                                             \
        const auto* weights = reinterpret_cast<const Format::Value*>(packed);                                       \
        FloatMatmul<Format>{weights, tile, out, out_stride, rows}.run(group_begin, group_end);                      \
    }

KVARN_MATMUL(matmul_f32, F32)
KVARN_MATMUL(matmul_f16, F16)
KVARN_MATMUL(matmul_bf16, BF16)
#undef KVARN_MATMUL

}  // namespace kvarn::avx2
