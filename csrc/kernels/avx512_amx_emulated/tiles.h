// avx512_amx/tiles.h without AMX, bit for bit: for tests on CPUs that have none.
//
// One product of tiles, as the manual of the instruction defines it (TDPBF16PS in Intel's SDM): for each token and row
// a chain of fmas over the even columns and one over the odd ones, both from zero; the two are added, then added to
// the sum. Subnormals count as zero and become zero, whatever the processor's settings.
#pragma once
#include <immintrin.h>

#include "../avx512_amx/shape.h"

namespace kvarn::avx512_amx_emulated {
namespace {

using avx512_amx::kTileColumns;
using avx512_amx::kTileRows;

struct TokenTile {
    uint16_t at[kTileRows][kTileColumns];
};
struct WeightTile {
    alignas(64) uint16_t at[kTileColumns / 2][kTileRows][2];
};
struct SumTile {
    alignas(64) float at[kTileRows][kTileRows];
};

inline __m512 as_float(__m512i bits) { return _mm512_castsi512_ps(bits); }

// Not inlined, so that nothing of it is done before the settings below are in force.
[[gnu::noinline]] void add_product(const TokenTile& tokens, const WeightTile& weights, int num_tokens, SumTile& sums) {
    const __m512i high_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    for (int token = 0; token < num_tokens; ++token) {
        __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
        for (int pair = 0; pair < kTileColumns / 2; ++pair) {
            const __m512i w = _mm512_load_si512(weights.at[pair]);
            int x;
            __builtin_memcpy(&x, &tokens.at[token][2 * pair], sizeof x);
            const __m512i both = _mm512_set1_epi32(x);
            even = _mm512_fmadd_ps(as_float(_mm512_slli_epi32(both, 16)), as_float(_mm512_slli_epi32(w, 16)), even);
            odd = _mm512_fmadd_ps(as_float(_mm512_and_si512(both, high_half)), as_float(_mm512_and_si512(w, high_half)),
                                  odd);
        }
        const __m512 sum = _mm512_load_ps(sums.at[token]);
        _mm512_store_ps(sums.at[token], _mm512_add_ps(sum, _mm512_add_ps(even, odd)));
    }
}

class Tiles {
public:
    void configure(int tokens) {
        num_tokens_[0] = tokens < kTileRows ? tokens : kTileRows;
        num_tokens_[1] = tokens - num_tokens_[0];
    }

    void configure_one() { configure(1); }
    void load_token(const uint16_t* from) { load_tokens<0>(from); }
    template <int kIndex>
    void add_rows(const uint16_t* weights) {
        for (int row = 0; row < kTileRows; ++row)
            for (int column = 0; column < kTileColumns; ++column)
                weights_[kIndex].at[column / 2][row][column % 2] = weights[kTileColumns * row + column];
        multiply<0, kIndex>();
    }
    template <int kIndex>
    void store_row_sums(float* to) {
        store_sums<kIndex>(to, 0);
    }

    template <int kSums>
    void zero() {
        sums_[kSums] = {};
    }
    template <int kSums>
    void load_sums(const float* from, size_t stride) {
        for (int token = 0; token < num_tokens_[kSums / 2]; ++token)
            __builtin_memcpy(sums_[kSums].at[token], from + token * stride, sizeof sums_[kSums].at[token]);
    }
    template <int kSums>
    void store_sums(float* to, size_t stride) {
        for (int token = 0; token < num_tokens_[kSums / 2]; ++token)
            __builtin_memcpy(to + token * stride, sums_[kSums].at[token], sizeof sums_[kSums].at[token]);
    }
    template <int kTokens>
    void load_tokens(const uint16_t* from) {
        __builtin_memcpy(&tokens_[kTokens], from, static_cast<size_t>(num_tokens_[kTokens]) * kTileColumns * 2);
    }
    template <int kWeights>
    void load_weights(const uint16_t* from) {
        __builtin_memcpy(&weights_[kWeights], from, sizeof weights_[kWeights]);
    }
    template <int kTokens, int kWeights>
    void multiply() {
        constexpr unsigned kNearestFlushedToZero = 0x9fc0;  // rounding, flush to zero, subnormals are zero, no traps
        const unsigned settings = _mm_getcsr();
        _mm_setcsr(kNearestFlushedToZero);
        add_product(tokens_[kTokens], weights_[kWeights], num_tokens_[kTokens], sums_[2 * kTokens + kWeights]);
        _mm_setcsr(settings);
    }

private:
    SumTile sums_[4];
    TokenTile tokens_[2];
    WeightTile weights_[2];
    int num_tokens_[2] = {0, 0};
};

}  // namespace
}  // namespace kvarn::avx512_amx_emulated
