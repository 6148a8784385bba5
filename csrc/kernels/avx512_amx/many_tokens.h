// Products with many tokens: weights are unpacked a panel of up to 32 rows at a time and meet all tokens of the call.
// A sum stays in its tile register while the columns of a panel are added; between panels it waits in `out`, or beside
// it, as the float it is.
#pragma once
#include "product.h"

namespace kvarn::avx512_amx {
namespace {

// The longer a panel, the fewer times sums are loaded and stored; two of them need not stay in the first cache.
constexpr int kPanelSteps = 16;

template <class Tiles, class Format>
class ManyTokens : Product<Tiles, Format> {
    using Base = Product<Tiles, Format>;
    using Base::group_end_;
    using Base::num_steps;
    using Base::target_of;
    using Base::tile_;
    using Base::tiles_;
    using Base::unpack;
    using Base::write_rest;
    using typename Base::Target;

public:
    using Base::Base;

    void run(int group_begin) {
        group_begin_ = group_begin;
        alignas(64) uint16_t values[2][kPanelSteps * kPanelTiles * kTileValues];
        alignas(64) float rest[kRoundedTokens][kTileRows];
        const int num_blocks = (tile_.n + kTileTokens - 1) / kTileTokens;
        Coming coming{panel_at(group_begin, 0), values[0], 0, 1, 1};
        for (int i = 0; coming.panel.count > 0; ++i) {
            while (coming.num_done < coming.panel.num_tiles()) unpack_next(coming);
            const Panel panel = coming.panel, next = after(panel);
            const int pause = num_blocks * panel.count / (next.count > 0 ? next.num_tiles() : 1);
            coming = {next, values[(i + 1) % 2], 0, pause, pause};
            if (panel.row_tiles == 2) run_panel<2>(panel, values[i % 2], rest, coming);
            else run_panel<1>(panel, values[i % 2], rest, coming);
        }
        write_rest(group_begin + (group_end_ - group_begin - 1) / kTileGroups * kTileGroups, rest);
    }

private:
    // Steps [first, first + count) of up to 32 rows; count 0: there are none left.
    struct Panel {
        int group, first, count, row_tiles;
        int num_tiles() const { return count * row_tiles; }
    };

    Panel panel_at(int group, int first) const {
        const int left = num_steps() - first, count = left < kPanelSteps ? left : kPanelSteps;
        return {group, first, count > 0 ? count : 0, group + kTileGroups < group_end_ ? 2 : 1};
    }
    // Columns outside, rows inside: what the panels read of the tokens stays in the second cache.
    Panel after(const Panel& panel) const {
        const int group = panel.group + kPanelGroups;
        return group < group_end_ ? panel_at(group, panel.first) : panel_at(group_begin_, panel.first + kPanelSteps);
    }

    // The panel that comes next, unpacked tile by tile while the present one is multiplied.
    struct Coming {
        Panel panel;
        uint16_t* values;
        int num_done = 0, pause, until_next;
    };

    // Not inlined: there would be as many copies of this as of what is multiplied meanwhile.
    [[gnu::noinline]] void unpack_next(Coming& coming) const {
        const int step = coming.num_done / coming.panel.row_tiles, i = coming.num_done % coming.panel.row_tiles;
        unpack(coming.panel.group + kTileGroups * i, coming.panel.first + step,
               coming.values + kTileValues * (kPanelTiles * step + i));
        ++coming.num_done;
    }

    template <int kTokenTiles, int kRowTiles>
    void multiply(const uint16_t* tokens, size_t step_values, const uint16_t* panel, int count, const Target* targets,
                  bool is_first, Coming& coming) {
        this->template begin_sums<kTokenTiles, kRowTiles>(targets, is_first);
        for (int step = 0; step < count; ++step) {
            this->template add_step<kTokenTiles, kRowTiles>(tokens + step_values * step,
                                                            panel + kPanelTiles * kTileValues * step);
            if (--coming.until_next > 0) continue;
            coming.until_next = coming.pause;
            if (coming.num_done < coming.panel.num_tiles()) unpack_next(coming);
        }
        this->template end_sums<kTokenTiles, kRowTiles>(targets);
    }

    template <int kRowTiles>
    void run_panel(const Panel& panel, const uint16_t* values, float (*rest)[kTileRows], Coming& coming) {
        Target targets[kRowTiles];
        for (int i = 0; i < kRowTiles; ++i) targets[i] = target_of(panel.group + kTileGroups * i, rest);
        for (int token = 0; token < tile_.n; token += kTileTokens) {
            const int n = tile_.n - token < kTileTokens ? tile_.n - token : kTileTokens;
            const size_t step_values = static_cast<size_t>(n) * kTileColumns;
            const uint16_t* tokens = tile_.rounded + static_cast<size_t>(token) * tile_.k + step_values * panel.first;
            const bool is_first = panel.first == 0;
            tiles_.configure(n);
            if (n > kTileRows)
                multiply<2, kRowTiles>(tokens, step_values, values, panel.count, targets, is_first, coming);
            else multiply<1, kRowTiles>(tokens, step_values, values, panel.count, targets, is_first, coming);
            for (Target& target : targets) target.at += kTileTokens * target.stride;
        }
    }

    int group_begin_ = 0;
};

}  // namespace
}  // namespace kvarn::avx512_amx
