// Products with up to 32 tokens: weights are multiplied as they come from memory.
#pragma once
#include "product.h"

namespace kvarn::avx512_amx {
namespace {

constexpr int kStepsBetween = 2;  // from unpacking to multiplying, so that both run side by side
constexpr int kRingSteps = 4;

template <class Tiles, class Format>
class FewTokens : Product<Tiles, Format> {
    using Base = Product<Tiles, Format>;
    using Base::group_end_;
    using Base::num_steps;
    using Base::prefetch;
    using Base::target_of;
    using Base::tile_;
    using Base::tiles_;
    using Base::unpack;
    using Base::write_rest;
    using typename Base::Target;

public:
    using Base::Base;

    void run(int group) {
        tiles_.configure(tile_.n);
        const bool has_two = tile_.n > kTileRows;
        for (; group + kTileGroups < group_end_; group += kPanelGroups) {
            if (has_two) run_few<2, 2>(group);
            else run_few<1, 2>(group);
        }
        if (group >= group_end_) return;
        if (has_two) run_few<2, 1>(group);
        else run_few<1, 1>(group);
    }

private:
    // Up to 32 tokens: each step is unpacked once for all of them, and multiplied while the next ones are unpacked.
    template <int kTokenTiles, int kRowTiles>
    void run_few(int group) {
        alignas(64) uint16_t ring[kRingSteps][kPanelTiles * kTileValues];
        alignas(64) float rest[kTileTokens][kTileRows];
        Target targets[kRowTiles];
        for (int i = 0; i < kRowTiles; ++i) targets[i] = target_of(group + kTileGroups * i, rest);
        const size_t values = static_cast<size_t>(tile_.n) * kTileColumns;
        this->template begin_sums<kTokenTiles, kRowTiles>(targets, true);
        for (int step = 0; step < num_steps() + kStepsBetween; ++step) {
            if (step < num_steps()) {
                for (int i = 0; i < kRowTiles; ++i) {
                    prefetch(group + kTileGroups * i, step);
                    unpack(group + kTileGroups * i, step, ring[step % kRingSteps] + kTileValues * i);
                }
            }
            const int ready = step - kStepsBetween;
            if (ready >= 0)
                this->template add_step<kTokenTiles, kRowTiles>(tile_.rounded + values * ready,
                                                                ring[ready % kRingSteps]);
        }
        this->template end_sums<kTokenTiles, kRowTiles>(targets);
        write_rest(group + kTileGroups * (kRowTiles - 1), rest);
    }
};

}  // namespace
}  // namespace kvarn::avx512_amx
