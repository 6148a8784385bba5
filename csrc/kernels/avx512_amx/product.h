// What the products of a matrix with few and with many tokens share: packed weights by step, sums in tiles.
#pragma once
#include "nibbles.h"
#include "unpack.h"

namespace kvarn::avx512_amx {
namespace {

constexpr int kTileGroups = kTileRows / kLanes;
constexpr int kPanelTiles = 2;  // of 16 rows
constexpr int kPanelGroups = kPanelTiles * kTileGroups;

template <class Tiles, class Format>
class Product {
public:
    Product(const uint8_t* packed, const ActTile& tile, float* out, size_t out_stride, int rows, int group_end)
        : weights_(reinterpret_cast<const Packed*>(packed)), tile_(tile), out_(out), out_stride_(out_stride),
          rows_(rows < group_end * kLanes ? rows : group_end * kLanes), group_end_(group_end) {}

protected:
    using Packed = typename Format::Packed;
    static constexpr int kSteps = Format::kSteps;

    // Where the sums of 16 rows of the weights lie, a row of them for each token.
    struct Target {
        float* at;
        size_t stride;
    };

    int num_steps() const { return tile_.k / kTileColumns; }
    const Packed* blocks_of(int group) const {
        return weights_ + static_cast<size_t>(num_steps() / kSteps) * (group < group_end_ ? group : group_end_ - 1);
    }

    [[gnu::always_inline]] inline void unpack(int group, int step, uint16_t* to) const {
        unpack_tile<Format>(blocks_of(group)[step / kSteps], blocks_of(group + 1)[step / kSteps], step % kSteps, to);
    }

    // Rows of a tile that has fewer than 16 are summed in a buffer: nothing beyond them may be written.
    bool is_whole(int group) const { return (group + kTileGroups) * kLanes <= rows_; }
    Target target_of(int group, float (*rest)[kTileRows]) const {
        if (is_whole(group)) return {out_ + group * kLanes, out_stride_};
        return {rest[0], kTileRows};
    }
    // Of the last rows of the call, once they are summed.
    void write_rest(int group, const float (*rest)[kTileRows]) const {
        if (is_whole(group)) return;
        const __mmask16 valid = static_cast<__mmask16>((1u << (rows_ - group * kLanes)) - 1);
        for (int token = 0; token < tile_.n; ++token)
            _mm512_mask_storeu_ps(out_ + token * out_stride_ + group * kLanes, valid, _mm512_loadu_ps(rest[token]));
    }

    template <int kTokenTiles, int kRowTiles, class Body>
    [[gnu::always_inline]] static inline void for_sums(Body body) {
        body.template operator()<0, 0>();
        if constexpr (kRowTiles == 2) body.template operator()<0, 1>();
        if constexpr (kTokenTiles == 2) body.template operator()<1, 0>();
        if constexpr (kTokenTiles == 2 && kRowTiles == 2) body.template operator()<1, 1>();
    }

    template <int kTokenTiles, int kRowTiles>
    void begin_sums(const Target* targets, bool is_first) {
        for_sums<kTokenTiles, kRowTiles>([&]<int kTokens, int kWeights>() {
            const Target& from = targets[kWeights];
            if (is_first) tiles_.template zero<2 * kTokens + kWeights>();
            else
                tiles_.template load_sums<2 * kTokens + kWeights>(from.at + kTokens * kTileRows * from.stride,
                                                                  from.stride);
        });
    }

    template <int kTokenTiles, int kRowTiles>
    void end_sums(const Target* targets) {
        for_sums<kTokenTiles, kRowTiles>([&]<int kTokens, int kWeights>() {
            const Target& to = targets[kWeights];
            tiles_.template store_sums<2 * kTokens + kWeights>(to.at + kTokens * kTileRows * to.stride, to.stride);
        });
    }

    // Adds 32 columns; the tiles of weights are neighbours.
    template <int kTokenTiles, int kRowTiles>
    [[gnu::always_inline]] inline void add_step(const uint16_t* tokens, const uint16_t* weights) {
        tiles_.template load_tokens<0>(tokens);
        tiles_.template load_weights<0>(weights);
        tiles_.template multiply<0, 0>();
        if constexpr (kRowTiles == 2) {
            tiles_.template load_weights<1>(weights + kTileValues);
            tiles_.template multiply<0, 1>();
        }
        if constexpr (kTokenTiles == 2) {
            tiles_.template load_tokens<1>(tokens + kTileValues);
            tiles_.template multiply<1, 0>();
            if constexpr (kRowTiles == 2) tiles_.template multiply<1, 1>();
        }
    }

    // Asks for what a group reads some steps later; at its end for the beginning of the group that comes next, which
    // lies behind those that are read beside it.
    [[gnu::always_inline]] inline void prefetch(int group, int step) const {
        constexpr size_t kBytes = sizeof(Packed) / kSteps, kCacheLine = 64;
        constexpr int kStepsAhead = 2048 / kBytes;
        const bool is_next = step + kStepsAhead >= num_steps();
        const int ahead = step + kStepsAhead - (is_next ? num_steps() : 0);
        for (int g = 0; g < kTileGroups; ++g) {
            const Packed* blocks = weights_ + static_cast<size_t>(num_steps() / kSteps) *
                                                  static_cast<size_t>(group + g + (is_next ? kPanelGroups : 0));
            const auto* from = reinterpret_cast<const char*>(blocks + ahead / kSteps) + kBytes * (ahead % kSteps);
            for (size_t at = 0; at < kBytes; at += kCacheLine) __builtin_prefetch(from + at);
        }
    }

    const Packed* weights_;
    const ActTile& tile_;
    float* out_;
    size_t out_stride_;
    int rows_, group_end_;
    Tiles tiles_;
};

}  // namespace
}  // namespace kvarn::avx512_amx
