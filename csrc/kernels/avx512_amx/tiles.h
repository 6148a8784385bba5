// The eight tile registers of AMX, by what the products keep in them:
//   sums      0..3  16 tokens x 16 rows of float; number 2 * tokens + weights
//   tokens    4..5  16 tokens x 32 columns of bf16
//   weights   6..7  16 pairs of columns x 16 rows x 2 of bf16
// avx512_amx_emulated/tiles.h has the same struct without AMX. Written as assembly, because gcc's intrinsics neither
// take numbers of registers from templates nor say that they read and write memory.
#pragma once
#include "shape.h"

namespace kvarn::avx512_amx {
namespace {

constexpr size_t kTileStride = 64;  // bytes of a row of tokens or weights
constexpr size_t kPairSize = 4;     // of two columns of one token

class Tiles {
public:
    ~Tiles() { asm volatile("tilerelease" ::: "memory"); }

    // For blocks of so many tokens, 1 .. 32: what lies beyond is neither read nor written. Forgets all tiles.
    void configure(int tokens) {
        if (tokens == tokens_) return;
        tokens_ = tokens;
        Configuration wanted;
        const int first = tokens < kTileRows ? tokens : kTileRows;
        wanted.set(0, first), wanted.set(1, first), wanted.set(4, first);
        if (tokens > kTileRows)
            wanted.set(2, tokens - kTileRows), wanted.set(3, tokens - kTileRows), wanted.set(5, tokens - kTileRows);
        wanted.set(6, kTileRows), wanted.set(7, kTileRows);
        asm volatile("ldtilecfg %0" ::"m"(wanted));
    }

    // For one token, beside up to two tiles of weights that are first operands: 16 rows x 32 columns.
    void configure_one() {
        tokens_ = 0;
        Configuration wanted;
        wanted.set(0, kTileRows, kPairSize), wanted.set(1, kTileRows, kPairSize), wanted.set(6, kTileRows, kPairSize);
        wanted.set(4, kTileRows), wanted.set(5, kTileRows);
        asm volatile("ldtilecfg %0" ::"m"(wanted));
    }
    void load_token(const uint16_t* from) { load<6>(from, kPairSize); }
    // Adds 32 columns of 16 rows.
    template <int kIndex>
    void add_rows(const uint16_t* weights) {
        load<4 + kIndex>(weights, kTileStride);
        asm volatile("tdpbf16ps %%tmm6, %%tmm%c0, %%tmm%c1" ::"i"(4 + kIndex), "i"(kIndex));
    }
    template <int kIndex>
    void store_row_sums(float* to) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(sizeof(float)), "i"(kIndex) : "memory");
    }

    template <int kSums>
    void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(kSums));
    }
    template <int kSums>
    void load_sums(const float* from, size_t stride) {
        load<kSums>(from, stride * sizeof(float));
    }
    template <int kSums>
    void store_sums(float* to, size_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride * sizeof(float)), "i"(kSums) : "memory");
    }
    template <int kTokens>
    void load_tokens(const uint16_t* from) {
        load<4 + kTokens>(from, kTileStride);
    }
    template <int kWeights>
    void load_weights(const uint16_t* from) {
        load<6 + kWeights>(from, kTileStride);
    }
    template <int kTokens, int kWeights>
    void multiply() {
        asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(6 + kWeights), "i"(4 + kTokens),
                     "i"(2 * kTokens + kWeights));
    }

private:
    struct alignas(64) Configuration {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};

        void set(int tile, int count, size_t bytes = kTileStride) {
            row_bytes[tile] = static_cast<uint16_t>(bytes);
            rows[tile] = static_cast<uint8_t>(count);
        }
    };

    template <int kTile>
    void load(const void* from, size_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
    }

    int tokens_ = 0;
};

}  // namespace
}  // namespace kvarn::avx512_amx
