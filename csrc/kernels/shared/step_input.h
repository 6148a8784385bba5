// The activations that a step of 32 columns of a product meets.
#pragma once
#include "../table.h"

namespace kvarn::shared {
namespace {

// Of neighbouring tokens from one on; see ActTile.
struct StepInput {
    const int8_t* q;
    const float* scale;
    const float* sum;
    const int32_t* minus_sums;
};

inline StepInput step_input(const ActTile& tile, int step, int t) {
    const size_t at = static_cast<size_t>(step) * tile.n + t;
    return {tile.q + at * kQuantBlock, tile.scale + at, tile.sum + at, tile.minus_sums + 2 * at};
}

}  // namespace
}  // namespace kvarn::shared
