// Products of nibbles with one token.
#pragma once
#include "few_tokens.h"

namespace kvarn::avx512_amx {
namespace {

template <class Tiles, class Format>
class OneToken : Product<Tiles, Format> {
    using Base = Product<Tiles, Format>;
    using Base::blocks_of;
    using Base::group_end_;
    using Base::kSteps;
    using Base::num_steps;
    using Base::out_;
    using Base::prefetch;
    using Base::rows_;
    using Base::tile_;
    using Base::tiles_;
    using typename Base::Target;

public:
    using Base::Base;

    void run(int group) {
        tiles_.configure_one();
        for (; group + kTileGroups < group_end_; group += kPanelGroups) run_rows<2>(group);
        if (group < group_end_) run_rows<1>(group);
    }

private:
    // Steps are gathered one ahead of where they are looked up, as that is read again from memory.
    template <int kRowTiles>
    void run_rows(int group) {
        alignas(64) uint16_t ring[kRingSteps][kPanelTiles][kTileValues];
        NibbleRows rows[2][kRowTiles];
        tiles_.template zero<0>();
        if constexpr (kRowTiles == 2) tiles_.template zero<1>();
        for (int step = 0; step < num_steps() + kStepsBetween + 1; ++step) {
            const int gathered = step - 1, ready = gathered - kStepsBetween;
            for (int i = 0; i < kRowTiles && step < num_steps(); ++i) {
                const int at = group + kTileGroups * i, block = step / kSteps;
                prefetch(at, step);
                gather_step<Format>(blocks_of(at)[block], blocks_of(at + 1)[block], step % kSteps, rows[step % 2][i]);
            }
            for (int i = 0; i < kRowTiles && gathered >= 0 && gathered < num_steps(); ++i)
                look_up_tile<Format>(rows[gathered % 2][i], ring[gathered % kRingSteps][i]);
            if (ready < 0) continue;
            tiles_.load_token(tile_.rounded + kTileColumns * ready);
            tiles_.template add_rows<0>(ring[ready % kRingSteps][0]);
            if constexpr (kRowTiles == 2) tiles_.template add_rows<1>(ring[ready % kRingSteps][1]);
        }
        write<0>(group);
        if constexpr (kRowTiles == 2) write<1>(group + kTileGroups);
    }

    template <int kIndex>
    void write(int group) {
        alignas(64) float sums[kTileRows];
        tiles_.template store_row_sums<kIndex>(sums);
        const int left = rows_ - group * kLanes;
        const __mmask16 valid = static_cast<__mmask16>(left < kTileRows ? (1u << left) - 1 : 0xffff);
        _mm512_mask_storeu_ps(out_ + group * kLanes, valid, _mm512_load_ps(sums));
    }
};

}  // namespace
}  // namespace kvarn::avx512_amx
